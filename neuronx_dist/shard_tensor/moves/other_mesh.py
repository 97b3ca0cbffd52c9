"""From a layout on one mesh to a layout on another mesh, of any ranks, by one exchange.

So does a layout whose tensor dim lies on two mesh dims become one in which these mesh dims differ.

Every rank of either mesh owns a box of the tensor by each layout: an interval along each dim. From the boxes of all
ranks follows what each rank sends to each: where two boxes meet. Of several ranks that have the same box one sends it
(the receiver itself, where it is one of them), and summands of a Partial are all sent, and added. The gradient goes the
same way back, from the target's layout of gradients to the source's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ... import comm
from ...spmd import no_typecheck
from ..bounded import Bounded
from ..device_mesh import group_over
from ..placements import Shard
from ..spec import ShardTensorSpec, gradient_spec
from ..typed import declared

__all__ = ["moved_to_mesh", "planned_bytes", "start_move"]

Box = tuple[tuple[int, int], ...]  # (first, behind the last) along each dim


class SentBox(NamedTuple):
    """The box of the global tensor that rank `src` sends to rank `dst`, both by their index in the group."""

    src: int
    dst: int
    box: Box


class Move(NamedTuple):
    """A move from one layout to another.

    Attributes:
        ranks: of both meshes, ascending.
        source, target: the box of each rank; None where it is no part of the mesh.
        pieces: all that travels or is copied.
    """

    ranks: tuple[int, ...]
    source: tuple[Box | None, ...]
    target: tuple[Box | None, ...]
    pieces: tuple[SentBox, ...]

    @property
    def is_local(self) -> bool:
        return all(piece.src == piece.dst for piece in self.pieces)


def moved_to_mesh(
    local: torch.Tensor,
    spec: ShardTensorSpec,
    target: ShardTensorSpec,
    finish: Callable[[], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Moves a tensor to a layout on another mesh; returns this rank's part, empty outside that mesh. Differentiable.

    Every rank of the job calls it, in the same order, also one that is a part of neither mesh.

    Args:
        finish: of the same move, begun by `start_move`.
    """
    declared(local, spec)
    with no_typecheck():
        result: torch.Tensor = _ToMesh.apply(local, spec, target, finish)
    return declared(result, target)


def planned_bytes(local: torch.Tensor, spec: ShardTensorSpec, target: ShardTensorSpec, rank: int) -> int:
    """Bytes that `comm.record` notes for the exchange on a rank of the job."""
    move = _plan(spec, target)
    if rank not in move.ranks:
        return 0
    index = move.ranks.index(rank)
    sent = sum(_count(piece.box) for piece in move.pieces if piece.src == index != piece.dst)
    received = sum(_count(piece.box) for piece in move.pieces if piece.dst == index != piece.src)
    return max(sent, received) * local.element_size()


class _ToMesh(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        spec: ShardTensorSpec,
        target: ShardTensorSpec,
        finish: Callable[[], torch.Tensor] | None,
    ) -> torch.Tensor:
        ctx.back = gradient_spec(target), gradient_spec(spec)
        return (finish or start_move(x, spec, target))()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return moved_to_mesh(grad, *ctx.back), None, None, None


def start_move(x: torch.Tensor, spec: ShardTensorSpec, target: ShardTensorSpec) -> Callable[[], torch.Tensor]:
    """Sends the parts of `x` that other ranks need; the returned function waits, and returns this rank's part."""
    move = _plan(spec, target)
    group = None if move.is_local else group_over(spec.mesh, target.mesh)
    rank = target.mesh.get_rank()
    result = x.new_zeros(target.local_shape)
    if rank not in move.ranks:
        return lambda: result
    me = move.ranks.index(rank)
    source, target_box = move.source[me], move.target[me]
    sends = [x.new_empty(0)] * len(move.ranks)
    received = list(sends)
    for piece in move.pieces:
        if piece.src == me:
            assert source is not None
            sends[piece.dst] = _part(x, source, piece.box)
        if piece.dst == me:
            received[piece.src] = x.new_empty([high - low for low, high in piece.box])
    handle = None
    if group is None:
        received = sends  # each rank keeps what it has
    else:
        order = [move.ranks.index(member) for member in group.ranks]
        handle = comm.exchange([sends[i] for i in order], [received[i] for i in order], group, async_op=True)

    def finish() -> torch.Tensor:
        if handle is not None:
            handle.wait()
        for piece in move.pieces:
            if piece.dst == me:
                assert target_box is not None
                _part(result, target_box, piece.box).add_(received[piece.src])
        return result

    return finish


def _part(x: torch.Tensor, held: Box, box: Box) -> torch.Tensor:
    """Returns a view of `box` in a tensor that holds the box `held`."""
    return x[tuple(slice(low - first, high - first) for (first, _), (low, high) in zip(held, box))]


def _count(box: Box) -> int:
    count = 1
    for low, high in box:
        count *= high - low
    return count


def _plan(spec: ShardTensorSpec, target: ShardTensorSpec) -> Move:
    """Plans the move between two layouts, once."""
    table = spec.mesh.tables.setdefault("moves to other meshes", Bounded(128))
    if (spec, target) not in table:
        table[spec, target] = _planned(spec, target)
    move: Move = table[spec, target]
    return move


def _planned(spec: ShardTensorSpec, target: ShardTensorSpec) -> Move:
    sources, targets = _boxes(spec), _boxes(target)
    ranks = tuple(sorted({*sources, *targets}))
    index = {rank: i for i, rank in enumerate(ranks)}
    zeros = {rank for rank in targets if _is_zero_summand(target, rank)}
    pieces = []
    # The ranks that have each box: one of them sends it, and for each summand one.
    holders: dict[tuple[Box, tuple[int, ...]], list[int]] = {}
    for rank, box in sources.items():
        holders.setdefault((box, _summand(spec, rank)), []).append(rank)
    for dst, wanted in targets.items():
        if dst in zeros:
            continue
        for (box, _), having in holders.items():
            both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, wanted))
            if all(low < high for low, high in both):
                src = dst if dst in having else having[index[dst] % len(having)]
                pieces.append(SentBox(index[src], index[dst], both))
    return Move(ranks, tuple(map(sources.get, ranks)), tuple(map(targets.get, ranks)), tuple(pieces))


def _boxes(spec: ShardTensorSpec) -> dict[int, Box]:
    """Returns the box of each rank of the mesh."""
    result = {}
    for number, rank in enumerate(spec.mesh.mesh.flatten().tolist()):
        box = [(0, size) for size in spec.shape]
        coordinate = spec.mesh.coordinate_of(number)
        for group in spec.groups:
            placement, along, i = spec.placements[group[0]], spec.sizes[group[0]] or (), 0
            for m in group:
                i = i * spec.mesh.shape[m] + coordinate[m]
            if isinstance(placement, Shard):
                box[placement.dim] = sum(along[:i]), sum(along[: i + 1])
        result[rank] = tuple(box)
    return result


def _summand(spec: ShardTensorSpec, rank: int) -> tuple[int, ...]:
    """Returns the summand of a Partial tensor on a rank: the rank's index along each Partial mesh dim."""
    number = spec.mesh.mesh.flatten().tolist().index(rank)
    return tuple(spec.mesh.coordinate_of(number)[m] for m in spec.partial)


def _is_zero_summand(spec: ShardTensorSpec, rank: int) -> bool:
    """Returns whether a rank's summand of a new Partial tensor is zero: all but the first are."""
    return any(_summand(spec, rank))
