"""Common code of the verbs: `run`, and its substitutes for one rank, compiled code and lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import recording
from ..base import Communicator, Handle, WorkLike, Works
from ..health.waiting import operand_of
from .compiled import TracedHandle
from .operands import check_out, checked_dim, deliver, gathered_shape, scattered_first, wire_dtype
from .transformed_tensors import transforming, untransformed

__all__ = ["alone", "coalesced", "compiled", "message", "run"]

Result = Any  # torch.Tensor, a list of tensors for a list, or Handle with async_op=True
Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]


def run(
    comm: Communicator,
    verb: str,
    x: torch.Tensor | Tensors,
    start: Callable[[], WorkLike],
    async_op: bool,
    finish: Callable[[], Any],
) -> Result:
    if async_op:
        work = comm.waited(verb, x, start)  # a broken connection raises at once
        return Handle(comm, verb, work, finish, operand_of(x))
    comm.waited(verb, x, lambda: start().wait())
    if recording.recorders:
        recording.note(comm, "end:" + verb, x)
    return finish()


def message(comm: Communicator, verb: str, x: torch.Tensor, start: Callable[[], WorkLike], async_op: bool) -> Result:
    """Runs a send or a receive of `x` and returns `x`, with less overhead than `run`: a pipeline step has many."""
    if async_op:
        return Handle(comm, verb, comm.waited(verb, x, start), None, x, x)
    return run(comm, verb, x, start, False, lambda: x)


def compiled(
    operator: Callable[..., torch.Tensor],
    x: torch.Tensor,
    comm: Communicator,
    arguments: tuple[Any, ...],
    out: torch.Tensor | None,
    async_op: bool,
) -> Result:
    """Calls the operator that stands for a verb in compiled code."""
    result = operator(x.detach(), comm.key, *arguments)
    if out is not None:
        check_out(out, result.shape, comm, "a compiled collective")
        with torch.no_grad():
            out.copy_(result)
        result = out
    return TracedHandle(result) if async_op else result


def alone(comm: Communicator, x: torch.Tensor, out: torch.Tensor | None, async_op: bool) -> Result:
    if out is not None and out is not x:
        with torch.no_grad():
            out.copy_(x)
        x = out
    return Handle(comm, "", None, lambda: x) if async_op else x


def coalesced(
    name: str,
    xs: Tensors,
    comm: Communicator,
    out: Sequence[torch.Tensor | None] | None,
    async_op: bool,
    *,
    dim: int | Sequence[int] = 0,
    op: str = "sum",
    reduce_dtype: torch.dtype | None = None,
) -> Result:
    """Runs a verb of several tensors: one collective for each dtype on the wire. `dim`: of all, or of each tensor."""
    if transforming():
        xs = [untransformed(x, name) for x in xs]
    if out is not None and len(out) != len(xs):
        raise ValueError(f"{name} over {comm.axis}: out has {len(out)} tensors, but the input has {len(xs)}")
    if comm.size == 1 or not xs:
        inputs = [alone(comm, x, None if out is None else out[index], False) for index, x in enumerate(xs)]
        return Handle(comm, "", None, lambda: inputs) if async_op else inputs
    by_dtype: dict[tuple[torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = {}
    given = [dim] * len(xs) if isinstance(dim, int) else dim
    dims: list[int] = []
    outs = [None] * len(xs) if out is None else out
    direct: list[torch.Tensor | None] = []  # outputs that a backend may fill
    for index, x in enumerate(xs):
        wire, shape = x.detach(), tuple(x.shape)
        dims.append(checked_dim(x, given[index], name) if name == "all_gather" else 0)
        if name == "all_gather":
            shape = gathered_shape(x, dims[-1], comm)
        elif name == "reduce_scatter":
            wire = scattered_first(wire, given[index], comm, name)
            shape = tuple(wire.shape[1:])
        check_out(outs[index], shape, comm, name)
        wire = wire.to(wire_dtype(x, op, reduce_dtype))
        fits = (y := outs[index]) is not None and y.dtype == wire.dtype and y.is_contiguous() and not dims[-1]
        direct.append(y.detach() if y is not None and fits else None)
        by_dtype.setdefault((wire.dtype, wire.device), []).append((index, wire))
    dtypes = [x.dtype for x in xs]
    results: list[Any] = [None] * len(xs)

    def start() -> WorkLike:
        works = []
        for members in by_dtype.values():
            wires = [wire for _, wire in members]
            if recording.recorders:
                gather = name == "all_gather"
                recording.note(comm, name, wires, op=None if gather else op, scale=comm.size if gather else 1)
            work, parts = comm.start_coalesced(name, wires, op, [direct[index] for index, _ in members])
            works.append(work)
            for (index, _), result in zip(members, parts):
                results[index] = result
        return Works(works)

    def finish() -> list[torch.Tensor]:  # references none of the tensors that were sent
        values = list(results)
        for i, (value, out, dim) in enumerate(zip(results, outs, dims)):
            if out is not None and value is direct[i]:
                values[i] = out
            else:
                whole = value.movedim(0, dim).flatten(dim, dim + 1).contiguous() if name == "all_gather" else value
                values[i] = deliver(whole, out, dtypes[i])
        return values

    return run(comm, name, xs, start, async_op, finish)
