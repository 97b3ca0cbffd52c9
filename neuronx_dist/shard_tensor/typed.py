"""Declarations for the type checker where it cannot follow: exchanges of a plan, and code on a rank's shard.

Without a checker at work each of these is a look at a thread-local.

| what | type of the operand | type of the result |
| --- | --- | --- |
| `moved` by a row of `spmd`'s table, for shards of any sizes | the row's `src` | the row's `dst` |
| `exchanged` by a plan, which may give positions twice | S(dim), or V | V |
| `on_own_shard`: code whose result on a shard is no shard of its result on the whole | S; V inside | V, P, S(dim) |
| `shards`: what an exchange gives is the shards of a whole | V | S(dim) |
| `promoted`: a plain parameter that meets a ShardTensor | R | I |
| `declared`: a layout that somebody states | none, or the layout's | the layout's |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..call_site import call_site
from ..comm import Communicator
from ..spmd import I, R, S, SpmdType, SpmdTypeError, V, assert_type
from ..spmd.local_code import axes_along, on_own_shard, stamp_types
from ..spmd.tensor_type import Origin, TensorType, note_of
from ..spmd.watching import HANDLERS, active
from .device_mesh import DeviceMesh
from .placements import spmd_type
from .spec import ShardTensorSpec

__all__ = [
    "carried",
    "declared",
    "exchanged",
    "laid_out",
    "moved",
    "on_own_shard",
    "promoted",
    "shards",
    "shards_of",
    "unseen",
]


def moved(
    operator: Callable[..., torch.Tensor],
    run: Callable[..., torch.Tensor],
    x: torch.Tensor,
    communicator: Communicator,
    src: SpmdType,
    dst: SpmdType,
) -> torch.Tensor | None:
    """`run(x)`, judged as `operator(x, communicator, src=, dst=)`; None where no checker is at work.

    Args:
        run: hashable, equal for equal moves, since what was judged is remembered by it.
    """
    watcher = active()
    if watcher is None or not communicator.size > 1:
        return None
    handler = HANDLERS[operator]
    assert handler is not None
    result: torch.Tensor = handler(watcher, run, (x, communicator), {"src": src, "dst": dst})
    return result


def exchanged(run: Callable[[], torch.Tensor], x: torch.Tensor, communicator: Communicator, dim: int) -> torch.Tensor:
    """Runs `run()`, which gives each rank the positions that it needs of `x`, sharded along `dim`.

    Raises:
        SpmdTypeError: `x` is neither sharded along `dim` nor a rank's own numbers.
    """
    watcher = active()
    if watcher is None:
        return run()
    note = watcher.note(x, "exchange")
    if note is None:  # in a backward pass
        with watcher.pause():
            return run()
    for axis in axes_along(communicator, watcher):
        known = dict(note.type.types).get(axis)
        if known is not None and known.letter not in "VS0" or (known is not None and getattr(known, "dim", dim) != dim):
            raise SpmdTypeError(
                f"exchange of dim {dim} of a tensor {list(x.shape)}",
                f"it is {known} on {axis}, but an exchange takes shards of that dim, S({dim})",
                repairs=[f'spmd.redistribute(x, "{axis}", src=spmd.{known}, dst=spmd.S({dim}))'],
                axis=axis,
                rule="source",
            )
    return unseen(run, x, communicator, V)


def unseen(
    run: Callable[[], torch.Tensor], x: torch.Tensor, communicator: Communicator, type_: SpmdType
) -> torch.Tensor:
    """`run()`, which is not followed: its result has the type of `x`, and over the group `type_`."""
    watcher = active()
    note = watcher.note(x, "a handler") if watcher is not None else None
    if watcher is None or note is None:
        return run()
    types, origins = dict(note.type.types), dict(note.origins or {})
    for axis in axes_along(communicator, watcher):
        types[axis], origins[axis] = type_, Origin("exchange", call_site(), "", str(type_))
    with watcher.pause():
        result = run()
    watcher.stamp(result, TensorType.of(types, note.type.rest), origins)
    return result


def shards(x: torch.Tensor, dims: Mapping[Communicator, int]) -> torch.Tensor:
    """Declares that `x`, which varies over the groups, is this rank's shard along a dim. Returns `x`."""
    watcher = active()
    if watcher is not None:
        stamp_types(x, {group: S(dim) for group, dim in dims.items()}, watcher)
    return x


def shards_of(spec: ShardTensorSpec) -> dict[Communicator, SpmdType]:
    """The types of a local tensor along the groups that shard it."""
    return {spec.mesh.communicator(m): S(dim) for m, dim in spec.sharded} if spec.mesh.communicators else {}


# Of a layout's type the letters that a local tensor must not have; what is the same everywhere is R inside of handlers.
_CONTRADICTS = {"I": "VSP", "S": "SPI", "P": "S", "V": "SPI"}


def _contradicts(known: SpmdType, wanted: SpmdType) -> bool:
    if known.letter == wanted.letter == "S":
        return getattr(known, "dim", None) != getattr(wanted, "dim", None)
    return known.letter in _CONTRADICTS[wanted.letter]


def laid_out(local: torch.Tensor, spec: ShardTensorSpec) -> None:
    """Declares a local tensor that a handler computed as this rank's part in a layout: a varying tensor is a shard.

    Raises:
        SpmdTypeError: it is known to be something else.
    """
    watcher = active()
    note = watcher.note(local, "a handler") if watcher is not None else None
    if watcher is None or note is None:
        return
    types = dict(note.type.types)
    for group, placement in zip(spec.mesh.communicators or (), spec.placements):
        wanted = spmd_type(placement)
        for axis in axes_along(group, watcher):
            known = types.get(axis)
            if known is not None and _contradicts(known, wanted):
                raise SpmdTypeError(
                    f"the result of a handler, {list(spec.placements)}",
                    f"its layout requires {wanted} on {axis}, but the local tensor {list(local.shape)} is {known}",
                    repairs=[f'spmd.redistribute(x, "{axis}", src=spmd.{known}, dst=spmd.{wanted}) before wrap()'],
                    axis=axis,
                    rule="layout",
                )
    if spec.sharded:
        stamp_types(local, shards_of(spec), watcher)


def promoted(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Declares a plain parameter as Replicate, I on every mesh dim: its gradient is summed where it is used.

    Elsewhere the ranks of dp and cp use a parameter on their own data, and it is R there.
    """
    watcher = active()
    note = watcher.note(x, "promotion") if watcher is not None and isinstance(x, torch.nn.Parameter) else None
    if watcher is not None and note is not None:
        types = dict(note.type.types)
        axes = [
            axis for group in mesh.communicators or () for axis in axes_along(group, watcher) if types.get(axis) is R
        ]
        if axes:
            watcher.stamp(x, TensorType.of({**types, **dict.fromkeys(axes, I)}, note.type.rest), note.origins)
    return x


def carried(x: torch.Tensor, local: torch.Tensor) -> None:
    """Declares that `local`, a part of `x`, has the type of `x` along the axes that its type does not name."""
    watcher, note = active(), note_of(x)
    known = note_of(local)
    if watcher is not None and note is not None and known is not None:
        types = {**dict(note.type.types), **dict(known.type.types)}
        watcher.stamp(local, TensorType.of(types, note.type.rest), {**(note.origins or {}), **(known.origins or {})})


def declared(local: torch.Tensor, spec: ShardTensorSpec) -> torch.Tensor:
    """Declares the type of a local tensor by its layout, or asserts its present type. Returns the tensor.

    Raises:
        SpmdTypeError: it has another type.
    """
    if active() is not None:
        groups = spec.mesh.communicators or ()
        types = {group: spmd_type(placement) for group, placement in zip(groups, spec.placements)}
        try:
            assert_type(local, types)
        except SpmdTypeError as error:
            text = f"the local tensor of a ShardTensor with {list(spec.placements)}, at {call_site()}"
            raise SpmdTypeError(text, str(error), axis=error.axis, rule="layout") from None
    return local
