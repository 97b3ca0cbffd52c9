"""Gradients after backward: what has been done to them, their reduction over the mesh, their norm.

gradient.py    one parameter's gradient: where it is, and what it has been through in this step
reduce.py      sums and means over the mesh; the number of items that a loss is divided by
buckets.py     many tensors as a few large collectives
norm.py        the norm of the whole model's gradients, and clipping
"""
