"""The handlers of torch's functions, one family a file. Importing this package registers them.

pointwise.py  one element by itself, with broadcasting    queries.py  shapes, numbers, hooks, backward
attention.py  scaled_dot_product_attention              multihead.py  nn.MultiheadAttention
matmul.py     linear, matmul, bmm, einsum                 reduce.py   sums, means, norms over any dims
views.py      reshape, transpose, expand, select       spatial.py  convolutions, pooling, padding, interpolate
normalise.py  layer, rms, group, instance, batch norm  softmax.py  softmax and its relatives; running sums
losses.py     means over all ranks' elements           dropout.py  dropout, and random numbers in place
pointwise.py  one element by itself, with broadcasting    queries.py    shapes, numbers, hooks, backward
attention.py  scaled_dot_product_attention                multihead.py  nn.MultiheadAttention
matmul.py     linear, matmul, bmm, einsum                 reduce.py     sums, means, norms over any dims
views.py      reshape, transpose, expand, select          spatial.py    convolutions, pooling, padding, interpolate
select.py     topk, max and argmax of a dim, sort         indexing.py   x[index], gather, embedding, masks
scatter.py    scatter, index_add, x[..] = y               rearrange.py  cat, roll, flip, repeat, unfold, tril
distances.py  cdist, pairwise distances
"""

from . import (
    attention,
    dropout,
    losses,
    matmul,
    multihead,
    normalise,
    pointwise,
    queries,
    reduce,
    softmax,
    distances,
    indexing,
    matmul,
    multihead,
    pointwise,
    queries,
    rearrange,
    reduce,
    scatter,
    select,
    spatial,
    views,
)

__all__ = [
    "attention",
    "dropout",
    "losses",
    "matmul",
    "multihead",
    "normalise",
    "pointwise",
    "queries",
    "reduce",
    "softmax",
    "distances",
    "indexing",
    "matmul",
    "multihead",
    "pointwise",
    "queries",
    "rearrange",
    "reduce",
    "scatter",
    "select",
    "spatial",
    "views",
]
optimizers.py fused steps, gradient scaling
"""

from . import attention, matmul, multihead, optimizers, pointwise, queries, reduce, spatial, views

__all__ = ["attention", "matmul", "multihead", "optimizers", "pointwise", "queries", "reduce", "spatial", "views"]
