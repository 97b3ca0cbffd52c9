"""Errors for a loss: for its logits, for the tensor at which backward starts, or for its scale."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....spmd.errors import SpmdTypeError
from ....spmd.tensor_type import UNTYPED, TensorType, origins_of, type_of
from ....spmd.types import SAME, I, P, R, Shard, SpmdType, V
from ..session import Session
from .explain import location, shown, since
from .provenance import name_operands, site
from .rewrites import origin_repair
from .trials import Repair, call_of, edit_of, route

__all__ = ["logits_error", "loss_error", "scale_error"]


def logits_error(mode: Session, name: str, logits: Tensor, type_: TensorType, axis: str) -> SpmdTypeError:
    """The error for logits of a vocabulary-parallel loss that are not sharded over the vocabulary."""
    here = site()
    named = name_operands([logits], here)[0]
    actual, due = type_.get(axis), Shard(logits.dim() - 1)
    assert actual is not None
    repairs: list[Repair] = []
    if actual.letter in SAME:
        why = f"are {actual}: every rank passes the whole vocabulary, but must pass its part, {due}"
        repairs.append(Repair("gather_output=False on the layer that makes them, or no gather behind it"))
    else:
        why = f"are {actual}, not {due}, this rank's part of the vocabulary"
    path = route(actual, due)
    if path is not None:
        code = call_of(path[0], named.code, axis, None if actual is P else actual, due, path[1])
        repairs.append(Repair(code, edit_of(here, named.node, code)))
    return SpmdTypeError(
        f"{name} of {shown(logits, type_, named.label or 'logits')} at {location(mode)}",
        f"on {axis} they {why}",
        where_from=since(logits, named.label or "it", axis),
        repairs=repairs,
        axis=axis,
        rule="logits",
    )


def loss_error(mode: Session, loss: Tensor, type_: TensorType, axis: str, spmd_type: SpmdType) -> SpmdTypeError:
    """The error for a loss of type R, or of one that varies, at which backward cannot start."""
    here = site()
    name = name_operands([loss], here)[0]
    name = name._replace(code="loss") if name.node is None and not name.label else name
    origin = origins_of(loss).get(axis)
    repairs: list[Repair] = []

    def offer(code: str, words: str = "") -> None:
        repairs.append(Repair(code + words, edit_of(here, name.node, code)))

    if spmd_type.letter == "R":
        why = "is R: equal on every rank, and every rank counts it, so gradients are multiplied by the number of ranks"
        repairs += [r for r in [origin_repair(origin, I) if origin is not None and origin.letter == "R" else None] if r]
        offer(call_of("convert", name.code, axis, R, P))
    else:
        src = V if isinstance(spmd_type, Shard) else spmd_type
        why = f"is {spmd_type}: a different value on every rank, not known to be summands"
        offer(call_of("reinterpret", name.code, axis, src, P), f": if the sum over {axis} is meant")
        offer(call_of("all_reduce", name.code, axis, None, I), ": the same, and every rank sees the sum")
    return SpmdTypeError(
        f"backward of {shown(loss, type_, name.label)} at {location(mode)}",
        f"on {axis} the loss {why}",
        where_from=since(loss, name.label or "the loss", axis),
        repairs=repairs,
        axis=axis,
        rule="loss",
    )


def scale_error(mode: Session, losses: Sequence[Tensor], axis: str) -> SpmdTypeError:
    """The error for losses of one backward that mix sums and means, or for a sum that should be a mean."""
    names = [operand.label or "a loss" for operand in name_operands(losses, site())]
    types = [str((type_of(x) or UNTYPED).get(axis)) for x in losses]
    if len(losses) > 1:
        why = f"on {axis} they are {' and '.join(types)}: gradients of one are to be averaged, of the other summed"
        repairs = [f'multiply the sum by comm.size("{axis}"), or divide the mean by it']
    else:
        why = f'on {axis} it is {types[0]}, and its gradients are averaged over {axis}: that takes P("avg")'
        repairs = [
            "a loss that is a mean on every rank: .mean(), or a sum divided by global_num_items(labels)",
            f'multiply it by comm.size("{axis}")',
        ]
    return SpmdTypeError(
        f"backward of {' and '.join(names)} at {location(mode)}", why, repairs=repairs, axis=axis, rule="scales"
    )
