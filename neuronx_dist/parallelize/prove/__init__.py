"""The proof of emitted source before it is loaded: types on the whole mesh, values beside the module in one process.

verify.py             the proof of a file; boundaries.py: what pipeline stages pass on; whole_mesh.py: a step of the job
value_comparison.py   values beside the module in one process; modes.py: without random numbers, in float64
smaller.py            a smaller module in the place of one that is too large to run
emitted.py            source imported without a file
"""
