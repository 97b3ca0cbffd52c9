"""Options of the typed operators: dtypes of each direction, and pieces of unequal sizes.

Unequal pieces travel padded to the largest one in all_gather and reduce_scatter, whose sizes all ranks know; and in
all_to_all as `comm.exchange`, since a rank knows only what it sends and receives itself. Both are there on every
backend; where XLA runs one program for all ranks, unequal sizes are refused by the verb.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
import torch.nn.functional as F

from .. import comm
from ..comm import Communicator
from .errors import SpmdTypeError, dim_of
from .rows import Kernel, OperatorArguments, Row
from .types import Shard, SpmdType

__all__ = ["OperatorOptions", "Options", "exchange_dims", "options_of"]

_REDUCING = ("all_reduce", "reduce_scatter")


class Options(TypedDict, total=False):
    """Options that every operator takes, and those of single ones.

    op_dtype: dtype in which values travel and are summed.
    out_dtype: the dtype of the result. With `op_dtype` alone that dtype; with `out_dtype` alone a reduction computes in
        the input's dtype, and everything else in the smaller of the two.
    async_op: accepted for programs that pass it; the result is awaited before it is returned. What overlaps is a verb
        of `comm` with `async_op=True`, and the layers of `parallel_layers`.
    backward_options: options for the gradient, `{"op_dtype": torch.float32}`; its `out_dtype` is the dtype of `x`.
    split_sizes: of all_gather and reduce_scatter with S(dim): size of each rank's piece.
    input_split_sizes, output_split_sizes: of all_to_all along dim 0: rows sent to each rank, rows received from each.
    """

    op_dtype: torch.dtype | None
    out_dtype: torch.dtype | None
    async_op: bool
    backward_options: Mapping[str, Any] | None
    split_sizes: Sequence[int] | None
    input_split_sizes: Sequence[int] | None
    output_split_sizes: Sequence[int] | None


_DTYPES = ("op_dtype", "out_dtype", "async_op", "backward_options")
_TAKEN = {
    "all_gather": (*_DTYPES, "split_sizes"),
    "reduce_scatter": (*_DTYPES, "split_sizes"),
    "all_to_all": (*_DTYPES, "input_split_sizes", "output_split_sizes"),
}


@dataclass(frozen=True)
class OperatorOptions:
    """Options of one use of a row.

    Attributes:
        op_dtype, out_dtype: as passed; None: not passed.
        backward: options of the backward, as passed.
        input_dtype: the dtype of `x`, which the gradient gets.
        sizes: sizes of the pieces; of an exchange those sent.
        received: of an exchange: the sizes received.
    """

    op_dtype: torch.dtype | None
    out_dtype: torch.dtype | None
    backward: Mapping[str, Any]
    input_dtype: torch.dtype
    sizes: tuple[int, ...] | None = None
    received: tuple[int, ...] | None = None

    def reversed(self) -> OperatorOptions:
        """Returns the options of the backward row."""
        backward = self.backward
        return replace(
            self,
            op_dtype=backward.get("op_dtype"),
            out_dtype=backward.get("out_dtype") or self.input_dtype,
            backward=backward.get("backward_options") or {},
            input_dtype=self.out_dtype or self.op_dtype or self.input_dtype,
            sizes=self.received or self.sizes,
            received=self.sizes if self.received else None,
        )

    def dtypes(self, row: Row, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Returns the dtype of the operation and that of its result, for an operand of `dtype`."""
        if self.op_dtype is not None:
            return self.op_dtype, self.out_dtype or self.op_dtype
        if self.out_dtype is None:
            return dtype, dtype
        operation, src, dst = row.key
        narrows = operation in _REDUCING or (operation == "convert" and src in "RI" and dst in "VS")
        return dtype if narrows else min(dtype, self.out_dtype, key=lambda d: d.itemsize), self.out_dtype

    def cast(self, row: Row, x: torch.Tensor) -> torch.Tensor:
        """Returns `x` in the dtype of the result, by way of that of the operation."""
        op_dtype, out_dtype = self.dtypes(row, x.dtype)
        return x.to(op_dtype).to(out_dtype)

    def kernel(self, row: Row) -> Kernel:
        """Returns the row's kernel with these options."""
        compute = row.kernel if self.sizes is None else _UNEQUAL[row.key[0], row.key[2]]

        def kernel(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
            op_dtype, out_dtype = self.dtypes(row, x.dtype)
            return compute(x.to(op_dtype), c, arguments).to(out_dtype)

        return kernel


def options_of(row: Row, x: torch.Tensor, dims: tuple[int, int], options: Mapping[str, Any]) -> OperatorOptions:
    """Makes the options of one use of a row from keywords.

    Raises:
        TypeError: the operator takes no such option.
        SpmdTypeError: sizes that do not fit `x`, or types that have no unequal pieces.
    """
    name = row.key[0]
    for keywords, where in ((options, ""), (options.get("backward_options") or {}, " in backward_options")):
        unknown = sorted(set(keywords) - set(_TAKEN.get(name, _DTYPES)))
        if unknown:
            allowed = ", ".join(_TAKEN.get(name, _DTYPES))
            raise TypeError(f"{name}() takes no {', '.join(unknown)}{where}: its options are {allowed}")
    sizes, received = options.get("split_sizes"), None
    if options.get("input_split_sizes") is not None or options.get("output_split_sizes") is not None:
        sizes, received = options.get("input_split_sizes"), options.get("output_split_sizes")
        if sizes is None or received is None:
            raise TypeError(f"{name}(): input_split_sizes and output_split_sizes are passed together")
        _check_rows(row, x, dims, sizes)
    elif sizes is not None and "S" not in row.key[1:]:
        raise SpmdTypeError(
            f"{name}({row.key[1]}, {row.key[2]}) with split_sizes",
            "V is stacked, one slice for each rank: only pieces of a dim have sizes",
            repairs=["src=S(dim)" if name == "all_gather" else "dst=S(dim)"],
            rule="split_sizes",
        )
    return OperatorOptions(
        options.get("op_dtype"),
        options.get("out_dtype"),
        options.get("backward_options") or {},
        x.dtype,
        None if sizes is None else tuple(map(int, sizes)),
        None if received is None else tuple(map(int, received)),
    )


def _check_rows(row: Row, x: torch.Tensor, dims: tuple[int, int], sizes: Sequence[int]) -> None:
    if dims != (0, 0):
        why = f"rows of dim 0 travel, so that src and dst are V or S(0); the dims are {dims[0]} and {dims[1]}"
    elif sum(sizes) != x.shape[0]:
        why = f"input_split_sizes {list(sizes)} are {sum(sizes)} rows together, and x has {x.shape[0]}"
    else:
        return
    raise SpmdTypeError(f"all_to_all of a tensor {list(x.shape)} in unequal pieces", why, rule="split_sizes")


def exchange_dims(
    x: torch.Tensor, src: SpmdType, dst: SpmdType, split_dim: int | None, concat_dim: int | None
) -> tuple[int, int]:
    """Returns the dims of all_to_all that `operator_dims` returns: the concatenated one, and the split one.

    Raises:
        SpmdTypeError: S(i) to S(j) splits dim j and concatenates dim i, and the argument names another dim.
    """
    dims = []
    for spmd_type, name, passed in ((src, "concat_dim", concat_dim), (dst, "split_dim", split_dim)):
        dim = (passed or 0) % max(1, x.dim())
        if isinstance(spmd_type, Shard):
            expected = dim_of(spmd_type, x.shape)
            if passed is not None and dim != expected:
                raise SpmdTypeError(
                    f"all_to_all of a tensor {list(x.shape)}, src={src}, dst={dst}, {name}={passed}",
                    f"S(i) to S(j) splits dim j and concatenates dim i: {name} is {expected}",
                    repairs=[f"leave {name} out"],
                    rule="dim",
                )
            dim = expected
        dims.append(dim)
    return dims[0], dims[1]


# Kernels of unequal pieces.


def _checked(sizes: Sequence[int], c: Communicator, name: str, actual: int, expected: int | None = None) -> None:
    if len(sizes) != c.size:
        raise SpmdTypeError(f"{name} over {c.axis}: {len(sizes)} sizes {list(sizes)} for {c.size} ranks")
    expected = sizes[int(c.rank)] if expected is None else expected
    if actual != expected:
        raise SpmdTypeError(
            f"{name} over {c.axis}: sizes {list(sizes)}, and x has {actual} positions where rank {int(c.rank)} of the "
            f"group has {expected}"
        )


def _padded(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, size - x.shape[dim]])


def _gather_pieces(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    sizes, dim = arguments.options.sizes, arguments.src_dim
    _checked(sizes, c, "all_gather", x.shape[dim])
    gathered = comm.all_gather(_padded(x, dim, max(sizes)), c, dim=dim)
    pieces = gathered.split(max(sizes), dim) if max(sizes) else [x] * len(sizes)
    return torch.cat([piece.narrow(dim, 0, size) for piece, size in zip(pieces, sizes)], dim)


def _scatter_pieces(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    sizes, dim = arguments.options.sizes, arguments.dst_dim
    _checked(sizes, c, "reduce_scatter", x.shape[dim], sum(sizes))
    padded = torch.cat([_padded(piece, dim, max(sizes)) for piece in x.split(sizes, dim)], dim)
    piece = comm.reduce_scatter(padded, c, dim=dim, reduce_dtype=arguments.reduce_dtype)
    return piece.narrow(dim, 0, sizes[int(c.rank)]).contiguous()


def _own_piece(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    sizes, dim = arguments.options.sizes, arguments.dst_dim
    _checked(sizes, c, "convert", x.shape[dim], sum(sizes))
    rank = int(c.rank)
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank]).contiguous()


def _exchange_rows(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    sizes, received = arguments.options.sizes, arguments.options.received
    for counts in (sizes, received):
        if len(counts) != c.size:
            raise SpmdTypeError(f"all_to_all over {c.axis}: {len(counts)} sizes {list(counts)} for {c.size} ranks")
    result = x.new_empty(sum(received), *x.shape[1:])
    comm.exchange(list(x.contiguous().split(sizes)), list(result.split(received)), c)
    return result


_UNEQUAL: dict[tuple[str, str], Kernel] = {
    **dict.fromkeys([("all_gather", "R"), ("all_gather", "I")], _gather_pieces),
    ("reduce_scatter", "S"): _scatter_pieces,
    ("convert", "S"): _own_piece,
    **dict.fromkeys([("all_to_all", "S"), ("all_to_all", "V")], _exchange_rows),
}
