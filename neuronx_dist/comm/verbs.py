"""The verbs: what every collective does whatever the backend. Dims, dtypes, `out=`, recording, and errors live here.

Every verb takes `axis`: a mesh axis name, a tuple of names (merged), a torch ProcessGroup, or a Communicator. Results
are new tensors unless `out=` says otherwise (`out` may be the input); on an axis of size 1 the input itself comes back,
and nothing is communicated or recorded. With `async_op=True` the result is a `Handle`, and its `wait()` gives the
tensor. None of them is differentiable: what needs gradients calls `neuronx_dist.spmd`.

Under a TorchFunctionMode, or given a tensor subclass, a verb that takes a tensor arrives there whole, as a call of
itself: tensor and axis (and `pairs`) by position, keywords as they were given, those at their defaults left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from . import recording
from .base import Communicator, Handle, WorkLike
from .context import AxisLike, communicator
from .coordinates import plain

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

Result = Any  # torch.Tensor, or Handle with async_op=True
_OPS = ("sum", "max", "min")


def all_reduce(
    x: torch.Tensor,
    axis: AxisLike,
    *,
    op: str = "sum",
    reduce_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    async_op: bool = False,
) -> Result:
    """Sum (max, min) of `x` over the group, on every rank. Reduced in `promote_types(x.dtype, reduce_dtype)`."""
    if has_torch_function_unary(x):
        return _whole(all_reduce, (x, axis), op=op, reduce_dtype=reduce_dtype, out=out, async_op=async_op)
    comm = communicator(axis)
    if comm.size == 1:
        return _alone(comm, x, out, async_op)
    dtype = _wire_dtype(x, op, reduce_dtype)
    _check_out(out, x.shape, comm, "all_reduce")
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
    return _run(
        comm,
        "all_reduce",
        lambda: comm.start_all_reduce(buffer, op),
        async_op,
        lambda: out if direct and out is not None else _deliver(buffer, out, result_dtype),
    )


def all_gather(
    x: torch.Tensor, axis: AxisLike, *, dim: int = 0, out: torch.Tensor | None = None, async_op: bool = False
) -> Result:
    """Concatenation along `dim` of every rank's `x`, which has the same shape everywhere: `[.., n, ..] -> [.., size*n,
    ..]`.
    """
    if has_torch_function_unary(x):
        return _whole(all_gather, (x, axis), dim=dim, out=out, async_op=async_op)
    comm = communicator(axis)
    if comm.size == 1:
        return _alone(comm, x, out, async_op)
    dim = _dim(x, dim, "all_gather")
    x = x.detach()
    shape = (*x.shape[:dim], comm.size * x.shape[dim], *x.shape[dim + 1 :])
    leading = dim == 0 or x.shape[:dim].numel() == 1  # then the stacked buffer is the concatenation
    _check_out(out, shape, comm, "all_gather")
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
        result = gathered.view(shape) if leading else gathered.movedim(0, dim).reshape(shape)
        return _deliver(result, out, x.dtype)

    return _run(comm, "all_gather", lambda: comm.start_all_gather(gathered, x), async_op, finish)


def reduce_scatter(
    x: torch.Tensor,
    axis: AxisLike,
    *,
    dim: int = 0,
    op: str = "sum",
    reduce_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    async_op: bool = False,
) -> Result:
    """This rank's piece, along `dim`, of the sum (max, min) of `x` over the group: `[.., size*n, ..] -> [.., n, ..]`.

    Raises:
        ValueError: the dim does not divide by the size of the group.
    """
    if has_torch_function_unary(x):
        return _whole(reduce_scatter, (x, axis), dim=dim, op=op, reduce_dtype=reduce_dtype, out=out, async_op=async_op)
    comm = communicator(axis)
    if comm.size == 1:
        return _alone(comm, x, out, async_op)
    dtype = _wire_dtype(x, op, reduce_dtype)
    scattered = _split(x.detach(), dim, comm, "reduce_scatter").contiguous()
    if dtype != x.dtype:
        scattered = scattered.to(dtype)
    if recording.recorders:
        recording.note(comm, "reduce_scatter", x, op=op, dtype=dtype)
    _check_out(out, scattered.shape[1:], comm, "reduce_scatter")
    direct = out is not None and out.is_contiguous() and out.dtype == dtype
    piece = out.detach() if direct and out is not None else scattered.new_empty(scattered.shape[1:])
    result_dtype = x.dtype
    return _run(
        comm,
        "reduce_scatter",
        lambda: comm.start_reduce_scatter(piece, scattered, op),
        async_op,
        lambda: out if direct and out is not None else _deliver(piece, out, result_dtype),
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
    """Splits `x` along `split_dim`, sends piece i to rank i, and concatenates what comes along `concat_dim`."""
    if has_torch_function_unary(x):
        return _whole(all_to_all, (x, axis), split_dim=split_dim, concat_dim=concat_dim, out=out, async_op=async_op)
    comm = communicator(axis)
    if comm.size == 1:
        return _alone(comm, x, out, async_op)
    concat_dim = _dim(x, concat_dim, "all_to_all")
    scattered = _split(x.detach(), split_dim, comm, "all_to_all").contiguous()
    if recording.recorders:
        recording.note(comm, "all_to_all", x)
    gathered = torch.empty_like(scattered)
    shape = list(scattered.shape[1:])
    shape[concat_dim] *= comm.size
    _check_out(out, shape, comm, "all_to_all")
    return _run(
        comm,
        "all_to_all",
        lambda: comm.start_all_to_all(gathered, scattered),
        async_op,
        lambda: _deliver(gathered.movedim(0, concat_dim).reshape(shape), out, x.dtype),
    )


def permute(
    x: torch.Tensor,
    axis: AxisLike,
    pairs: Sequence[tuple[int, int]],
    *,
    out: torch.Tensor | None = None,
    async_op: bool = False,
) -> Result:
    """Sends `x` from `src` to `dst` for each pair of group indices; a rank that is no destination gets zeros."""
    if has_torch_function_unary(x):
        return _whole(permute, (x, axis, pairs), out=out, async_op=async_op)
    comm = communicator(axis)
    pairs = [(int(src), int(dst)) for src, dst in pairs]
    for side in (0, 1):
        indices = [pair[side] for pair in pairs]
        if len(set(indices)) != len(indices) or not set(indices) <= set(range(comm.size)):
            raise ValueError(
                f"permute over {comm.axis}: pairs {pairs} must use each index in 0..{comm.size - 1} at most once a side"
            )
    _check_out(out, x.shape, comm, "permute")
    if comm.size == 1:
        return _alone(comm, x if pairs else torch.zeros_like(x), out, async_op)
    x = x.detach().contiguous()
    if recording.recorders:
        recording.note(comm, "permute", x)
    result = torch.empty_like(x)
    return _run(
        comm,
        "permute",
        lambda: comm.start_permute(result, x, pairs),
        async_op,
        lambda: _deliver(result, out, x.dtype),
    )


def broadcast(
    x: torch.Tensor, axis: AxisLike, *, src: int = 0, out: torch.Tensor | None = None, async_op: bool = False
) -> Result:
    """`x` of the rank with group index `src`, on every rank; elsewhere `x` gives shape and dtype only."""
    if has_torch_function_unary(x):
        return _whole(broadcast, (x, axis), src=src, out=out, async_op=async_op)
    comm = communicator(axis)
    _index(comm, src, "broadcast", "src")
    if comm.size == 1:
        return _alone(comm, x, out, async_op)
    _check_out(out, x.shape, comm, "broadcast")
    direct = out is not None and out.is_contiguous() and out.dtype == x.dtype
    if direct and out is not None:
        buffer = out.detach() if out is x else out.detach().copy_(x.detach())
    else:
        buffer = x.detach().clone(memory_format=torch.contiguous_format)
    if recording.recorders:
        recording.note(comm, "broadcast", x)
    return _run(
        comm,
        "broadcast",
        lambda: comm.start_broadcast(buffer, src),
        async_op,
        lambda: out if direct and out is not None else _deliver(buffer, out, x.dtype),
    )


def send(x: torch.Tensor, axis: AxisLike, *, dst: int, tag: int = 0, async_op: bool = False) -> Result:
    """Sends `x` to the rank with group index `dst`, which calls `recv` with an equal shape and dtype. Returns `x`."""
    if has_torch_function_unary(x):
        return _whole(send, (x, axis), dst=dst, tag=tag, async_op=async_op)
    comm = communicator(axis)
    _peer(comm, dst, "send", "dst")
    buffer = x.detach().contiguous()
    if recording.recorders:
        recording.note(comm, "send", x)
    return _run(comm, "send", lambda: comm.start_send(buffer, dst, tag), async_op, lambda: x)


def recv(out: torch.Tensor, axis: AxisLike, *, src: int, tag: int = 0, async_op: bool = False) -> Result:
    """Fills `out`, which gives shape and dtype and is contiguous, with what the rank with group index `src` sends."""
    if has_torch_function_unary(out):
        return _whole(recv, (out, axis), src=src, tag=tag, async_op=async_op)
    comm = communicator(axis)
    _peer(comm, src, "recv", "src")
    if not out.is_contiguous():
        raise ValueError(
            f"recv over {comm.axis}: out must be contiguous, got strides {out.stride()} for shape {tuple(out.shape)}"
        )
    if recording.recorders:
        recording.note(comm, "recv", out)
    return _run(comm, "recv", lambda: comm.start_recv(out.detach(), src, tag), async_op, lambda: out)


def barrier(axis: AxisLike = "world") -> None:
    """Returns when every rank of the group has come here."""
    gather_objects(None, axis)


def gather_objects(obj: Any, axis: AxisLike = "world") -> list[Any]:
    """Every rank's (small, picklable) object, in the order of the group. Not for the hot path."""
    comm = communicator(axis)
    if comm.size == 1:
        return [obj]
    try:
        return comm.gather_objects(obj)
    except RuntimeError as error:
        comm.explain("gather_objects", error)


def broadcast_object(obj: Any, axis: AxisLike = "world", src: int = 0) -> Any:
    """The object of the rank with group index `src`, on every rank. Not for the hot path."""
    comm = communicator(axis)
    _index(comm, src, "broadcast_object", "src")
    return gather_objects(obj if plain(comm.rank) == src else None, comm)[src]


def _whole(verb: Callable[..., Result], args: tuple[Any, ...], **keywords: Any) -> Result:
    """Hands a call, as it was made, to whoever watches torch functions."""
    defaults = _DEFAULTS[verb]
    given = {key: value for key, value in keywords.items() if defaults.get(key, _REQUIRED) is not value}
    return handle_torch_function(verb, args[:1], *args, **given)


def _run(
    comm: Communicator, verb: str, start: Callable[[], WorkLike], async_op: bool, finish: Callable[[], torch.Tensor]
) -> torch.Tensor | Handle:
    try:  # a connection that is known to be broken raises at once
        work = start()
        if not async_op:
            work.wait()
    except RuntimeError as error:
        comm.explain(verb, error)
    return Handle(comm, verb, work, finish) if async_op else finish()


def _check_out(out: torch.Tensor | None, shape: Sequence[int], comm: Communicator, verb: str) -> None:
    if out is not None and tuple(out.shape) != tuple(shape):  # copy_ would broadcast
        raise ValueError(f"{verb} over {comm.axis}: out has shape {tuple(out.shape)}, the result {tuple(shape)}")


def _alone(comm: Communicator, x: torch.Tensor, out: torch.Tensor | None, async_op: bool) -> Result:
    if out is not None and out is not x:
        with torch.no_grad():
            out.copy_(x)
        x = out
    return Handle(comm, "", None, lambda: x) if async_op else x


def _deliver(value: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if out is None:
        return value if value.dtype == dtype else value.to(dtype)
    if out is not value:
        with torch.no_grad():
            out.copy_(value)
    return out


def _wire_dtype(x: torch.Tensor, op: str, reduce_dtype: torch.dtype | None) -> torch.dtype:
    if op not in _OPS:
        raise ValueError(f"op must be one of {', '.join(_OPS)}; got {op!r}")
    if reduce_dtype is None or reduce_dtype == x.dtype or op != "sum":
        return x.dtype
    return torch.promote_types(x.dtype, reduce_dtype)


def _dim(x: torch.Tensor, dim: int, verb: str) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{verb}: dim {dim} is out of range for a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()


def _split(x: torch.Tensor, dim: int, comm: Communicator, verb: str) -> torch.Tensor:
    """`[.., size*n, ..] -> [size, .., n, ..]`"""
    dim = _dim(x, dim, verb)
    if x.shape[dim] % comm.size:
        raise ValueError(
            f"{verb} over {comm.axis}: unable to create {comm.size} partitions along dim {dim} of shape "
            f"{tuple(x.shape)}: "
            f"{x.shape[dim]} is not divisible by {comm.size}"
        )
    split = x.view(*x.shape[:dim], comm.size, x.shape[dim] // comm.size, *x.shape[dim + 1 :])
    return split if dim == 0 else split.movedim(dim, 0)


def _index(comm: Communicator, index: int, verb: str, name: str) -> None:
    if not 0 <= index < comm.size:
        raise ValueError(f"{verb} over {comm.axis}: {name}={index} is not a group index (0..{comm.size - 1})")


def _peer(comm: Communicator, index: int, verb: str, name: str) -> None:
    _index(comm, index, verb, name)
    if index == comm.rank:
        raise ValueError(f"{verb} over {comm.axis}: {name}={index} is this rank itself")


_REQUIRED = object()
_DEFAULTS: dict[Callable[..., Result], dict[str, Any]] = {
    verb: dict(verb.__kwdefaults__ or {})
    for verb in (all_reduce, all_gather, reduce_scatter, all_to_all, permute, broadcast, send, recv)
}
