"""Rules of decompositions and solvers of matrices in batches: dims before the last two are independent.

`torch.linalg.inv`, `det`, `matrix_exp` and other functions of several names are in `matmul.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_internals.tensors import DisableTorchFunction
from .spec import Spec, operands, rule
from .views import ViewLabels

__all__: list[str] = []

_WHY = "it is a dim of the matrix"
_l = torch.linalg


def _of_batches(function: Callable[..., Any], *vectors: int) -> Callable[..., Spec]:
    """Builder of the spec of a function of matrices; `vectors`: operands that have one dim of a matrix only, or may."""

    def spec(*args: Any, **kwargs: Any) -> Spec:
        xs = operands(args, kwargs)
        ends = [2] * len(xs)
        for index in vectors:
            ends[index] = 1 if _is_vector(xs, index) else 2
        batch = torch.broadcast_shapes(*(x.shape[: x.dim() - end] for x, end in zip(xs, ends)))
        builder = ViewLabels()
        shared = builder.dims(batch)
        ins = []
        for x, end in zip(xs, ends):
            sizes = x.shape[: x.dim() - end]
            padded = [1] * (len(batch) - len(sizes)) + list(sizes)
            dims = [dim if size == whole else () for size, whole, dim in zip(padded, batch, shared)]
            last = [(builder.new(size, _WHY),) for size in x.shape[x.dim() - end :]]
            ins.append([*dims[len(batch) - len(sizes) :], *last])
        with DisableTorchFunction():
            results = function(*map(_without_values, args), **{k: _without_values(x) for k, x in kwargs.items()})
        outs = []
        for y in [results] if isinstance(results, Tensor) else results:
            first = shared if y.shape[: len(batch)] == batch else []
            if not first:  # qr(mode="r") has an empty result
                builder.fixed.update((label, "one of the results has no batch") for dim in shared for label in dim)
            outs.append([*first, *((builder.new(size),) for size in y.shape[len(first) :])])
        return builder.spec(ins, outs)

    return spec


def _is_vector(xs: Sequence[Tensor], index: int) -> bool:
    """Returns whether an operand is a batch of vectors, as torch decides: one dim, or the shape of its matrix' rows."""
    x, matrix = xs[index], xs[0]
    return x.dim() == 1 or (x.dim() == matrix.dim() - 1 and x.shape == matrix.shape[:-1])


def _without_values(x: Any) -> Any:
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


for _function in (
    *(_l.cholesky_ex, _l.eig, _l.eigh, _l.eigvals, _l.eigvalsh, _l.inv_ex, _l.lu, _l.lu_factor, _l.pinv),
    *(_l.qr, _l.svd, _l.svdvals, torch.cholesky_inverse, Tensor.cholesky_inverse, torch.pinverse, Tensor.pinverse),
):
    rule(_function)(_of_batches(_function))
for _function in (torch.qr, Tensor.qr):  # since torch 2.15 they raise an error that names torch.linalg.qr
    rule(_function)(_of_batches(_function))
rule(_l.solve, linear=((1,),))(_of_batches(_l.solve, 1))
rule(_l.solve_triangular, linear=((1,),))(_of_batches(_l.solve_triangular))
for _function in (torch.cholesky_solve, Tensor.cholesky_solve):
    rule(_function, linear=((0,),))(_of_batches(_function))
rule(_l.lu_solve, linear=((2,),))(_of_batches(_l.lu_solve, 1))
