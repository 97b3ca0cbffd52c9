"""Typed, differentiable collectives, all of them rows of one table (`rows.py`).

Every operator takes `axis` (a mesh axis name, a tuple of names, a ProcessGroup or a Communicator) and the types `src`
and `dst` that its tensor has on that axis. `S(i)` concatenates or splits along dim i; plain `V` stacks or unbinds on
dim 0 (`gather_dim`, `scatter_dim`). The communicator is looked up in forward and reused in backward. Values and
gradients are those of the reference, spmd_types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function_unary

from .. import comm
from ..comm import Communicator
from ..comm.context import AxisLike
from ..comm.verbs.transformed_tensors import transforming
from ..lazy_names import lazy_names
from .errors import SpmdTypeError, dim_of
from .gathered_tensors import note_gathered
from .rows import ROWS, Key, OperatorArguments, Row
from .types import P, Shard, SpmdType, V
from .watching import no_typecheck

if TYPE_CHECKING:
    from typing import Unpack

    from .operator_options import Options

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "convert",
    "operator_dims",
    "redistribute",
    "reduce_scatter",
    "reinterpret",
]

_DEFAULT = OperatorArguments(0, 0)
_LATE = ("advice", "averaged", "dim_error", "exchange_dims", "options_of")
_late = lazy_names(__name__, {**dict.fromkeys(_LATE, "spmd.special_cases"), "linear": "spmd.linear_operator"})


class _Typed(torch.autograd.Function):
    """The one autograd function: forward runs a row's kernel, backward the row that it names."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, row: Row, communicator: Communicator, arguments: OperatorArguments
    ) -> torch.Tensor:
        ctx.row, ctx.communicator, ctx.arguments = row, communicator, arguments
        if not is_dynamo_compiling():  # which passes zeros in any case
            ctx.set_materialize_grads(False)  # or parameters before an unused result of `together` get zeros
        if arguments.inplace:
            ctx.mark_dirty(x)
        return row.value(x, communicator, arguments)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        # By `_apply`, so that the backward itself can be differentiated.
        row, arguments = ROWS[ctx.row.backward], ctx.arguments.reversed()
        if ctx.row.key != ("reinterpret", "I", "V"):
            return _apply(row, grad, ctx.communicator, arguments), None, None, None
        with no_typecheck():  # gradients of copies that were declared as shards are shards, and are summed nevertheless
            return _apply(row, grad, ctx.communicator, arguments), None, None, None


class _Use(NamedTuple):
    """One use of a row, as a linear operator on tensors."""

    row: Row
    communicator: Communicator
    arguments: OperatorArguments

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _apply(self.row, x, self.communicator, self.arguments)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self.row.value(x, self.communicator, self.arguments)

    def transposed(self) -> _Use:
        return _Use(ROWS[self.row.backward], self.communicator, self.arguments.reversed())

    def batched(self) -> _Use:
        return self._replace(arguments=self.arguments.batched())


def _apply(row: Row, x: torch.Tensor, communicator: Communicator, arguments: OperatorArguments) -> torch.Tensor:
    if communicator.size == 1:
        return _alone(row.key, x if arguments.options is None else arguments.options.cast(row, x), arguments)
    if transforming():
        return _late("linear")(_Use(row, communicator, arguments._replace(inplace=False)), x)
    if x.requires_grad and torch.is_grad_enabled():
        return _Typed.apply(x, row, communicator, arguments)
    with torch.no_grad():
        result = row.value(x, communicator, arguments)
    if row.key[0] == "all_gather":
        note_gathered(result, communicator, arguments)
    return result


def _alone(key: Key, x: torch.Tensor, arguments: OperatorArguments) -> torch.Tensor:
    """Runs an operator on an axis of one rank, where all types are equal: only the stacking dim of V changes."""
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
    stack_dim: Any = None,
    inplace: bool = False,
    options: Any = None,
) -> torch.Tensor:
    if has_torch_function_unary(x):  # recorders and the checker see the operator, not its implementation
        keywords: dict[str, Any] = {"src": src, "dst": dst}
        if function is reinterpret or function is convert:
            keywords["expert_mode"] = expert_mode
        if reduce_dtype is not None:
            keywords["reduce_dtype"] = reduce_dtype
        if inplace:
            keywords["inplace"] = True
        if function is all_to_all and stack_dim is not None:
            keywords.update(split_dim=stack_dim[0], concat_dim=stack_dim[1])
        elif stack_dim is not None:
            keywords["gather_dim" if function is all_gather else "scatter_dim"] = stack_dim
        return handle_torch_function(function, (x,), x, axis, **keywords, **(options or {}))
    key = (function.__name__, _letter(src), _letter(dst))
    if "max" in (src.reduction, dst.reduction):
        what = f"{function.__name__}({src}, {dst})"
        raise SpmdTypeError(f'{what} does not exist: operators sum; a maximum is comm.all_reduce(x, axis, op="max")')
    if src.scale or dst.scale:
        return _late("averaged")(
            _operate,
            function,
            x,
            axis,
            src,
            dst,
            reduce_dtype=reduce_dtype,
            stack_dim=stack_dim,
            inplace=inplace,
            options=options,
        )
    row = ROWS.get(key)
    if row is None:
        raise SpmdTypeError(_late("advice")(function.__name__, src, dst))
    if row.expert and not expert_mode:
        raise SpmdTypeError(f"{function.__name__}({src}, {dst}) needs expert_mode=True: {row.instead}")
    if isinstance(src, Shard) or isinstance(dst, Shard) or stack_dim or inplace or reduce_dtype is not None or options:
        dims = operator_dims(function, x, src, dst, stack_dim)
        more = _late("options_of")(row, x, dims, options) if options else None
        return _apply(row, x, comm.communicator(axis), OperatorArguments(*dims, reduce_dtype, inplace, more))
    return _apply(row, x, comm.communicator(axis), _DEFAULT)


def operator_dims(
    function: Callable[..., torch.Tensor], x: torch.Tensor, src: SpmdType, dst: SpmdType, stack_dim: Any
) -> tuple[int, int]:
    """Returns the dims of `src` and `dst`, counted from the front: those of S(dim), else the stacking dim of V.

    Args:
        stack_dim: `gather_dim` or `scatter_dim`, or `(split_dim, concat_dim)` of `all_to_all`; None: not passed.

    Raises:
        SpmdTypeError: S of a dim that `x` does not have, or that `stack_dim` contradicts.
    """
    if isinstance(stack_dim, tuple):
        return _late("exchange_dims")(x, src, dst, *stack_dim)
    gathers = function is all_gather
    shard = src if gathers else dst
    new = gathers and not isinstance(src, Shard)  # V is stacked on a new dim
    stacked = 0 if stack_dim is None else stack_dim % max(1, x.dim() + new)
    if isinstance(shard, Shard) and stack_dim is not None and stacked != (shard_dim := dim_of(shard, x.shape)):
        raise _late("dim_error")(function.__name__, x, src, dst, shard_dim, stack_dim)
    src_dim, dst_dim = (
        dim_of(spmd_type, x.shape) if isinstance(spmd_type, Shard) else stacked for spmd_type in (src, dst)
    )
    return src_dim, dst_dim


def all_reduce(
    x: torch.Tensor,
    axis: AxisLike,
    *,
    src: SpmdType = P,
    dst: SpmdType,
    reduce_dtype: torch.dtype | None = None,
    inplace: bool = False,
    **options: Unpack[Options],
) -> torch.Tensor:
    """Returns the sum of `x` over the axis: `P -> R` (backward all-reduce) or `P -> I` (backward identity).

    Args:
        src: P; V counts as P. P("avg"): the mean over the axis; the backward divides, too.
        x: any shape; contiguity is not needed.
        reduce_dtype: the sum is done in `promote_types(x.dtype, reduce_dtype)`, in backward too.
        inplace: the result reuses the memory of `x`, which is no leaf.
        options: of all operators: dtypes of both directions, sizes of unequal pieces; see `operator_options.Options`.

    Raises:
        SpmdTypeError: the pair of types is none of these; the message names the right operator.
    """
    return _operate(all_reduce, x, axis, src, dst, reduce_dtype=reduce_dtype, inplace=inplace, options=options)


def all_gather(
    x: torch.Tensor,
    axis: AxisLike,
    *,
    src: SpmdType = V,
    dst: SpmdType,
    gather_dim: int | None = None,
    reduce_dtype: torch.dtype | None = None,
    **options: Unpack[Options],
) -> torch.Tensor:
    """Returns the values of all ranks, concatenated or stacked.

    `S(i)` concatenates along dim i, `[.., n, ..] -> [.., size*n, ..]`; `V` stacks on a new dim `gather_dim` (0).
    `-> R`: backward reduce-scatter. `-> I`: backward takes this rank's piece, without communication.

    Raises:
        SpmdTypeError: S of a dim that does not exist, or that `gather_dim` contradicts.
    """
    return _operate(all_gather, x, axis, src, dst, reduce_dtype=reduce_dtype, stack_dim=gather_dim, options=options)


def reduce_scatter(
    x: torch.Tensor,
    axis: AxisLike,
    *,
    src: SpmdType = P,
    dst: SpmdType = V,
    scatter_dim: int | None = None,
    reduce_dtype: torch.dtype | None = None,
    **options: Unpack[Options],
) -> torch.Tensor:
    """Returns this rank's piece of the sum over the axis; backward all-gather.

    `S(i)` splits dim i, `[.., size*n, ..] -> [.., n, ..]`; `V` unbinds dim `scatter_dim` (0), whose size is the axis's.

    Raises:
        SpmdTypeError: S of a dim that does not exist, or that `scatter_dim` contradicts.
    """
    return _operate(
        reduce_scatter, x, axis, src, dst, reduce_dtype=reduce_dtype, stack_dim=scatter_dim, options=options
    )


def all_to_all(
    x: torch.Tensor,
    axis: AxisLike,
    *,
    src: SpmdType = V,
    dst: SpmdType = V,
    split_dim: int | None = None,
    concat_dim: int | None = None,
    **options: Unpack[Options],
) -> torch.Tensor:
    """Changes the sharded dim; the backward changes it back.

    `S(i) -> S(j)` splits dim j and concatenates dim i. `V -> V`: the rank and dim 0 change places; or, of the result,
    dim `concat_dim`, and of `x` dim `split_dim`. With `input_split_sizes`, `output_split_sizes` rows of dim 0 travel.
    """
    stack_dim = None if split_dim is concat_dim is None else (split_dim, concat_dim)
    return _operate(all_to_all, x, axis, src, dst, stack_dim=stack_dim, options=options)


def convert(
    x: torch.Tensor,
    axis: AxisLike,
    *,
    src: SpmdType,
    dst: SpmdType,
    expert_mode: bool = False,
    reduce_dtype: torch.dtype | None = None,
    **options: Unpack[Options],
) -> torch.Tensor:
    """Changes the type and keeps the global value, without communication in forward.

    `R|I -> S(i)` takes this rank's piece, `R -> P` keeps the value on the first rank and zeros elsewhere, `I -> R` is
    the identity whose backward sums. Pairs that are legal but rarely meant need `expert_mode=True`; the error says what
    to use instead.
    """
    letters = {_letter(src), _letter(dst)}
    same_dim = not (isinstance(src, Shard) and isinstance(dst, Shard)) or src.dim == dst.dim
    if src == dst or (letters <= {"V", "S"} and same_dim):
        return _unchanged(x, options)
    return _operate(convert, x, axis, src, dst, expert_mode, reduce_dtype, options=options)


def reinterpret(
    x: torch.Tensor,
    axis: AxisLike,
    *,
    src: SpmdType,
    dst: SpmdType,
    expert_mode: bool = False,
    reduce_dtype: torch.dtype | None = None,
    **options: Unpack[Options],
) -> torch.Tensor:
    """Changes the type and keeps the local data.

    The global meaning may change: `R -> P` multiplies it by the size of the axis. `R -> P("avg")` keeps it: a value
    that is equal on all ranks is its own mean.
    """
    if src == dst:
        return _unchanged(x, options)
    return _operate(reinterpret, x, axis, src, dst, expert_mode, reduce_dtype, options=options)


def redistribute(
    x: torch.Tensor, axis: AxisLike, *, src: SpmdType, dst: SpmdType, **options: Unpack[Options]
) -> torch.Tensor:
    """Changes any type into any other and keeps the global value: chooses the collective or the conversion."""
    a, b = _letter(src), _letter(dst)
    if src == dst or {a, b} == {"V", "S"}:
        return _unchanged(x, options)
    if a == "P" and b in ("R", "I"):
        return all_reduce(x, axis, src=src, dst=dst, **options)
    if a == "P":
        return reduce_scatter(x, axis, src=src, dst=dst, **options)
    if a in ("V", "S") and b in ("R", "I"):
        return all_gather(x, axis, src=src, dst=dst, **options)
    if a in ("V", "S") and b != "P":
        return all_to_all(x, axis, src=src, dst=dst, **options)
    return convert(x, axis, src=src, dst=dst, expert_mode=True, **options)


def _unchanged(x: torch.Tensor, options: Any) -> torch.Tensor:
    return x if (dtype := options.get("out_dtype") or options.get("op_dtype")) is None else x.to(dtype)


def _letter(type_: SpmdType) -> str:
    try:
        return type_.letter
    except AttributeError:
        raise SpmdTypeError(f"{type_!r} is not an SPMD type: use R, I, V, P or S(dim)") from None
