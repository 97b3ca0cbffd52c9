"""The handlers of torch's functions, one family a file. Importing this package registers them.

pointwise.py  one element by itself, with broadcasting    queries.py  shapes, numbers, hooks, backward
attention.py  scaled_dot_product_attention              multihead.py  nn.MultiheadAttention
matmul.py     linear, matmul, bmm, einsum                 reduce.py   sums, means, norms over any dims
views.py      reshape, transpose, expand, select       spatial.py  convolutions, pooling, padding, interpolate
normalise.py  layer, rms, group, instance, batch norm  softmax.py  softmax and its relatives; running sums
losses.py     means over all ranks' elements           dropout.py  dropout, and random numbers in place
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
    "spatial",
    "views",
]
