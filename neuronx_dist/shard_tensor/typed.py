"""What the type checker is told where it cannot follow: exchanges of a plan, and code on a rank's own positions.

Without a checker at work each of these is a look at a thread-local.

| what | type of the operand | type of the result |
| --- | --- | --- |
| `moved` by a row of `spmd`'s table, for shards of any sizes | the row's `src` | the row's `dst` |
| `exchanged` by a plan, which may give positions twice | S(dim), or V | V |
| `own_positions`: a scope, in which shards are a rank's own numbers | S | V inside |
| `shards`: what such code computed is the shards of a whole | V | S(dim) |
| `declared`: a layout that somebody states | none, or the layout's | the layout's |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import comm
from ..call_site import call_site
from ..comm import Communicator
from ..comm.context import AxisLike
from ..spmd import S, SpmdType, SpmdTypeError, V, assert_type
from ..spmd.axes import atoms_of
from ..spmd.tensor_type import Origin, TensorType
from ..spmd.watching import HANDLERS, Watcher, active
from .placements import spmd_type
from .spec import ShardTensorSpec

__all__ = ["declared", "exchanged", "moved", "own_positions", "shards"]


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
    types, origins = dict(note.type.types), dict(note.origins or {})
    for axis in _axes(communicator, watcher):
        known = types.get(axis)
        if known is not None and known.letter not in "VS0" or (known is not None and getattr(known, "dim", dim) != dim):
            raise SpmdTypeError(
                f"exchange of dim {dim} of a tensor {list(x.shape)}",
                f"it is {known} on {axis}, and what is exchanged are shards of that dim, S({dim})",
                repairs=[f'spmd.redistribute(x, "{axis}", src=spmd.{known}, dst=spmd.S({dim}))'],
                axis=axis,
                rule="source",
            )
        types[axis], origins[axis] = V, Origin("exchange", call_site(), "", "V")
    with watcher.pause():
        result = run()
    watcher.stamp(result, TensorType.of(types, note.type.rest), origins)
    return result


def _axes(group: AxisLike, watcher: Watcher) -> Sequence[str]:
    return atoms_of(group, watcher.mesh) if comm.communicator(group).size > 1 else ()


@contextmanager
def own_positions(groups: Iterable[AxisLike]) -> Iterator[None]:
    """Inside, what is sharded over the groups is this rank's own numbers, of which it knows the positions."""
    watcher = active()
    if watcher is None:
        yield
        return
    with watcher.local_scope([axis for each in groups for axis in _axes(each, watcher)]):
        yield


def shards(x: torch.Tensor, dims: Mapping[AxisLike, int]) -> torch.Tensor:
    """Says that `x`, which varies over the groups, is this rank's shard along a dim. Returns it."""
    watcher = active()
    note: Any = None if watcher is None else watcher.note(x, "shards")
    if watcher is None or note is None:
        return x
    types = dict(note.type.types)
    for group, dim in dims.items():
        for axis in _axes(group, watcher):
            if types.get(axis, V).letter in "VS0":
                types[axis] = S(dim) if watcher.level == "G" else V
    watcher.stamp(x, TensorType.of(types, note.type.rest), note.origins)
    return x


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
