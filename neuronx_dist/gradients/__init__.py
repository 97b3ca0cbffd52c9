"""Gradients after backward: what has been done to them, their reduction over the mesh, their norm.

gradient.py    one parameter's gradient: where it is, its dtype, over which ranks it is reduced
state.py       which reductions a gradient has been through in this step
plan.py        all gradients of a model, in the groups that are reduced together; planned once
buckets.py     many tensors as a few large collectives
reduce.py      sums and means over the mesh; the number of items that a loss is divided by
in_backward.py reductions that start while backward runs
data_mean.py   the mean over the data, a bucket at a time, in backward too
norm.py        the norm of the whole model's gradients, and clipping
"""
