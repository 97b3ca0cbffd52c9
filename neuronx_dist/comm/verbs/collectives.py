"""The verbs: the part of every collective that no backend changes: dims, dtypes, `out=`, recording, errors.

Every verb takes `axis`: a mesh axis name, a tuple of names (merged), a torch ProcessGroup, or a Communicator. Results
are new tensors unless `out=` says otherwise (`out` may be the input); on an axis of size 1 the input itself is
returned, and nothing is communicated or recorded. With `async_op=True` the result is a `Handle`, whose `wait()` returns
the tensor. No verb is differentiable: code that needs gradients calls `neuronx_dist.spmd`.

all_reduce, all_gather and reduce_scatter also take a list of tensors of any shapes, which travel as one collective for
each dtype, and return a list; `out` is then a list, with None for a new tensor, and `dim` may be one of dims. All ranks
pass equal lists.

Under a TorchFunctionMode, or given a tensor subclass (itself, not in a list), a verb that takes a tensor arrives there
as one call of the verb: tensor and axis (and `pairs`) by position, keywords as they were passed, without those that
equal their defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function_unary

from ...call_site import reissues
from .. import recording
from ..base import TAGS, Communicator
from ..context import AxisLike, communicator
from ..errors import ALL_RANKS, CommError
from ..ranks.rank_numbers import concrete
from .compiled import verb_operator
from .dispatch import Result, Tensors, alone, coalesced, compiled, message, run
from .operands import check_out, checked_dim, deliver, gathered_shape, scattered_first, wire_dtype
from .transformed_tensors import transforming, untransformed

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "gather_objects",
    "permute",
    "recv",
    "reduce_scatter",
    "send",
]

_Out = Any  # None, torch.Tensor, or a list of these for a list of tensors
_Dim = Any  # int; for a list of tensors a list, too


def all_reduce(
    x: torch.Tensor | Tensors,
    axis: AxisLike,
    *,
    op: str = "sum",
    reduce_dtype: torch.dtype | None = None,
    out: _Out = None,
    async_op: bool = False,
) -> Result:
    """Returns the sum (max, min) of `x` over the group. Reduced in `promote_types(x.dtype, reduce_dtype)`."""
    if has_torch_function_unary(x):
        return _hand_over(all_reduce, (x, axis), op=op, reduce_dtype=reduce_dtype, out=out, async_op=async_op)
    if isinstance(x, (list, tuple)):
        return coalesced("all_reduce", x, communicator(axis), out, async_op, op=op, reduce_dtype=reduce_dtype)
    comm = communicator(axis)
    if comm.size == 1:
        return alone(comm, x, out, async_op)
    if is_dynamo_compiling():
        return compiled(_all_reduce, x, comm, (op, reduce_dtype), out, async_op)
    if transforming():
        x = untransformed(x, "all_reduce")
    dtype = wire_dtype(x, op, reduce_dtype)
    check_out(out, x.shape, comm, "all_reduce")
    direct = out is not None and dtype == out.dtype and out.is_contiguous()
    if direct and out is not None:
        buffer = out.detach() if out is x else out.detach().copy_(x.detach())
    elif dtype != x.dtype:
        buffer = x.detach().to(dtype, memory_format=torch.contiguous_format)
    else:
        buffer = x.detach().clone(memory_format=torch.contiguous_format)
    if recording.recorders:
        recording.note(comm, "all_reduce", x, op=op, dtype=dtype)
    result_dtype = x.dtype
    return run(
        comm,
        "all_reduce",
        x,
        lambda: comm.start_all_reduce(buffer, op),
        async_op,
        lambda: out if direct and out is not None else deliver(buffer, out, result_dtype),
    )


def all_gather(
    x: torch.Tensor | Tensors,
    axis: AxisLike,
    *,
    dim: _Dim = 0,
    out: _Out = None,
    async_op: bool = False,
) -> Result:
    """Returns the concatenation along `dim` of every rank's `x`: `[.., n, ..] -> [.., size*n, ..]`.

    `x` has the same shape on every rank.
    """
    if has_torch_function_unary(x):
        return _hand_over(all_gather, (x, axis), dim=dim, out=out, async_op=async_op)
    if isinstance(x, (list, tuple)):
        return coalesced("all_gather", x, communicator(axis), out, async_op, dim=dim)
    comm = communicator(axis)
    if comm.size == 1:
        return alone(comm, x, out, async_op)
    if is_dynamo_compiling():
        return compiled(_all_gather, x, comm, (dim,), out, async_op)
    if transforming():
        x = untransformed(x, "all_gather")
    dim = checked_dim(x, dim, "all_gather")
    x = x.detach()
    shape = gathered_shape(x, dim, comm)
    leading = dim == 0 or x.shape[:dim].numel() == 1  # here the stacked buffer is the concatenation
    check_out(out, shape, comm, "all_gather")
    direct = out is not None and leading and out.is_contiguous() and out.dtype == x.dtype
    if direct and out is not None:
        gathered = out.detach().view(comm.size, *x.shape)
    else:
        gathered = x.new_empty((comm.size, *x.shape))
    if recording.recorders:
        recording.note(comm, "all_gather", x, scale=comm.size)
    x = x.contiguous()

    def finish() -> torch.Tensor:
        if direct and out is not None:
            return out
        result = gathered.view(shape) if leading else gathered.movedim(0, dim).reshape(shape).contiguous()
        return deliver(result, out, x.dtype)

    return run(comm, "all_gather", x, lambda: comm.start_all_gather(gathered, x), async_op, finish)


def reduce_scatter(
    x: torch.Tensor | Tensors,
    axis: AxisLike,
    *,
    dim: _Dim = 0,
    op: str = "sum",
    reduce_dtype: torch.dtype | None = None,
    out: _Out = None,
    async_op: bool = False,
) -> Result:
    """Returns this rank's piece, along `dim`, of the sum (max, min) of `x`: `[.., size*n, ..] -> [.., n, ..]`.

    Raises:
        ValueError: the dim does not divide by the size of the group.
    """
    if has_torch_function_unary(x):
        return _hand_over(
            reduce_scatter, (x, axis), dim=dim, op=op, reduce_dtype=reduce_dtype, out=out, async_op=async_op
        )
    if isinstance(x, (list, tuple)):
        return coalesced(
            "reduce_scatter", x, communicator(axis), out, async_op, dim=dim, op=op, reduce_dtype=reduce_dtype
        )
    comm = communicator(axis)
    if comm.size == 1:
        return alone(comm, x, out, async_op)
    if is_dynamo_compiling():
        return compiled(_reduce_scatter, x, comm, (dim, op, reduce_dtype), out, async_op)
    if transforming():
        x = untransformed(x, "reduce_scatter")
    dtype = wire_dtype(x, op, reduce_dtype)
    scattered = scattered_first(x.detach(), dim, comm, "reduce_scatter").contiguous()
    if dtype != x.dtype:
        scattered = scattered.to(dtype)
    if recording.recorders:
        recording.note(comm, "reduce_scatter", x, op=op, dtype=dtype)
    check_out(out, scattered.shape[1:], comm, "reduce_scatter")
    direct = out is not None and out.is_contiguous() and out.dtype == dtype
    piece = out.detach() if direct and out is not None else scattered.new_empty(scattered.shape[1:])
    result_dtype = x.dtype
    return run(
        comm,
        "reduce_scatter",
        x,
        lambda: comm.start_reduce_scatter(piece, scattered, op),
        async_op,
        lambda: out if direct and out is not None else deliver(piece, out, result_dtype),
    )


def all_to_all(
    x: torch.Tensor,
    axis: AxisLike,
    *,
    split_dim: int = 0,
    concat_dim: int = 0,
    out: torch.Tensor | None = None,
    async_op: bool = False,
) -> Result:
    """Splits `x` along `split_dim`, sends piece i to rank i, and concatenates received pieces along `concat_dim`."""
    if has_torch_function_unary(x):
        return _hand_over(all_to_all, (x, axis), split_dim=split_dim, concat_dim=concat_dim, out=out, async_op=async_op)
    comm = communicator(axis)
    if comm.size == 1:
        return alone(comm, x, out, async_op)
    if is_dynamo_compiling():
        return compiled(_all_to_all, x, comm, (split_dim, concat_dim), out, async_op)
    if transforming():
        x = untransformed(x, "all_to_all")
    concat_dim = checked_dim(x, concat_dim, "all_to_all")
    scattered = scattered_first(x.detach(), split_dim, comm, "all_to_all").contiguous()
    if recording.recorders:
        recording.note(comm, "all_to_all", x, messages=comm.size - 1)
    gathered = torch.empty_like(scattered)
    shape = list(scattered.shape[1:])
    shape[concat_dim] *= comm.size
    check_out(out, shape, comm, "all_to_all")
    return run(
        comm,
        "all_to_all",
        x,
        lambda: comm.start_all_to_all(gathered, scattered),
        async_op,
        lambda: deliver(gathered.movedim(0, concat_dim).reshape(shape).contiguous(), out, x.dtype),
    )


def permute(
    x: torch.Tensor,
    axis: AxisLike,
    pairs: Sequence[tuple[int, int]],
    *,
    out: torch.Tensor | None = None,
    async_op: bool = False,
) -> Result:
    """Sends `x` from `src` to `dst` for each pair of group indices; ranks that are no destination receive zeros."""
    if has_torch_function_unary(x):
        return _hand_over(permute, (x, axis, pairs), out=out, async_op=async_op)
    comm = communicator(axis)
    pairs = [(int(src), int(dst)) for src, dst in pairs]
    for side in (0, 1):
        indices = [pair[side] for pair in pairs]
        if len(set(indices)) != len(indices) or not set(indices) <= set(range(comm.size)):
            raise ValueError(
                f"permute over {comm.axis}: pairs {pairs} must use each index in 0..{comm.size - 1} at most once as "
                "source and once as destination"
            )
    check_out(out, x.shape, comm, "permute")
    if comm.size == 1:
        return alone(comm, x if pairs else torch.zeros_like(x), out, async_op)
    if is_dynamo_compiling():
        return compiled(_permute, x, comm, (pairs,), out, async_op)
    if transforming():
        x = untransformed(x, "permute")
    x = x.detach().contiguous()
    if recording.recorders:
        recording.note(comm, "permute", x)
    result = torch.empty_like(x)
    return run(
        comm,
        "permute",
        x,
        lambda: comm.start_permute(result, x, pairs),
        async_op,
        lambda: deliver(result, out, x.dtype),
    )


def broadcast(
    x: torch.Tensor, axis: AxisLike, *, src: int = 0, out: torch.Tensor | None = None, async_op: bool = False
) -> Result:
    """Returns `x` of the rank with group index `src`, on every rank; elsewhere `x` determines shape and dtype only."""
    if has_torch_function_unary(x):
        return _hand_over(broadcast, (x, axis), src=src, out=out, async_op=async_op)
    comm = communicator(axis)
    _index(comm, src, "broadcast", "src")
    if comm.size == 1:
        return alone(comm, x, out, async_op)
    if is_dynamo_compiling():
        return compiled(_broadcast, x, comm, (src,), out, async_op)
    if transforming():
        x = untransformed(x, "broadcast")
    check_out(out, x.shape, comm, "broadcast")
    direct = out is not None and out.is_contiguous() and out.dtype == x.dtype
    if direct and out is not None:
        buffer = out.detach() if out is x else out.detach().copy_(x.detach())
    else:
        buffer = x.detach().clone(memory_format=torch.contiguous_format)
    if recording.recorders:
        recording.note(comm, "broadcast", x)
    return run(
        comm,
        "broadcast",
        x,
        lambda: comm.start_broadcast(buffer, src),
        async_op,
        lambda: out if direct and out is not None else deliver(buffer, out, x.dtype),
    )


def send(x: torch.Tensor, axis: AxisLike, *, dst: int, tag: int = 0, async_op: bool = False) -> Result:
    """Sends `x` to the rank with group index `dst`, which calls `recv` with an equal shape and dtype. Returns `x`."""
    if has_torch_function_unary(x):
        return _hand_over(send, (x, axis), dst=dst, tag=tag, async_op=async_op)
    comm = communicator(axis)
    _peer(comm, dst, tag, "send", "dst")
    if transforming():
        x = untransformed(x, "send")
    buffer = (x.detach() if x.requires_grad else x).contiguous()
    if recording.recorders:
        recording.note(comm, "send", x, messages=1)
    return message(comm, "send", x, lambda: comm.start_send(buffer, dst, tag), async_op)


def recv(out: torch.Tensor, axis: AxisLike, *, src: int, tag: int = 0, async_op: bool = False) -> Result:
    """Fills `out`, contiguous and of the shape and dtype sent, with the tensor of the rank with group index `src`."""
    if has_torch_function_unary(out):
        return _hand_over(recv, (out, axis), src=src, tag=tag, async_op=async_op)
    comm = communicator(axis)
    _peer(comm, src, tag, "recv", "src")
    if transforming():
        out = untransformed(out, "recv")
    if not out.is_contiguous():
        raise ValueError(
            f"recv over {comm.axis}: out must be contiguous, got strides {out.stride()} for shape {tuple(out.shape)}"
        )
    if recording.recorders:
        recording.note(comm, "recv", out)
    return message(comm, "recv", out, lambda: comm.start_recv(out.detach(), src, tag), async_op)


def barrier(axis: AxisLike = "world") -> None:
    """Waits until every rank of the group has called this."""
    _gather("barrier", None, communicator(axis))


def gather_objects(obj: Any, axis: AxisLike = "world") -> list[Any]:
    """Returns every rank's (small, picklable) object, in the order of the group. Not for the hot path."""
    return _gather("gather_objects", obj, communicator(axis))


def broadcast_object(obj: Any, axis: AxisLike = "world", src: int = 0) -> Any:
    """Returns the object of the rank with group index `src`, on every rank. Not for the hot path."""
    comm = communicator(axis)
    _index(comm, src, "broadcast_object", "src")
    return _gather("broadcast_object", obj if concrete(comm.rank) == src else None, comm)[src]


def _gather(verb: str, obj: Any, comm: Communicator) -> list[Any]:
    """Gathers objects with the name of the verb that each rank has called, which must be one."""
    if comm.size == 1:
        return [obj]
    gathered = comm.waited("gather_objects", None, lambda: comm.gather_objects((verb, obj)))
    for rank, (other, _) in zip(comm.ranks, gathered):
        if other != verb:
            raise CommError(f"{comm.describe(verb)}: the ranks disagree: rank {rank} called {other}. {ALL_RANKS}")
    return [gathered_object for _, gathered_object in gathered]


@reissues
def _hand_over(verb: Callable[..., Result], args: tuple[Any, ...], **keywords: Any) -> Result:
    """Passes a call, with the arguments as written, to the active modes and tensor subclasses."""
    defaults = _DEFAULTS[verb]
    non_defaults = {key: value for key, value in keywords.items() if defaults.get(key, _REQUIRED) is not value}
    return handle_torch_function(verb, args[:1], *args, **non_defaults)


def _index(comm: Communicator, index: int, verb: str, name: str) -> None:
    if not 0 <= index < len(comm.ranks):
        raise ValueError(f"{verb} over {comm.axis}: {name}={index} is not a group index (0..{comm.size - 1})")


def _peer(comm: Communicator, index: int, tag: int, verb: str, name: str) -> None:
    _index(comm, index, verb, name)
    if not 0 <= tag < TAGS:
        raise ValueError(f"{verb} over {comm.axis}: tag={tag} is out of range (0..{TAGS - 1})")
    if index == comm.rank:
        raise ValueError(f"{verb} over {comm.axis}: {name}={index} is this rank itself")


_REQUIRED = object()
_DEFAULTS: dict[Callable[..., Result], dict[str, Any]] = {
    verb: dict(verb.__kwdefaults__ or {})
    for verb in (all_reduce, all_gather, reduce_scatter, all_to_all, permute, broadcast, send, recv)
}


_DTYPE = "ScalarType? reduce_dtype"
_all_reduce = verb_operator(all_reduce, f"str op, {_DTYPE}", lambda x, comm, **_: x.shape)
_all_gather = verb_operator(
    all_gather, "int dim", lambda x, comm, dim: gathered_shape(x, checked_dim(x, dim, "all_gather"), comm)
)
_reduce_scatter = verb_operator(
    reduce_scatter,
    f"int dim, str op, {_DTYPE}",
    lambda x, comm, dim, **_: scattered_first(x, dim, comm, "reduce_scatter").shape[1:],
)
_all_to_all = verb_operator(
    all_to_all,
    "int split_dim, int concat_dim",
    lambda x, comm, split_dim, concat_dim: gathered_shape(
        scattered_first(x, split_dim, comm, "all_to_all")[0], checked_dim(x, concat_dim, "all_to_all"), comm
    ),
)
_permute = verb_operator(permute, "int[][] pairs", lambda x, comm, pairs: x.shape)
_broadcast = verb_operator(broadcast, "int src", lambda x, comm, src: x.shape)
