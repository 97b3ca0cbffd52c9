"""The table of typed collectives.

A row states that an operation from one type to another is a certain kernel, and its backward another row. The
operators and the errors for pairs that do not exist (`collectives.py`), the table in the documentation (`table()`) and
the checker's rules are all read from the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import comm
from ..comm import Communicator, rank_selection
from ..comm.verbs.operands import indivisible

__all__ = ["ROWS", "Key", "OperatorArguments", "Row", "table"]


class OperatorArguments(NamedTuple):
    """Arguments of one use of a row, other than its types."""

    src_dim: int  # of S(i), else the stacking dim of V
    dst_dim: int
    reduce_dtype: torch.dtype | None = None  # dtype of the reduction
    inplace: bool = False  # the memory of x may be reused
    options: Any = None  # dtypes of both directions, sizes of unequal pieces (operator_options.py)

    def reversed(self) -> OperatorArguments:
        """Returns the arguments of the backward row."""
        options = None if self.options is None else self.options.reversed()
        return OperatorArguments(self.dst_dim, self.src_dim, self.reduce_dtype, options=options)

    def batched(self) -> OperatorArguments:
        """Returns the arguments for a tensor with an additional first dim."""
        return self._replace(src_dim=self.src_dim + 1, dst_dim=self.dst_dim + 1)


Kernel = Callable[[torch.Tensor, Communicator, OperatorArguments], torch.Tensor]
Key = tuple[str, str, str]  # operation, letter of src, letter of dst


@dataclass(frozen=True)
class Row:
    """An operation from one type to another, its kernel, and the row that is its backward."""

    key: Key
    kernel: Kernel
    backward: Key
    communicates: bool
    expert: bool = False  # legal, but rarely intended: needs expert_mode=True
    instead: str = ""  # the usual intention

    def value(self, x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
        return (self.kernel if arguments.options is None else arguments.options.kernel(self))(x, c, arguments)


# Kernels. V stands for S on a separate dim: stacking is `unsqueeze` before, unbinding `squeeze` after.


def _same(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    return comm.all_reduce(x, c, reduce_dtype=arguments.reduce_dtype, out=x if arguments.inplace else None)


def _gather(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    return comm.all_gather(x, c, dim=arguments.src_dim)


def _gather_stack(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    return comm.all_gather(x.unsqueeze(arguments.src_dim), c, dim=arguments.src_dim)


def _scatter_sum(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    return comm.reduce_scatter(x, c, dim=arguments.dst_dim, reduce_dtype=arguments.reduce_dtype)


def _scatter_sum_unbind(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    _check_stacked(x, c, arguments.dst_dim)
    piece = comm.reduce_scatter(x, c, dim=arguments.dst_dim, reduce_dtype=arguments.reduce_dtype)
    return piece.squeeze(arguments.dst_dim)


def _transpose(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    return comm.all_to_all(x, c, split_dim=arguments.dst_dim, concat_dim=arguments.src_dim)


def _transpose_stack(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    _check_stacked(x, c, arguments.dst_dim)
    piece = comm.all_to_all(x, c, split_dim=arguments.dst_dim, concat_dim=arguments.dst_dim)
    return piece if arguments.src_dim == arguments.dst_dim else piece.movedim(arguments.dst_dim, arguments.src_dim)


def _own_piece(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    dim = arguments.dst_dim
    if x.shape[dim] % c.size:
        raise indivisible(x, dim, c, "convert")
    return rank_selection.own_piece(x, c, dim)


def _own_slot(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    _check_stacked(x, c, arguments.dst_dim)
    return rank_selection.own_slot(x, c, arguments.dst_dim)


def _zero_padded(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    return rank_selection.in_own_piece(x, c, arguments.src_dim)


def _zero_padded_stack(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    return _zero_padded(x.unsqueeze(arguments.src_dim), c, arguments)


def _first_rank_only(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    return rank_selection.only_on(x, c, 0)


# One row a line. Only reductions, gathers, scatters and exchanges communicate; `convert` and `reinterpret` do not.
# fmt: off
_TABLE: list[tuple[str, Kernel, str]] = [
    # operation      from to  kernel              backward row
    # Conjugate pairs: each is the other's backward.
    ("all_reduce     P R",    _sum,                "all_reduce     P R"),
    ("all_reduce     P I",    _sum,                "convert        I R"),
    ("convert        I R",    _same,               "all_reduce     P I"),
    # A V summed over the axis is reinterpret(V, P) and then the reduction.
    ("all_reduce     V R",    _sum,                "all_reduce     P R"),
    ("all_reduce     V I",    _sum,                "convert        I R"),

    ("all_gather     S R",    _gather,             "reduce_scatter P S"),
    ("reduce_scatter P S",    _scatter_sum,        "all_gather     S R"),
    ("all_gather     V R",    _gather_stack,       "reduce_scatter P V"),
    ("reduce_scatter P V",    _scatter_sum_unbind, "all_gather     V R"),
    ("reduce_scatter V S",    _scatter_sum,        "all_gather     S R"),
    ("reduce_scatter V V",    _scatter_sum_unbind, "all_gather     V R"),

    ("all_gather     S I",    _gather,             "convert        I S"),
    ("convert        I S",    _own_piece,          "all_gather     S I"),
    ("all_gather     V I",    _gather_stack,       "convert        I V"),
    ("convert        I V",    _own_slot,           "all_gather     V I"),

    ("all_to_all     S S",    _transpose,          "all_to_all     S S"),
    ("all_to_all     V V",    _transpose_stack,    "all_to_all     V V"),

    ("convert        R S",    _own_piece,          "convert        S P"),
    ("convert        S P",    _zero_padded,        "convert        R S"),
    ("convert        R V",    _own_slot,           "convert        V P"),
    ("convert        V P",    _zero_padded_stack,  "convert        R V"),
    ("convert        R P",    _first_rank_only,    "convert        R P"),
    ("convert        R I",    _same,               "convert        I P"),
    ("convert        I P",    _first_rank_only,    "convert        R I"),

    ("reinterpret    V P",    _same,               "reinterpret    R V"),
    ("reinterpret    R V",    _same,               "reinterpret    V P"),
    ("reinterpret    R P",    _same,               "reinterpret    R P"),
    ("reinterpret    I R",    _same,               "all_reduce     P I"),
    ("reinterpret    R I",    _same,               "convert        I P"),
    # I -> R -> V and I -> R -> P: in backward first that step, then the sum of P -> I.
    ("reinterpret    I V",    _same,               "all_reduce     V I"),
    ("reinterpret    I P",    _same,               "all_reduce     V I"),
]

_ON_PURPOSE = "reduce_scatter or all_gather are what usually is meant; pass expert_mode=True to do it on purpose"
# The usual intention behind a row that is legal but rare, and needs expert_mode=True.
_INSTEAD = {
    "convert        S P": _ON_PURPOSE,
    "convert        V P": _ON_PURPOSE,
    "convert        R I": "usually the value should be I from the start",
    "convert        I P": "convert(I, R) is what usually is meant",
    "reinterpret    R V": "convert(R, S(i)) splits; reinterpret keeps every copy",
    "reinterpret    R P": "convert(R, P) keeps the value; reinterpret multiplies its meaning by the size of the axis",
    "reinterpret    R I": "usually the value should be I from the start",
}
# fmt: on


def _key(text: str) -> Key:
    operation, src, dst = text.split()
    return operation, src, dst


ROWS = {
    _key(forward): Row(
        _key(forward),
        kernel,
        _key(backward),
        communicates=not forward.startswith(("convert", "reinterpret")),
        expert=forward in _INSTEAD,
        instead=_INSTEAD.get(forward, ""),
    )
    for forward, kernel, backward in _TABLE
}


def table() -> list[tuple[str, str, str, str]]:
    """Returns the rows as text: `(forward types, forward operator, backward types, backward operator)`."""
    lines = []
    for (operation, src, dst), row in ROWS.items():
        back, bsrc, bdst = row.backward
        lines.append((f"{src} -> {dst}", f"{operation}({src}, {dst})", f"{bsrc} -> {bdst}", f"{back}({bsrc}, {bdst})"))
    return lines


def _check_stacked(x: torch.Tensor, c: Communicator, dim: int) -> None:
    if x.dim() <= dim or x.shape[dim] != c.size:
        raise ValueError(
            f"a V result is unbound from dim {dim}, which must have the size of axis {c.axis} ({c.size}); got shape "
            f"{tuple(x.shape)}. To split a longer dim use S({dim})"
        )
