"""Other packages' import names, so that programs written for them run on this one.

spmd_types.py  installs the import name `spmd_types`; checker.py: its `spmd_types.checker`
"""
