"""The meaning of a type: how the ranks hold a tensor of the unsharded program, and how it is put together again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neuronx_dist.checking.types.piece_order import Jumbled
from neuronx_dist.spmd.tensor_type import TensorType
from neuronx_dist.spmd.types import UNIFORM, ZERO, R, Shard, SpmdType, scaled

Grid = Mapping[str, int]  # size of each axis, outermost first


@dataclass(frozen=True)
class Claim:
    """Types by axis, as plain data.

    Attributes:
        constant: "0" (zeros), "u" (one number at every position) or "".
        free: dims along which all positions are equal: how long they are in the whole nobody says.
    """

    types: tuple[tuple[str, SpmdType], ...]
    constant: str = ""
    free: frozenset[int] = frozenset()

    def get(self, axis: str) -> SpmdType:
        return dict(self.types)[axis]

    @property
    def letters(self) -> str:
        return "".join(kind.letter for _, kind in self.types)


def claim_of(found: TensorType, grid: Grid, ndim: int) -> Claim:
    """Returns the checker's claim about a tensor."""
    kinds = [found.get(axis) for axis in grid]
    constant = "0" if all(kind is ZERO for kind in kinds) else ""
    constant = constant or ("u" if any(kind is UNIFORM or kind is ZERO for kind in kinds) else "")
    free = range(ndim) if constant else [dim for kind in kinds for dim in getattr(kind, "along", ())]
    types = tuple((axis, _plain(kind)) for axis, kind in zip(grid, kinds) if kind is not None)
    return Claim(types, constant, frozenset(free) - {kind.dim for _, kind in types if isinstance(kind, Shard)})


def _plain(kind: SpmdType) -> SpmdType:
    """Without what is for views only: what a shard was merged of."""
    if isinstance(kind, Shard):
        return Shard(kind.dim, kind.stride, scale=kind.scale, order=kind.order)
    if isinstance(kind, Jumbled):
        return kind
    return scaled(R, kind.scale) if kind.letter == "R" else kind


def coordinates(grid: Grid) -> list[dict[str, int]]:
    """Returns the coordinates of every rank, in order."""
    return [dict(zip(grid, at)) for at in itertools.product(*(range(size) for size in grid.values()))]


def _order(claim: Claim, grid: Grid) -> list[str]:
    """Axes as a tensor is cut: what varies first, copies last; outer factors of a dim first."""
    axes = list(grid)

    def place(axis: str) -> tuple[int, int, int]:
        kind = claim.get(axis)
        return "VPSRI0".index(kind.letter), getattr(kind, "stride", 1), axes.index(axis)

    return sorted(axes, key=place)


def whole_shape(shape: Sequence[int], claim: Claim, grid: Grid) -> list[int]:
    """The shape of the whole of what has `shape` on a rank."""
    found = list(shape)
    for axis, kind in claim.types:
        if isinstance(kind, Shard):
            found[kind.dim] *= grid[axis]
    return found


def distribute(whole: Tensor, claim: Claim, grid: Grid, random: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The tensors of the ranks, in order; `random` gives numbers of a tensor's shape: how a sum is split."""
    held = {(): whole}
    axes = _order(claim, grid)
    for axis in axes:
        kind, count = claim.get(axis), grid[axis]
        held = {(*key, i): piece for key, x in held.items() for i, piece in enumerate(_cut(x, kind, count, random))}
    return [held[tuple(at[axis] for axis in axes)].clone() for at in coordinates(grid)]


def _cut(x: Tensor, kind: SpmdType, count: int, random: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = x * float(count) ** kind.scale if kind.scale else x
    if isinstance(kind, Shard):
        blocks = x.unflatten(kind.dim, (kind.stride, x.shape[kind.dim] // kind.stride))
        if kind.order is not None:
            pieces = blocks.chunk(kind.order.total, kind.dim + 1)
            held = [torch.cat([pieces[i] for i in mine], kind.dim + 1) for mine in kind.order.held]
            return [piece.flatten(kind.dim, kind.dim + 1) for piece in held]
        return [piece.flatten(kind.dim, kind.dim + 1) for piece in blocks.chunk(count, kind.dim + 1)]
    if kind.letter == "P" and kind.reduction == "max":
        pieces = [x - random(x).abs() for _ in range(count)]
        owner = (random(x) * 1e3).long() % count
        return [torch.where(owner == i, x, piece) for i, piece in enumerate(pieces)]
    if kind.letter == "P" and kind.reduction == "norm":
        weights = [random(x).square() + 0.1 for _ in range(count)]
        return [x * (weight / sum(weights)).sqrt() for weight in weights]
    if kind.letter == "P":
        pieces = [random(x) for _ in range(count - 1)]
        return [*pieces, x - sum(pieces)]
    if kind.letter == "V":
        return [x, *(random(x) if x.is_floating_point() else x.roll(i) for i in range(1, count))]
    return [x] * count


def narrowed(x: Tensor, claim: Claim) -> Tensor:
    """With one position of every dim along which all are equal."""
    for dim in claim.free:
        x = x.narrow(dim, 0, 1) if x.shape[dim] else x
    return x


class Wrong(AssertionError):
    """The ranks do not hold what the type says."""


def assemble(pieces: Sequence[Tensor], claim: Claim, grid: Grid, tolerance: float = 1e-8) -> Tensor | None:
    """Returns the tensor that the ranks' tensors mean together; None if it varies on some axis.

    Raises:
        Wrong: they are not equal where they are to be.
    """
    if len({tuple(x.shape) for x in pieces}) > 1:
        raise Wrong(f"the ranks have different shapes {[list(x.shape) for x in pieces]}")
    for x in pieces if pieces[0].numel() else ():
        _same(x, narrowed(x, claim).expand_as(x), f"equal along dims {sorted(claim.free)}", tolerance)
        if claim.constant == "0":
            _same(x, torch.zeros_like(x), "zero", tolerance)
    axes = _order(claim, grid)
    held = {tuple(at[axis] for axis in axes): x for at, x in zip(coordinates(grid), pieces)}
    for axis in reversed(axes):  # axis is the last of the keys
        kind, count = claim.get(axis), grid[axis]
        keys = dict.fromkeys(key[:-1] for key in held)
        held = {key: _put(axis, kind, [held[(*key, i)] for i in range(count)], tolerance) for key in keys}
    found = held[()]
    return None if any(kind.letter == "V" for _, kind in claim.types) else found


def put_together(stacked: Tensor, kind: SpmdType, dim: int, keepdim: bool = False) -> Tensor:
    """Returns the value of which the ranks hold partial sums, maxima or norms, along a dim of ranks."""
    if kind.reduction == "norm":
        return stacked.square().sum(dim, keepdim).sqrt()
    return stacked.amax(dim, keepdim) if kind.reduction == "max" else stacked.sum(dim, keepdim)


def _put(axis: str, kind: SpmdType, pieces: Sequence[Tensor], tolerance: float) -> Tensor:
    if kind.scale:
        pieces = [x / float(len(pieces)) ** kind.scale for x in pieces]
    if isinstance(kind, Shard):
        if pieces[0].dim() <= kind.dim or pieces[0].shape[kind.dim] % kind.stride:
            raise Wrong(f"{list(pieces[0].shape)} cannot be {kind} on {axis}")
        blocks = [x.unflatten(kind.dim, (kind.stride, x.shape[kind.dim] // kind.stride)) for x in pieces]
        if kind.order is not None:
            blocks = _sorted(torch.cat(blocks, kind.dim + 1), kind.dim + 1, sum(kind.order.held, ()))
        return torch.cat(blocks, kind.dim + 1).flatten(kind.dim, kind.dim + 1)
    if kind.letter == "P":
        stacked = torch.stack([x if x.is_floating_point() else x.long() for x in pieces])
        return put_together(stacked, kind, 0)
    if kind.letter == "V":
        return torch.stack(list(pieces))
    for x in pieces[1:]:
        _same(x, pieces[0], f"equal along {axis}", tolerance)
    if isinstance(kind, Jumbled):
        return torch.cat(_sorted(pieces[0], kind.dim, kind.order.held[0]), kind.dim)
    return pieces[0]


def _sorted(x: Tensor, dim: int, order: Sequence[int]) -> list[Tensor]:
    """The pieces of a dim that has them in this order, in their own one."""
    if x.shape[dim] % len(order):
        raise Wrong(f"{list(x.shape)} does not have pieces {order} on dim {dim}")
    pieces = dict(zip(order, x.chunk(len(order), dim)))
    return [pieces[number] for number in sorted(pieces)]


def _same(x: Tensor, y: Tensor, what: str, tolerance: float) -> None:
    why = difference(x, y, tolerance)
    if why:
        raise Wrong(f"not {what}: {why}")


def difference(x: Tensor, y: Tensor, tolerance: float = 1e-8, scale: float = 0.0) -> str:
    """An empty string if two tensors are equal up to rounding, else by how much they differ."""
    if x.shape != y.shape:
        return f"shape {list(x.shape)}, expected {list(y.shape)}"
    if not x.numel():
        return ""
    a, b = x.detach().double(), y.detach().double()
    limit = tolerance * max(1.0, scale, float(b.abs().max()))
    off = float((a - b).abs().max())
    if off <= limit:
        return ""
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return "" if torch.equal(torch.isfinite(a), torch.isfinite(b)) else "infinite in one of them only"
    return f"off by {off:g}: {a.flatten()[:6].tolist()}, expected {b.flatten()[:6].tolist()}"
