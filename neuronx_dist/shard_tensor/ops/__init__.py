"""The handlers of torch's functions, one family a file. Importing this package registers them.

pointwise.py  one element by itself, with broadcasting    queries.py  shapes, numbers, hooks, backward
attention.py  scaled_dot_product_attention              multihead.py  nn.MultiheadAttention
matmul.py     linear, matmul, bmm, einsum                 reduce.py   sums, means, norms over any dims
views.py      reshape, transpose, expand, select       spatial.py  convolutions, pooling, padding, interpolate
optimizers.py fused steps, gradient scaling
"""

from . import attention, matmul, multihead, optimizers, pointwise, queries, reduce, spatial, views

__all__ = ["attention", "matmul", "multihead", "optimizers", "pointwise", "queries", "reduce", "spatial", "views"]
