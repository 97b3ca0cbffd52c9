"""The optimizer gate: refuses a step on gradients that are partial sums.

A forgotten reduction leaves partial sums: over dp or cp, over tp where parameters see a shard of the sequence, over the
stages that hold a tied weight. The gate stands before every optimizer's step, the user's own and those inside of
wrappers. The step itself is judged as other code is (`optimizer_steps.py`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...gradients.gradient import DATA_AXES, parameters_of
from ...optimizer import NeuronZero1Optimizer
from ...optimizer.shards import ParameterShard
from ...spmd.axes import atoms_of
from ...spmd.errors import SpmdTypeError
from ...spmd.tensor_type import NAME, TensorType, note_of, type_of, write
from ...spmd.types import SAME, VARYING, P, SpmdType, V
from ...weights.shard_spec import spec_of
from ..types.axis_powers import AxisNumber, plain
from ..types.mode import SpmdTypeMode
from .optimizer_steps import OptimizerStep, gradient_read_by

__all__ = ["check_buffers", "gated"]


@contextmanager
def gated(mode: SpmdTypeMode) -> Iterator[None]:
    """Refuses optimizers' steps, in this thread, on gradients that are not reduced; runs others under the checker."""
    thread = threading.get_ident()
    steps: list[OptimizerStep] = []

    def is_judged() -> bool:
        return threading.get_ident() == thread and not mode.paused

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_judged():
            return
        if isinstance(optimizer, NeuronZero1Optimizer) and optimizer.base_optimizer is None:
            with mode.pause():  # lazy_init has put off making the shards
                optimizer.init_zero()
        _check(mode, optimizer)
        if not isinstance(optimizer, NeuronZero1Optimizer):
            for group in optimizer.param_groups:  # a learning rate may grow with the ranks: that is meant
                group.update({key: plain(value) for key, value in group.items() if isinstance(value, AxisNumber)})
            steps.append(OptimizerStep(mode, optimizer))

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_judged() and steps and steps[-1].optimizer is optimizer:
            steps.pop().end()

    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    except SpmdTypeError as error:
        if not steps:
            raise
        raise steps[-1].named(error).with_traceback(error.__traceback__) from None
    finally:
        for hook in hooks:
            hook.remove()
        while steps:
            steps.pop().end()


def _check(mode: SpmdTypeMode, optimizer: Any) -> None:
    shards = {id(s.param): s for s in optimizer.shards} if isinstance(optimizer, NeuronZero1Optimizer) else {}
    for param in parameters_of(optimizer):
        grad = gradient_read_by(optimizer, param)
        if grad is None:
            continue
        shard = shards.get(id(param))
        sharded = atoms_of(shard.group, mode.mesh) if shard is not None else ()
        replicated = atoms_of(shard.replicas, mode.mesh) if shard is not None else ()
        reduced = (*sharded, *replicated)  # over which the optimizer reduces itself
        averaged = _averaged_by(shard, reduced, mode) if shard is not None else ()
        grad_type, note = type_of(grad), mode.note(param, "the optimizer's step")
        if grad_type is None or note is None:
            continue
        for axis in mode.axes_of(grad_type):
            spmd_type, parameter_type = grad_type.get(axis), note.type.get(axis)
            if spmd_type is None:
                continue
            equal_parameter = parameter_type is not None and parameter_type.letter in SAME
            differs = spmd_type.letter == "P" or (spmd_type.letter in VARYING and equal_parameter)
            if differs and axis not in reduced:
                raise _refused(mode, optimizer, param, grad, axis, spmd_type)
            expected = 1 if axis in averaged and not (axis in reduced and spmd_type.letter in SAME) else 0
            if spmd_type.scale != expected and spmd_type.letter != "0":
                raise _scale_refused(mode, optimizer, param, grad, axis, spmd_type, expected)
        if shard is not None and not shard.is_param:
            _declare_master(shard.master, note.type, sharded, mode)


def _averaged_by(shard: ParameterShard, reduced: tuple[str, ...], mode: SpmdTypeMode) -> tuple[str, ...]:
    """The axes by whose sizes a ZeRO-1 optimizer divides a gradient; none with `average=False`."""
    data = atoms_of(DATA_AXES, mode.mesh)
    count = math.prod(mode.mesh.size(axis) for axis in DATA_AXES) if mode.mesh is not None else 1
    return tuple({*reduced, *data}) if math.isclose(shard.scale * count, 1.0) else ()


def _declare_master(master: torch.Tensor, type_: TensorType, sharded: tuple[str, ...], mode: SpmdTypeMode) -> None:
    """Declares the type of a master, which holds other rows of its parameter on each rank of the sharding group."""
    types: dict[str, SpmdType] = {axis: V if kind.letter == "S" else kind for axis, kind in type_}
    types.update(dict.fromkeys(sharded, V))
    write(master, TensorType.of(types, type_.rest), None, mode.session)


def _scale_refused(
    mode: SpmdTypeMode,
    optimizer: Any,
    param: torch.Tensor,
    grad: torch.Tensor,
    axis: str,
    spmd_type: SpmdType,
    expected: int,
) -> SpmdTypeError:
    """The error for a gradient that is too large, or too small, by a power of the size of an axis."""
    name = param.__dict__.get(NAME, "a parameter")
    size = f'comm.size("{axis}")'
    by_optimizer = f", and {type(optimizer).__name__} divides by the size of {axis} itself" if expected else ""
    if spmd_type.scale > expected:
        why = f"it is too large by the size of {axis}: each rank takes the mean over its part, and the means are summed"
        repairs = [
            "reduce_gradients(model), which averages, in place of a sum",
            f"divide the loss, or the gradients, by {size}",
        ]
    else:
        why = f"it is too small by the size of {axis}: the loss is a sum over all ranks, and gradients are averaged"
        repairs = [
            "a loss that is a mean on every rank: .mean(), or a sum divided by global_num_items(labels)",
            f"sum the gradients over {axis} instead of averaging them; or multiply the loss by {size}",
        ]
    repairs.append(f"write 1 / {size} where a factor is written 1.0 / {size}, which is a plain number for Python")
    origin = ((note_of(grad) or (None, None))[1] or {}).get(axis)
    return SpmdTypeError(
        f"{type(optimizer).__name__}.step: the gradient of {name} {list(param.shape)}",
        f"on {axis} it is {spmd_type}{by_optimizer}: {why}",
        where_from=[f"{spmd_type} on {axis} since {origin}"] if origin is not None else [],
        repairs=repairs,
        axis=axis,
        rule="gate_scale",
        parameter=name,
    )


def _refused(
    mode: SpmdTypeMode, optimizer: Any, param: torch.Tensor, grad: torch.Tensor, axis: str, kind: SpmdType
) -> SpmdTypeError:
    name = param.__dict__.get(NAME, "a parameter")
    origins = (note_of(grad) or (None, None))[1] or {}
    origin = origins.get(axis)
    data = axis in atoms_of(DATA_AXES, mode.mesh)
    if kind.letter == "P":
        why = f"on {axis} it is {kind}: each rank has its part of the gradient, and the parts are not added up"
    else:
        why = f"on {axis} it is {kind}: the parameter is equal on all ranks, and would differ after the step"
    if data:
        repairs = ["reduce_gradients(model) after the last backward", "NeuronZero1Optimizer, which reduces it itself"]
        if isinstance(optimizer, NeuronZero1Optimizer):
            repairs = ["reduce_gradients(model) after the last backward: this optimizer has no sharding group over it"]
            if any(shard.param is param and not shard.is_alone for shard in optimizer.shards):
                repairs = [
                    f"leave sharding_groups out for the check: types are written on all of {axis}, not on groups "
                    "inside it, and the mean is that over all of it in any case"
                ]
    elif axis == "pp":
        repairs = ["reduce_gradients(model): it sums the gradients of tied weights over their stages"]
    elif spec_of(param).sequence_parallel:
        repairs = ["reduce_gradients(model) after the last backward: it sums those of sequence-parallel parameters"]
    else:
        repairs = [
            f"convert(x, {axis!r}, src=I, dst=R) on the input of the parameter's module",
            "param.sequence_parallel_enabled = True, if it sees a part of the sequence, and reduce_gradients(model)",
        ]
    return SpmdTypeError(
        f"{type(optimizer).__name__}.step: the gradient of {name} {list(param.shape)}",
        why,
        where_from=[f"{kind} on {axis} since {origin}"] if origin is not None else [],
        repairs=repairs,
        axis=axis,
        rule="gate",
        parameter=name,
    )


def check_buffers(mode: SpmdTypeMode, model: nn.Module) -> None:
    """Checks that the buffers, which the next step reads, are equal on all ranks; else assumes it, or raises.

    Raises:
        SpmdTypeError: a buffer holds a part of a sum, or of a mean.
    """
    for name, buffer in model.named_buffers():
        note = note_of(buffer)
        for axis, spmd_type in note.type if note is not None else ():
            if spmd_type.letter == "P" or (spmd_type.scale and spmd_type.letter in SAME):
                origin = (note.origins or {}).get(axis) if note is not None else None
                raise SpmdTypeError(
                    f"buffer {name} {list(buffer.shape)} after the step",
                    f"on {axis} it is {spmd_type}: the next step would read another value than in one process",
                    where_from=[f"{spmd_type} on {axis} since {origin}"] if origin is not None else [],
                    repairs=[_repair_of_buffer(spmd_type, axis)],
                    axis=axis,
                    rule="buffer",
                )
            if spmd_type is V and axis != "pp":
                mode.assume(f"buffer {name}: that the value of any rank of {axis} may be used")


def _repair_of_buffer(spmd_type: SpmdType, axis: str) -> str:
    if spmd_type.reduction == "max":
        return f'comm.all_reduce(x, "{axis}", op="max") of what is written to it'
    if spmd_type in (P, P("avg")):
        return f'spmd.all_reduce(x, "{axis}", src=spmd.{spmd_type}, dst=spmd.R) of what is written to it'
    return f'{"divide" if spmd_type.scale > 0 else "multiply"} by comm.size("{axis}") what is written to it'
