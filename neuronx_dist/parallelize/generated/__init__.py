"""Generated files: written once in a job, and reused while their dependencies are the same.

generation.py        rank 0 generates or reuses, the others wait; generated_files.py: the folder of a module
ownership.py         which folders' code runs
keys.py              the dependencies of a folder, part by part; fingerprint.py: values and source as text
saved_programs.py    recorded programs as JSON, for `ReuseType.GRAPH`
"""
