"""What the type checker is told where it cannot follow: exchanges of a plan, and code on a rank's own shard.

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

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import comm
from ..call_site import call_site
from ..comm import Communicator
from ..comm.context import AxisLike
from ..spmd import I, R, S, SpmdType, SpmdTypeError, V, assert_type
from ..spmd.axes import atoms_of
from ..spmd.tensor_type import Origin, TensorType, note_of, tensors_in
from ..spmd.watching import HANDLERS, Watcher, active
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
    """`run()`, which gives each rank what it needs of `x`, sharded along `dim`.

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
    for axis in _axes(communicator, watcher):
        known = dict(note.type.types).get(axis)
        if known is not None and known.letter not in "VS0" or (known is not None and getattr(known, "dim", dim) != dim):
            raise SpmdTypeError(
                f"exchange of dim {dim} of a tensor {list(x.shape)}",
                f"it is {known} on {axis}, and what is exchanged are shards of that dim, S({dim})",
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
    for axis in _axes(communicator, watcher):
        types[axis], origins[axis] = type_, Origin("exchange", call_site(), "", str(type_))
    with watcher.pause():
        result = run()
    watcher.stamp(result, TensorType.of(types, note.type.rest), origins)
    return result


def _axes(group: AxisLike, watcher: Watcher) -> Sequence[str]:
    return atoms_of(group, watcher.mesh) if comm.communicator(group).size > 1 else ()


def on_own_shard(function: Callable[..., Any], types: Mapping[Any, SpmdType]) -> Callable[..., Any]:
    """`function` of this rank's shards, such as their maximum or a slice by position, whose results have these types.

    What the checker knows to be P or I keeps its type, by which all that follows is judged.

    Args:
        types: group or axis -> V, P or S(dim), of every tensor that the function returns.
    """
    watcher = active()
    if not types or watcher is None:
        return function

    def own(*args: Any) -> Any:
        with watcher.local_scope([axis for group in types for axis in _axes(group, watcher)]):
            result = function(*args)
        for x in tensors_in(result):
            _stamp(x, types, watcher)
        return result

    return own


def shards(x: torch.Tensor, dims: Mapping[Communicator, int]) -> torch.Tensor:
    """Says that `x`, which varies over the groups, is this rank's shard along a dim. Returns it."""
    watcher = active()
    if watcher is not None:
        _stamp(x, {group: S(dim) for group, dim in dims.items()}, watcher)
    return x


def shards_of(spec: ShardTensorSpec) -> dict[Communicator, SpmdType]:
    """The types of a local tensor along the groups that shard it."""
    return {spec.mesh.communicator(m): S(dim) for m, dim in spec.sharded} if spec.mesh.communicators else {}


# Of a layout's type the letters that a local tensor must not have; what is the same everywhere is R inside of handlers.
_CONTRADICTS = {"I": "VSP", "S": "SPI", "P": "S"}


def _contradicts(known: SpmdType, wanted: SpmdType) -> bool:
    if known.letter == wanted.letter == "S":
        return getattr(known, "dim", None) != getattr(wanted, "dim", None)
    return known.letter in _CONTRADICTS[wanted.letter]


def laid_out(local: torch.Tensor, spec: ShardTensorSpec) -> None:
    """Says that a local tensor that a handler computed is the part that a layout names: what varies is a shard.

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
        for axis in _axes(group, watcher):
            known = types.get(axis)
            if known is not None and _contradicts(known, wanted):
                raise SpmdTypeError(
                    f"the result of a handler, {list(spec.placements)}",
                    f"by its layout it is {wanted} on {axis}, and the local tensor {list(local.shape)} is {known}",
                    repairs=[f'spmd.redistribute(x, "{axis}", src=spmd.{known}, dst=spmd.{wanted}) before wrap()'],
                    axis=axis,
                    rule="layout",
                )
    if spec.sharded:
        _stamp(local, shards_of(spec), watcher)


def _stamp(x: torch.Tensor, declared: Mapping[Any, SpmdType], watcher: Watcher) -> None:
    note: Any = watcher.note(x, "shards")
    if note is None:  # in a backward pass
        return
    types = dict(note.type.types)
    for group, wanted in declared.items():
        for axis in _axes(group, watcher):
            if types.get(axis, V).letter in "VSR0":
                types[axis] = V if wanted.letter == "S" and watcher.level != "G" else wanted
    watcher.stamp(x, TensorType.of(types, note.type.rest), note.origins)


def promoted(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Tells that a plain parameter is Replicate, I on every mesh dim: its gradient is summed where it is used.

    Elsewhere the ranks of dp and cp use a parameter on their own data, and it is R there.
    """
    watcher = active()
    note = watcher.note(x, "promotion") if watcher is not None and isinstance(x, torch.nn.Parameter) else None
    if watcher is not None and note is not None:
        types = dict(note.type.types)
        axes = [axis for group in mesh.communicators or () for axis in _axes(group, watcher) if types.get(axis) is R]
        if axes:
            watcher.stamp(x, TensorType.of({**types, **dict.fromkeys(axes, I)}, note.type.rest), note.origins)
    return x


def carried(x: torch.Tensor, local: torch.Tensor) -> None:
    """Tells that along the axes that `local`'s type does not name it has the type of `x`, of which it is a part."""
    watcher, note = active(), note_of(x)
    known = note_of(local)
    if watcher is not None and note is not None and known is not None:
        types = {**dict(note.type.types), **dict(known.type.types)}
        watcher.stamp(local, TensorType.of(types, note.type.rest), {**(note.origins or {}), **(known.origins or {})})


def declared(local: torch.Tensor, spec: ShardTensorSpec) -> torch.Tensor:
    """Tells the type of a local tensor by its layout, or asserts it where the tensor has one. Returns the tensor.

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
