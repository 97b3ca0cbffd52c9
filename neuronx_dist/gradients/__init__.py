"""Gradients after backward: their reduction over the mesh, the record of it, their norm.

gradient.py    one parameter's gradient: the attribute that holds it, its dtype, its axes
state.py       the reductions that a gradient has been through in this step
reduction_plan.py  all gradients of a model, in the groups that are reduced together; planned once
buckets.py     many tensors as a few large collectives
reduce.py      sums and means over the mesh; the number of items that a loss is divided by
accumulation.py   `no_sync`: several backwards before one reduction
in_backward.py reductions that start while backward runs
data_mean.py   the mean over the data, a bucket at a time, in backward too
guards.py      refusal of torch's clipping and optimizers where one rank's gradients are not enough
elementwise.py the optimizers whose update of a shard needs the rest of the parameter
norm.py        the norm of the whole model's gradients, and clipping
"""

from __future__ import annotations

from ..lazy_names import lazy_names

__getattr__ = lazy_names(__name__, {"guards": "gradients"})
