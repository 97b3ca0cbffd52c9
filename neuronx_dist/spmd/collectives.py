"""Typed, differentiable collectives, all of them rows of one table.

A row says: this operation, from this type to that type, is this kernel forward, and backward it is that other row. The
operators, the errors for pairs that do not exist, the table in the documentation (`table()`) and, later, the checker's
rules are all read from the same rows.

Every operator takes `axis` (a mesh axis name, a tuple of names, a ProcessGroup or a Communicator) and the types `src`
and `dst` that its tensor has on that axis. `S(i)` concatenates or splits along dim i; plain `V` stacks or unbinds on
dim 0 (`gather_dim`, `scatter_dim`). The communicator is taken in forward and kept for backward. Values and gradients:
reference spmd_types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from .. import comm
from ..comm import Communicator, select
from ..comm.context import AxisLike
from ..comm.operands import indivisible
from ..comm.transforms import transforming
from .errors import SpmdTypeError, dim_of
from .linear_operator import linear
from .types import P, R, Shard, SpmdType, V
from .watching import no_typecheck

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "convert",
    "operator_dims",
    "redistribute",
    "reduce_scatter",
    "reinterpret",
    "table",
]


class OperatorArguments(NamedTuple):
    """What one use of a row is told beside its types."""

    src_dim: int  # of S(i), else where V stacks
    dst_dim: int
    reduce_dtype: torch.dtype | None = None  # to reduce in
    inplace: bool = False  # x's memory may be reused

    def reversed(self) -> OperatorArguments:
        """Those of the row that is the backward."""
        return OperatorArguments(self.dst_dim, self.src_dim, self.reduce_dtype)

    def batched(self) -> OperatorArguments:
        """Those for a tensor with one dim more, in front."""
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
    expert: bool = False  # legal, but rarely what is meant: needs expert_mode=True
    instead: str = ""  # what usually is meant instead


# Kernels. V stands for S on a dim of its own: stacking is `unsqueeze` before, unbinding `squeeze` after.


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
    return select.own_piece(x, c, dim)


def _own_slot(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    _check_stacked(x, c, arguments.dst_dim)
    return select.own_slot(x, c, arguments.dst_dim)


def _zero_padded(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    return select.in_own_piece(x, c, arguments.src_dim)


def _zero_padded_stack(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    return _zero_padded(x.unsqueeze(arguments.src_dim), c, arguments)


def _first_rank_only(x: torch.Tensor, c: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    return select.only_on(x, c, 0)


# One row a line. What is not a reduction, gather, scatter or exchange (`convert`, `reinterpret`) does not communicate.
# fmt: off
_TABLE: list[tuple[str, Kernel, str]] = [
    # operation      from to  kernel              the row that is its backward
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
# What usually is meant instead of a row that is legal and rare: it needs expert_mode=True.
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
_DEFAULT = OperatorArguments(0, 0)


def table() -> list[tuple[str, str, str, str]]:
    """The rows as text: `(forward types, forward operator, backward types, backward operator)`."""
    lines = []
    for (operation, src, dst), row in ROWS.items():
        back, bsrc, bdst = row.backward
        lines.append((f"{src} -> {dst}", f"{operation}({src}, {dst})", f"{bsrc} -> {bdst}", f"{back}({bsrc}, {bdst})"))
    return lines


class _Typed(torch.autograd.Function):
    """The one autograd function: forward runs a row's kernel, backward the row that it names."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, row: Row, communicator: Communicator, arguments: OperatorArguments
    ) -> torch.Tensor:
        ctx.row, ctx.communicator, ctx.arguments = row, communicator, arguments
        if arguments.inplace:
            ctx.mark_dirty(x)
        return row.kernel(x, communicator, arguments)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        # Through `_apply`, so that the backward can be differentiated in its turn.
        row, arguments = ROWS[ctx.row.backward], ctx.arguments.reversed()
        if ctx.row.key != ("reinterpret", "I", "V"):
            return _apply(row, grad, ctx.communicator, arguments), None, None, None
        with no_typecheck():  # of copies that were declared to be shards the gradients are shards, and yet are summed
            return _apply(row, grad, ctx.communicator, arguments), None, None, None


class _Use(NamedTuple):
    """One use of a row, as a linear operator on tensors."""

    row: Row
    communicator: Communicator
    arguments: OperatorArguments

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _apply(self.row, x, self.communicator, self.arguments)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self.row.kernel(x, self.communicator, self.arguments)

    def transposed(self) -> _Use:
        return _Use(ROWS[self.row.backward], self.communicator, self.arguments.reversed())

    def batched(self) -> _Use:
        return self._replace(arguments=self.arguments.batched())


def _apply(row: Row, x: torch.Tensor, communicator: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    if communicator.size == 1:
        return _alone(row.key, x, arguments)
    if transforming():
        return linear(_Use(row, communicator, arguments._replace(inplace=False)), x)
    if x.requires_grad and torch.is_grad_enabled():
        return _Typed.apply(x, row, communicator, arguments)
    with torch.no_grad():
        return row.kernel(x, communicator, arguments)


def _alone(key: Key, x: torch.Tensor, arguments: OperatorArguments) -> torch.Tensor:
    """On an axis of one rank all types are one; only V's stacking dim comes and goes."""
    operation, src, dst = key
    if operation == "reinterpret" or operation == "all_reduce" or (operation == "all_to_all" and src == "S"):
        return x
    if operation == "all_to_all":
        return x if arguments.src_dim == arguments.dst_dim else x.movedim(arguments.dst_dim, arguments.src_dim)
    if src == "V" and operation in ("all_gather", "convert"):
        return x.unsqueeze(arguments.src_dim)
    if dst == "V" and operation in ("reduce_scatter", "convert"):
        return x.squeeze(arguments.dst_dim)
    return x


def _operate(
    function: Callable[..., torch.Tensor],
    x: torch.Tensor,
    axis: AxisLike,
    src: SpmdType,
    dst: SpmdType,
    expert_mode: bool = True,
    reduce_dtype: torch.dtype | None = None,
    stack_dim: int | None = None,
    inplace: bool = False,
) -> torch.Tensor:
    if has_torch_function_unary(x):  # recorders and the checker see the operator, not its inside
        keywords: dict[str, Any] = {"src": src, "dst": dst}
        if function is reinterpret or function is convert:
            keywords["expert_mode"] = expert_mode
        if reduce_dtype is not None:
            keywords["reduce_dtype"] = reduce_dtype
        if inplace:
            keywords["inplace"] = True
        if stack_dim is not None:
            keywords["gather_dim" if function is all_gather else "scatter_dim"] = stack_dim
        return handle_torch_function(function, (x,), x, axis, **keywords)
    key = (function.__name__, _letter(src), _letter(dst))
    if "max" in (src.reduction, dst.reduction):
        what = f"{function.__name__}({src}, {dst})"
        raise SpmdTypeError(f'{what} does not exist: operators sum; a maximum is comm.all_reduce(x, axis, op="max")')
    if src.scale or dst.scale:
        return _averaged(function, x, axis, src, dst, reduce_dtype=reduce_dtype, stack_dim=stack_dim, inplace=inplace)
    row = ROWS.get(key)
    if row is None:
        raise SpmdTypeError(_advice(function.__name__, src, dst))
    if row.expert and not expert_mode:
        raise SpmdTypeError(f"{function.__name__}({src}, {dst}) needs expert_mode=True: {row.instead}")
    if isinstance(src, Shard) or isinstance(dst, Shard) or stack_dim or inplace or reduce_dtype is not None:
        dims = operator_dims(function, x, src, dst, stack_dim)
        return _apply(row, x, comm.communicator(axis), OperatorArguments(*dims, reduce_dtype, inplace))
    return _apply(row, x, comm.communicator(axis), _DEFAULT)


def operator_dims(
    function: Callable[..., torch.Tensor], x: torch.Tensor, src: SpmdType, dst: SpmdType, stack_dim: int | None
) -> tuple[int, int]:
    """The dims of `src` and `dst`, counted from the front: of S(dim), else where V is stacked.

    Args:
        stack_dim: `gather_dim` or `scatter_dim`; None: not given.

    Raises:
        SpmdTypeError: S of a dim that `x` does not have, or that `stack_dim` contradicts.
    """
    gathers = function is all_gather
    shard, option = (src, "gather_dim") if gathers else (dst, "scatter_dim")
    new = gathers and not isinstance(src, Shard)  # V is stacked on a new dim
    stacked = 0 if stack_dim is None else stack_dim % max(1, x.dim() + new)
    if isinstance(shard, Shard) and stack_dim is not None and stacked != (own := dim_of(shard, x.shape)):
        raise SpmdTypeError(
            f"{function.__name__} of a tensor {list(x.shape)}, src={src}, dst={dst}, {option}={stack_dim}",
            f"{shard} {'concatenates' if gathers else 'splits'} dim {own}, and {option} names dim {stack_dim}",
            repairs=[f"leave {option} out", f"S({stack_dim}) in place of {shard}"],
            rule="dim",
        )
    src_dim, dst_dim = (dim_of(each, x.shape) if isinstance(each, Shard) else stacked for each in (src, dst))
    return src_dim, dst_dim


def _averaged(
    function: Callable[..., torch.Tensor], x: torch.Tensor, axis: AxisLike, src: SpmdType, dst: SpmdType, **options: Any
) -> torch.Tensor:
    """An operator from P("avg"), which divides the sum by the size of the axis, or to it from R, its own mean."""
    if function is reinterpret and (src, dst) == (R, P("avg")):
        return _operate(function, x, axis, R, P)
    if src != P("avg") or dst.scale or function not in (all_reduce, reduce_scatter):
        raise SpmdTypeError(
            f'{function.__name__}({src}, {dst}) does not exist: all_reduce and reduce_scatter take P("avg"), and '
            'reinterpret(R, P("avg")) gives it; else divide or multiply by comm.size(axis)'
        )
    if not (x.is_floating_point() or x.is_complex()):
        raise SpmdTypeError(f"{function.__name__}({src}, {dst}) of {x.dtype}: a mean is no integer, sum and divide")
    count = comm.size(axis)
    if count > 1:  # before the sum, which could overflow
        x = x.div_(count) if options.get("inplace") else x / count
    return _operate(function, x, axis, P, dst, **options)


def all_reduce(
    x: torch.Tensor,
    axis: AxisLike,
    *,
    src: SpmdType = P,
    dst: SpmdType,
    reduce_dtype: torch.dtype | None = None,
    inplace: bool = False,
) -> torch.Tensor:
    """Sum of `x` over the axis: `P -> R` (backward all-reduce) or `P -> I` (backward identity).

    Args:
        src: P; V is taken as P. P("avg"): the mean over the axis, and the backward divides too.
        x: any shape; contiguity is not needed.
        reduce_dtype: the sum is done in `promote_types(x.dtype, reduce_dtype)`, in backward too.
        inplace: the result takes the memory of `x`, which is no leaf.

    Raises:
        SpmdTypeError: the pair of types is not one of these; the message names the operator that is meant.
    """
    return _operate(all_reduce, x, axis, src, dst, reduce_dtype=reduce_dtype, inplace=inplace)


def all_gather(
    x: torch.Tensor,
    axis: AxisLike,
    *,
    src: SpmdType = V,
    dst: SpmdType,
    gather_dim: int | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The values of all ranks side by side.

    `S(i)` concatenates along dim i, `[.., n, ..] -> [.., size*n, ..]`; `V` stacks on a new dim `gather_dim` (0).
    `-> R`: backward reduce-scatter. `-> I`: backward takes the own piece, without communication.

    Raises:
        SpmdTypeError: S of a dim that there is not, or that `gather_dim` contradicts.
    """
    return _operate(all_gather, x, axis, src, dst, reduce_dtype=reduce_dtype, stack_dim=gather_dim)


def reduce_scatter(
    x: torch.Tensor,
    axis: AxisLike,
    *,
    src: SpmdType = P,
    dst: SpmdType = V,
    scatter_dim: int | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The own piece of the sum over the axis; backward all-gather.

    `S(i)` splits dim i, `[.., size*n, ..] -> [.., n, ..]`; `V` unbinds dim `scatter_dim` (0), whose size is the axis's.

    Raises:
        SpmdTypeError: S of a dim that there is not, or that `scatter_dim` contradicts.
    """
    return _operate(reduce_scatter, x, axis, src, dst, reduce_dtype=reduce_dtype, stack_dim=scatter_dim)


def all_to_all(x: torch.Tensor, axis: AxisLike, *, src: SpmdType = V, dst: SpmdType = V) -> torch.Tensor:
    """Exchanges the dim that is sharded; backward the other way round.

    `S(i) -> S(j)` splits dim j and concatenates dim i. `V -> V`: the rank and dim 0 change places.
    """
    return _operate(all_to_all, x, axis, src, dst)


def convert(
    x: torch.Tensor,
    axis: AxisLike,
    *,
    src: SpmdType,
    dst: SpmdType,
    expert_mode: bool = False,
    reduce_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Another type for the same global value, without communication forward.

    `R|I -> S(i)` takes the own piece, `R -> P` keeps the value on the first rank and zeros elsewhere, `I -> R` is the
    identity whose backward sums. Pairs that are legal but rarely meant need `expert_mode=True`; the error says what to
    use instead.
    """
    letters = {_letter(src), _letter(dst)}
    same_dim = not (isinstance(src, Shard) and isinstance(dst, Shard)) or src.dim == dst.dim
    if src == dst or (letters <= {"V", "S"} and same_dim):
        return x
    return _operate(convert, x, axis, src, dst, expert_mode, reduce_dtype)


def reinterpret(
    x: torch.Tensor,
    axis: AxisLike,
    *,
    src: SpmdType,
    dst: SpmdType,
    expert_mode: bool = False,
    reduce_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Another type for the same local data, unchanged.

    The global meaning may change: `R -> P` multiplies it by the size of the axis. `R -> P("avg")` keeps it: what is the
    same everywhere is its own mean.
    """
    if src == dst:
        return x
    return _operate(reinterpret, x, axis, src, dst, expert_mode, reduce_dtype)


def redistribute(x: torch.Tensor, axis: AxisLike, *, src: SpmdType, dst: SpmdType) -> torch.Tensor:
    """From any type to any other with the global value kept: chooses the collective or the conversion."""
    a, b = _letter(src), _letter(dst)
    if src == dst or {a, b} == {"V", "S"}:
        return x
    if a == "P":
        if b in ("R", "I"):
            return all_reduce(x, axis, src=src, dst=dst)
        return reduce_scatter(x, axis, src=src, dst=dst)
    if a in ("V", "S"):
        if b in ("R", "I"):
            return all_gather(x, axis, src=src, dst=dst)
        if b in ("V", "S"):
            return all_to_all(x, axis, src=src, dst=dst)
    return convert(x, axis, src=src, dst=dst, expert_mode=True)


def _letter(type_: SpmdType) -> str:
    try:
        return type_.letter
    except AttributeError:
        raise SpmdTypeError(f"{type_!r} is not an SPMD type: use R, I, V, P or S(dim)") from None


def _check_stacked(x: torch.Tensor, c: Communicator, dim: int) -> None:
    if x.dim() <= dim or x.shape[dim] != c.size:
        raise ValueError(
            f"a V result is unbound from dim {dim}, which must have the size of axis {c.axis} ({c.size}); got shape "
            f"{tuple(x.shape)}. To split a longer dim use S({dim})"
        )


def _advice(operation: str, src: SpmdType, dst: SpmdType) -> str:
    """What is wrong with an illegal pair, and what it probably means."""
    legal = ", ".join(f"({s}, {d})" for (name, s, d) in ROWS if name == operation)
    why = _why(operation, src, dst)
    text = f"{operation}({src}, {dst}) does not exist: {why}{_instead(src, dst)}"
    return f"{text}. {operation} takes {legal}"


def _why(operation: str, src: SpmdType, dst: SpmdType) -> str:
    a, b = _letter(src), _letter(dst)
    reduces = operation in ("all_reduce", "reduce_scatter")
    if a in "RI" and reduces:
        return f"a {a} value is the same on all ranks already, and a sum multiplies it by their number: drop it; "
    if a in "RI" and operation in ("all_gather", "all_to_all"):
        return f"a {a} value is whole on every rank already; "
    if a == "S" and reduces:
        return "the ranks hold pieces, and a sum adds them up; "
    if a == "P" and operation in ("all_gather", "all_to_all"):
        return "the ranks hold summands, and pieces of summands are not pieces of the sum; "
    if operation in ("all_reduce", "all_gather") and b not in "RI":
        return f"what it gives is the same on all ranks, so dst is R or I and not {b}; "
    if operation in ("reduce_scatter", "all_to_all"):
        return f"what it gives is another piece on every rank, so dst is V or S(dim) and not {b}; "
    if operation == "reinterpret":
        return "it keeps each rank's data, which is not what makes the one of the other; "
    return "it does not communicate; "


def _instead(src: SpmdType, dst: SpmdType) -> str:
    """How one type becomes another."""
    a, b = _letter(src), _letter(dst)
    same_dim = isinstance(src, Shard) and isinstance(dst, Shard) and src.dim == dst.dim
    if same_dim or (a == b and a != "S"):
        return f"it is {dst} already, so leave the call out" + (", or reduce it: dst=R or dst=I" if a == "P" else "")
    if a == "P":
        return f"use {'all_reduce' if b in 'RI' else 'reduce_scatter'}(x, axis, dst={dst})"
    if {a, b} == {"V", "S"}:
        return f"use convert(x, axis, src={src}, dst={dst}): the data is the same"
    if a in "VS" and b in "RI":
        summed = f", or all_reduce(x, axis, src=V, dst={dst}) if the values are to be added up"
        return f"use all_gather(x, axis, src={src}, dst={dst}){summed if a == 'V' else ''}"
    if a == b == "S":
        return f"use all_to_all(x, axis, src={src}, dst={dst})"
    if (a, b) == ("V", "P"):
        return "use reinterpret(x, axis, src=V, dst=P) if the ranks hold summands"
    expert = ", expert_mode=True" if ROWS["convert", a, b].expert else ""
    return f"use convert(x, axis, src={src}, dst={dst}{expert})"
