"""The plan of an attention: where it is computed, from the layouts of its operands alone.

On each mesh dim one thing is sharded, that of the largest operands:

| sharded | computed | travels |
| --- | --- | --- |
| batch or heads; features of v | each rank its part | nothing |
| queries; keys whole ("rows") | each rank its queries | nothing; gradients of keys are summed |
| keys; queries whole ("keys") | each rank its keys, merged by log-sum-exp | outputs, summed |
| queries and keys ("ring") | ring, gather or all-to-all (`attention_method.py`) | keys and values, or heads |
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ..attention import Keys, Runs, cut, zigzag_runs
from .attention_method import Choice, choose, predicted
from .labels import planned
from .moves.redistribute import Step, steps
from .placements import Placement, Replicate, Shard
from .spec import ShardTensorSpec, chunk_sizes, make_spec

__all__ = ["AttentionPlan", "AttentionCall", "plan_attention"]

_HEADS = -1  # the label of the dim before the rows; those before it are -2, -3, ...
_ROWS, _KEYS, _FEATURES = "rows", "keys", "features"
Sizes = tuple[int, ...]


class AttentionCall(NamedTuple):
    """The facts that decide the plan of an attention beside layouts."""

    causal: bool
    gqa: bool
    dropout: bool
    grad: bool
    itemsize: int
    method: str
    order: int  # ranks of the zig-zag order of tokens; 0: none


class Role(NamedTuple):
    """The label that a mesh dim shards, with its sizes; for a ring the keys too."""

    label: Any
    sizes: Sizes
    key_sizes: Sizes | None = None


class AttentionPlan(NamedTuple):
    """The plan of an attention.

    Attributes:
        moved: for q, k, v and mask, what brings them where they are used.
        heads: the key head of each of this rank's heads, where it has all key heads; else None.
        keys: where the keys are; None: torch's own function computes it.
        mesh_dim: of `keys`, if they are sharded.
        spec: of what is computed.
        result: of what is returned.
        noise: of the weights `[*batch, rows, keys]`, which part this rank computes, as (start, stop).
        weights: the shape of all weights.
        choice: between methods, where there is one.
    """

    moved: tuple[tuple[Step, ...], ...]
    heads: tuple[int, ...] | None
    keys: Keys | None
    mesh_dim: int | None
    spec: ShardTensorSpec
    result: ShardTensorSpec
    noise: tuple[tuple[int, int], ...]
    weights: tuple[int, ...]
    choice: Choice | None


class _Operands(NamedTuple):
    """Layouts of q, k, v, mask with the labels of their dims; None for a dim that is broadcast."""

    specs: tuple[ShardTensorSpec | None, ...]
    labels: tuple[tuple[Any, ...], ...]
    batch: tuple[int, ...]
    groups: int  # query heads for each key head


@planned
def plan_attention(
    q: ShardTensorSpec, k: ShardTensorSpec, v: ShardTensorSpec, mask: ShardTensorSpec | None, call: AttentionCall
) -> AttentionPlan:
    """Returns the plan for operands of these layouts; never communicates.

    Raises:
        ValueError: shapes that do not fit; a method that is forced and cannot be used.
    """
    operands = _labelled(q, k, v, mask, call)
    roles = _roles(operands)
    choice, returned = None, list(roles)
    for m, role in enumerate(roles):
        if role is not None and role.key_sizes is not None:
            choice = _choice(operands, roles, m, call)
            if choice.method == "gather":
                roles[m] = Role(_ROWS, role.sizes)
            elif choice.method == "all_to_all":
                roles[m] = Role(_HEADS, chunk_sizes(q.shape[-3], q.mesh.shape[m]))
                returned[m] = Role(_ROWS, role.sizes)
    out_shape = (*operands.batch, q.shape[-2], v.shape[-1])
    out_labels = (*range(-len(operands.batch), 0), _ROWS, _FEATURES)
    spec, result = (_out(q, placed, out_labels, out_shape) for placed in (roles, returned))
    moved, whole_heads = _moves(operands, roles)
    used = _parts(roles, spec, k.shape[-2])
    heads = None
    if whole_heads:
        start, stop = used[len(operands.batch) - 1]
        heads = tuple(head // operands.groups for head in range(start, stop))
    keys, mesh_dim = _keys(roles, used, q.shape[-2], k.shape[-2], call)
    weights = (*operands.batch, q.shape[-2], k.shape[-2])
    return AttentionPlan(moved, heads, keys, mesh_dim, spec, result, used, weights, choice)


def _labelled(
    q: ShardTensorSpec, k: ShardTensorSpec, v: ShardTensorSpec, mask: ShardTensorSpec | None, call: AttentionCall
) -> _Operands:
    shapes = [tuple(operand.shape) for operand in (q, k, v)]
    text = f"scaled_dot_product_attention: q {list(shapes[0])}, k {list(shapes[1])}, v {list(shapes[2])}"
    if min(map(len, shapes)) < 2 or shapes[0][-1] != shapes[1][-1] or shapes[1][-2] != shapes[2][-2]:
        raise ValueError(f"{text}: they must be [.., rows, e], [.., keys, e] and [.., keys, ev]")
    groups = 1
    before = [list(shape[:-2]) for shape in shapes]
    if call.gqa and min(map(len, shapes)) > 2:
        heads = [shape[-3] for shape in shapes]
        if heads[1] != heads[2] or heads[1] == 0 or heads[0] % heads[1]:
            raise ValueError(
                f"{text}: enable_gqa=True needs k and v with the same number of heads, and a multiple of it for q"
            )
        groups = heads[0] // heads[1]
        before[1][-1] = before[2][-1] = heads[0]
    try:
        batch = tuple(torch.broadcast_shapes(*before))
    except RuntimeError as error:
        raise ValueError(f"{text}: the dims before the last two cannot be broadcast") from error

    def labels(sizes: Sequence[int], last: tuple[Any, ...]) -> tuple[Any, ...]:
        names = range(-len(sizes), 0)
        return (*(name if size == batch[name] else None for name, size in zip(names, sizes)), *last)

    named = [labels(before[0], (_ROWS, None)), labels(before[1], (_KEYS, None)), labels(before[2], (_KEYS, _FEATURES))]
    if mask is not None:
        weights = (*batch, shapes[0][-2], shapes[1][-2])
        mask_shape = tuple(mask.shape)
        if (
            len(mask_shape) < 2
            or len(mask_shape) > len(weights)
            or any(a not in (1, b) for a, b in zip(mask_shape[::-1], weights[::-1]))
        ):
            raise ValueError(f"{text}: attn_mask {list(mask_shape)} cannot be broadcast to {list(weights)}")
        last = tuple(
            name if size == all_ else None for name, size, all_ in zip((_ROWS, _KEYS), mask_shape[-2:], weights[-2:])
        )
        named.append(labels(mask_shape[:-2], last))
    return _Operands((q, k, v, mask), tuple(named), batch, groups)


def _roles(operands: _Operands) -> list[Role | None]:
    """Returns the sharded label on each mesh dim."""
    q = operands.specs[0]
    assert q is not None
    assigned: set[Any] = set()
    roles: list[Role | None] = []
    for m in range(q.mesh.ndim):
        votes = _votes(operands, m, range(3), assigned) or _votes(operands, m, range(3, len(operands.labels)), assigned)
        sequence = {key: weight for key, weight in votes.items() if key[0] in (_ROWS, _KEYS)}
        others = {key: weight for key, weight in votes.items() if key not in sequence}
        role = None
        if sequence and sum(sequence.values()) >= max(others.values(), default=0):
            sizes = {label: along for (label, along), _ in sorted(sequence.items(), key=lambda item: item[1])}
            if len(sizes) == 2:
                role = Role(_ROWS, sizes[_ROWS], sizes[_KEYS])
            else:
                role = Role(*next(iter(sizes.items())))
            assigned.update(sizes)
        elif others:
            role = Role(*max(others, key=others.__getitem__))
            assigned.add(role.label)
        roles.append(role)
    return roles


def _votes(operands: _Operands, m: int, indices: Sequence[int], assigned: set[Any]) -> dict[tuple[Any, Sizes], int]:
    """Counts the elements of the operands that shard a label, by label and sizes."""
    votes: dict[tuple[Any, Sizes], int] = {}
    for index in indices:
        spec = operands.specs[index]
        if spec is None or not isinstance(placement := spec.placements[m], Shard):
            continue
        label, along = operands.labels[index][placement.dim], spec.sizes[m]
        assert along is not None
        if label is None or label in assigned:
            continue
        if label == _HEADS and index in (1, 2):
            along = tuple(size * operands.groups for size in along)
        votes[label, along] = votes.get((label, along), 0) + spec.shape.numel()
    return votes


def _choice(operands: _Operands, roles: Sequence[Role | None], m: int, call: AttentionCall) -> Choice:
    q, k, v = operands.specs[:3]
    assert q is not None and k is not None and v is not None
    role, ranks = roles[m], q.mesh.shape[m]
    assert role is not None and role.key_sizes is not None
    others = [other for index, other in enumerate(roles) if index != m and other is not None]
    batch = prod(operands.batch)
    for other in others:  # the batch of the rank that has most, after the cuts by other mesh dims
        if other.label in range(-len(operands.batch), 0):
            batch = batch * max(other.sizes) // max(sum(other.sizes), 1)
    features = q.shape[-1] + v.shape[-1]
    free = bool(operands.batch) and all(other.label != _HEADS for other in others)
    divide = free and all(
        spec.shape[-3:-2].numel() % ranks == 0 and operands.labels[index][-3:-2] == (_HEADS,)
        for index, spec in enumerate((q, k, v))
    )
    costs = predicted(
        role.sizes,
        role.key_sizes,
        batch * features,
        batch // operands.groups * features,
        call.itemsize,
        grad=call.grad,
        heads_divide=divide,
    )
    return choose(costs, call.method, (tuple(q.shape), tuple(k.shape)))


def _out(
    q: ShardTensorSpec, roles: Sequence[Role | None], labels: tuple[Any, ...], shape: Sequence[int]
) -> ShardTensorSpec:
    placements: list[Placement] = []
    sizes: list[Sizes | None] = []
    for role in roles:
        sharded = role is not None and role.label in labels
        placements.append(Shard(labels.index(role.label)) if sharded and role is not None else Replicate())
        sizes.append(role.sizes if sharded and role is not None else None)
    return make_spec(q.mesh, placements, shape, sizes)


def _moves(operands: _Operands, roles: Sequence[Role | None]) -> tuple[tuple[tuple[Step, ...], ...], bool]:
    """Returns the steps of each operand, and whether key heads stay whole while query heads are sharded."""
    moved, whole_heads = [], False
    used = [m for m, role in enumerate(roles) if role is not None]
    for index, labels in enumerate(operands.labels):
        spec = operands.specs[index]
        assert spec is not None
        placements: list[Placement] = []
        sizes: list[Sizes | None] = []
        for role in roles:
            along = None
            if role is not None and role.label in labels:
                along = role.sizes
            elif role is not None and role.key_sizes is not None and index in (1, 2):
                along = role.key_sizes
            if along is not None and role is not None and role.label == _HEADS and index in (1, 2):
                fits = all(size % operands.groups == 0 for size in along)
                whole_heads = whole_heads or not fits
                along = tuple(size // operands.groups for size in along) if fits else None
            if along is None:
                placements.append(Replicate())
            else:
                assert role is not None
                placements.append(Shard(labels.index(role.label if role.label in labels else _KEYS)))
            sizes.append(along)
        moved.append(steps(spec, make_spec(spec.mesh, placements, spec.shape, sizes), used))
    return tuple(moved), whole_heads


def _parts(roles: Sequence[Role | None], spec: ShardTensorSpec, keys: int) -> tuple[tuple[int, int], ...]:
    """Returns the part of the attention weights that this rank computes."""
    parts = [(spec.offsets[d], spec.offsets[d] + spec.local_shape[d]) for d in range(len(spec.shape) - 1)]
    local_keys = (0, keys)
    coordinate = spec.mesh.get_coordinate()
    for m, role in enumerate(roles):
        if role is not None and role.label == _KEYS:
            index = 0 if coordinate is None else coordinate[m]
            local_keys = sum(role.sizes[:index]), sum(role.sizes[: index + 1])
    return (*parts, local_keys)


def _keys(
    roles: Sequence[Role | None], parts: Sequence[tuple[int, int]], rows: int, keys: int, call: AttentionCall
) -> tuple[Keys | None, int | None]:
    sizes: Sizes = (keys,)
    merged, mesh_dim = False, None
    for m, role in enumerate(roles):
        if role is not None and (role.key_sizes is not None or role.label == _KEYS):
            sizes, merged, mesh_dim = role.key_sizes or role.sizes, role.key_sizes is None, m
    if not call.causal:
        return (None if mesh_dim is None and not call.dropout else Keys(sizes, merged)), mesh_dim
    if mesh_dim is None and not call.dropout and not call.order and parts[-2] == (0, rows):
        return None, None
    order_q, order_k = _order(rows, call), _order(keys, call)
    bounds = [(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(len(sizes))]
    positions = tuple(cut(order_k, *ends) for ends in bounds)
    return Keys(sizes, merged, cut(order_q, *parts[-2]), positions), mesh_dim


def _order(length: int, call: AttentionCall) -> Runs:
    return zigzag_runs(length, call.order) if call.order else ((0, length),)
