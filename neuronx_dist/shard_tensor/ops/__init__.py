"""The handlers of torch's functions, one family a file. Importing this package registers them.

pointwise.py   one element by itself, with broadcasting    queries.py    shapes, numbers, hooks, backward
attention.py   scaled_dot_product_attention                multihead.py  nn.MultiheadAttention
matmul.py      linear, matmul, bmm, einsum                 reduce.py     sums, means, norms over any dims
views.py       reshape, transpose, expand, select          spatial.py    convolutions, pooling, padding, interpolate
normalise.py   layer, rms, group, instance, batch norm     softmax.py    softmax and its relatives; running sums
losses.py      means over all ranks' elements              dropout.py    dropout, and random numbers in place
select.py      topk, max and argmax of a dim, sort         indexing.py   x[index], gather, embedding, masks
scatter.py     scatter, index_add, x[..] = y               rearrange.py  cat, roll, flip, repeat, unfold, tril
optimizers.py  fused steps, gradient scaling               distances.py  cdist, pairwise distances
tensor_parallel.py  parallel layers, operators of spmd     factories.py  like another tensor: random, new_zeros
one_exchange.py  windows of a list of layers after one exchange
fourier.py     Fourier transforms over several dims, of which some are sharded
collectives.py  torch.distributed's, on equal parts
composed.py    functions that are made of others          numerics.py   integrals, derivatives, statistics, norms
diagonals.py   diagonals, trace, block_diag               low_level.py  native norms, backward and copying forms
sets.py        runs of equal values, membership, counts   least_squares.py  linalg.lstsq
strides.py     as_strided
"""

from . import (
    attention,
    collectives,
    composed,
    diagonals,
    distances,
    dropout,
    factories,
    fourier,
    indexing,
    least_squares,
    losses,
    low_level,
    matmul,
    multihead,
    normalise,
    numerics,
    optimizers,
    pointwise,
    queries,
    rearrange,
    reduce,
    scatter,
    select,
    sets,
    softmax,
    spatial,
    strides,
    tensor_parallel,
    views,
)

__all__ = [
    "attention",
    "collectives",
    "composed",
    "diagonals",
    "distances",
    "dropout",
    "factories",
    "fourier",
    "indexing",
    "least_squares",
    "losses",
    "low_level",
    "matmul",
    "multihead",
    "normalise",
    "numerics",
    "optimizers",
    "pointwise",
    "queries",
    "rearrange",
    "reduce",
    "scatter",
    "select",
    "sets",
    "softmax",
    "tensor_parallel",
    "spatial",
    "strides",
    "views",
]
