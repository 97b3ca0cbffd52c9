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


def _of_batches(
    function: Callable[..., Any],
    *vectors: int,
    rows: int | None = None,
    columns: int | None = None,
    tolerances: bool = False,
) -> Callable[..., Spec]:
    """Builder of the spec of a function of matrices.

    Args:
        function: returns the results, of tensors without values.
        vectors: operands that may have one dim of a matrix only.
        rows: the operand that always has one dim: pivots, or factors of reflections.
        columns: the operand whose last dim is that of the result: columns are independent of one another.
        tolerances: all operands but the first have one number for each matrix.
    """

    def spec(*args: Any, **kwargs: Any) -> Spec:
        xs = operands(args, kwargs)
        ends = [2] * len(xs)
        for index in vectors:
            ends[index] = 1 if _is_vector(xs, index) else 2
        if rows is not None:
            ends[rows] = 1
        if tolerances:
            ends[1:] = [0] * (len(xs) - 1)
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
        if columns is not None and ends[columns] == 2 and kwargs.get("left", True):
            label = ins[columns][-1][0]
            del builder.fixed[label], builder.sizes[outs[0][-1][0]]
            outs[0][-1] = (label,)
        return builder.spec(ins, outs)

    return spec


def _is_vector(xs: Sequence[Tensor], index: int) -> bool:
    """Returns whether an operand is a batch of vectors, as torch decides: one dim, or the shape of its matrix' rows."""
    x, matrix = xs[index], xs[0]
    return x.dim() == 1 or (x.dim() == matrix.dim() - 1 and x.shape == matrix.shape[:-1])


def _without_values(x: Any) -> Any:
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


for _function in (
    *(_l.cholesky_ex, _l.eig, _l.eigh, _l.eigvals, _l.eigvalsh, _l.inv_ex, _l.lu, _l.lu_factor),
    *(_l.qr, _l.svd, _l.svdvals, torch.cholesky_inverse, Tensor.cholesky_inverse, torch.pinverse, Tensor.pinverse),
    *(_l.lu_factor_ex, _l.ldl_factor, _l.ldl_factor_ex, _l.cond, torch.svd, Tensor.svd),
    *(torch.triangular_solve, Tensor.triangular_solve),
):
    rule(_function)(_of_batches(_function))
for _function in (_l.pinv, _l.matrix_rank):
    rule(_function)(_of_batches(_function, tolerances=True))
for _function in (torch.qr, Tensor.qr):  # since torch 2.15 they raise an error that names torch.linalg.qr
    rule(_function)(_of_batches(_function))
for _function in (torch.lu, Tensor.lu):
    rule(_function, name="lu")(_of_batches(_function))
rule(torch.geqrf, Tensor.geqrf)(_of_batches(lambda x: (x, x[..., 0, : min(x.shape[-2:])])))
rule(_l.solve, linear=((1,),))(_of_batches(_l.solve, 1, columns=1))
rule(_l.solve_ex)(_of_batches(_l.solve_ex, 1))
rule(_l.solve_triangular, linear=((1,),))(_of_batches(_l.solve_triangular, columns=1))
for _function in (torch.cholesky_solve, Tensor.cholesky_solve):
    rule(_function, linear=((0,),))(_of_batches(_function, columns=0))
rule(_l.lu_solve, linear=((2,),))(_of_batches(_l.lu_solve, rows=1, columns=2))
for _function in (torch.lu_solve, Tensor.lu_solve):
    rule(_function, linear=((0,),))(_of_batches(_function, rows=2, columns=0))
rule(_l.ldl_solve, linear=((2,),))(_of_batches(_l.ldl_solve, rows=1, columns=2))
rule(torch.lu_unpack)(_of_batches(torch.lu_unpack, rows=1))
for _function in (_l.householder_product, torch.orgqr, Tensor.orgqr):
    rule(_function)(_of_batches(_function, rows=1))
for _function in (torch.ormqr, Tensor.ormqr):
    rule(_function, linear=((2,),))(_of_batches(_function, rows=1))
