"""The tensors of a divided module: parameters, buffers and constants, and the part of each that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ...mesh import name_of_part, part_of
from ...program.program import Division, Program, Value
from ...spmd.types import I, R, S, Shard, SpmdType
from ...torch_internals.modules import non_persistent_buffers
from ...weights.shard_spec import ShardSpec
from ..choose.conversions import WholeOnRank
from ..choose.stages import kept_by

__all__ = ["Stored", "constants_of", "numbered", "stored_of"]


class Stored(NamedTuple):
    """A tensor of a divided module, described as in the original module.

    Attributes:
        kind: "parameter", "buffer", "constant", or "tied" (another name of `same_as`).
        shape: of the whole tensor.
        type: on the axis of the division: I, S(dim, stride), or R of buffers and constants.
        rank: the one rank of the axis that has all of an S(0) tensor; None: the ranks have equal shards.
        axis: the part of the axis that it is cut over, "tp/2", "tp%2" or "tp/2%2"; "": all of it.
        trained: it requires a gradient.
        persistent: a buffer that is in state dicts.
        stages: the pipeline stages that hold it; (): all.
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    type: SpmdType = I
    trained: bool = True
    persistent: bool = True
    same_as: str = ""
    stages: tuple[int, ...] = ()
    axis: str = ""
    rank: int | None = None

    def spec(self, axis: str, size: int) -> ShardSpec:
        """Returns the layout of the tensor over the `size` ranks of `axis`."""
        if not isinstance(self.type, Shard) or size == 1:
            return ShardSpec(full_shape=self.shape)
        shards = part_of(self.axis).length(size)
        return ShardSpec(self.axis or axis, self.type.dim, self.type.stride, shards, self.shape, holder=self.rank)


def numbered(path: str, numbers: Iterable[int], tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Returns the tensors of equal layers `path.0`, `path.1`, ..., by name."""
    return {f"{path}.{number}.{name}": stored for number in numbers for name, stored in tensors.items()}


def stored_of(module: nn.Module | None, *divisions: Division) -> dict[str, Stored]:
    """Returns all tensors that a divided module keeps, by the original's names; unread tensors are whole on every rank.

    Args:
        module: the original, whose unread tensors are on the first stage; None: only tensors that the programs read.
        divisions: the divisions of the programs that the module runs, training first.

    Raises:
        ValueError: two programs divide one parameter differently.
    """
    layouts: dict[str, Layout] = {}
    values: dict[str, Value] = {}
    for division in divisions:
        for value, whole in zip(_leaves(division.program), _leaves(division.whole), strict=True):
            layout = _layout(value, division)
            before = layouts.setdefault(value.path, layout)
            if before != layout:
                raise ValueError(
                    f"{value.path} is {_said(before)} in the training program but {_said(layout)} in the evaluation "
                    "program: both must divide the parameters in the same way"
                )
            values[value.path] = whole
    if module is None:
        stored = {path: _of_value(value, layouts[path]) for path, value in values.items()}
    else:
        stored = _of_module(module, layouts)
    if len(divisions[0].stages) > 1:
        stages = kept_by(divisions)
        stored = {
            path: tensor._replace(stages=stages.get(tensor.same_as or path, (0,))) for path, tensor in stored.items()
        }
    for value, name in constants_of(*divisions).items():
        stored.setdefault(name, Stored("constant", value.shape, value.dtype, R, False, False))
    return stored


def constants_of(*divisions: Division) -> dict[Value, str]:
    """Returns the names under which the module keeps the constants of its programs; equal constants share a name."""
    names: dict[Value, str] = {}
    first: dict[str, torch.Tensor] = {}
    for division in divisions:
        for value in division.program.constants:
            assert value.constant is not None
            name = f"constants.{value.name}"
            while name in first and not _equal(first[name], value.constant):
                name += "_eval"
            first.setdefault(name, value.constant)
            names[value] = name
    return names


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


Layout = tuple[SpmdType, str]  # type, and the part of the axis over which the tensor is cut


def _leaves(program: Program) -> list[Value]:
    return [*program.parameters, *program.buffers]


def _layout(value: Value, division: Division) -> Layout:
    """Returns the layout of a leaf; the axes that cut it are adjacent, and cut it in the same way."""
    types = (*value.outer, division.types[value])
    cut = [number for number, spmd_type in enumerate(types) if isinstance(spmd_type, Shard)]
    if not cut or len(cut) == len(types):
        return types[0], ""
    sizes = [*division.axes.values()]
    size = math.prod(sizes[cut[0] : cut[-1] + 1]) if cut[0] else None
    return types[cut[0]], name_of_part(part_of(division.axis).axis, math.prod(sizes[cut[-1] + 1 :]), size)


def _said(layout: Layout) -> str:
    return f"{layout[0]} on {layout[1]}" if layout[1] else str(layout[0])


def _of_value(value: Value, layout: Layout) -> Stored:
    return Stored(value.kind, value.shape, value.dtype, **_placed(*layout), trained=value.requires_grad)


def _placed(spmd_type: SpmdType, axis: str) -> dict[str, Any]:
    if isinstance(spmd_type, WholeOnRank):
        return {"type": S(spmd_type.dim), "axis": axis, "rank": spmd_type.rank}
    return {"type": spmd_type, "axis": axis}


def _of_module(module: nn.Module, types: Mapping[str, Layout]) -> dict[str, Stored]:
    stored: dict[str, Stored] = {}
    first: dict[int, str] = {}  # by id of the tensor: the name that the programs call it by, else its first
    named: list[tuple[str, torch.Tensor, str]] = []
    for path, owner in module.named_modules(remove_duplicate=False):  # in the order of state dicts
        for kind, table in (("parameter", owner._parameters), ("buffer", owner._buffers)):
            named += [(f"{path}.{key}" if path else key, x, kind) for key, x in table.items() if x is not None]
    for name, tensor, _ in named:
        if id(tensor) not in first or (name in types and first[id(tensor)] not in types):
            first[id(tensor)] = name
    for name, tensor, kind in named:
        if first[id(tensor)] != name:
            stored[name] = Stored("tied", same_as=first[id(tensor)])
            continue
        placed = _placed(*types.get(name, (I if kind == "parameter" else R, "")))
        persistent = kind == "parameter" or _is_persistent(module, name)
        described = kind, tuple(tensor.shape), tensor.dtype
        stored[name] = Stored(*described, trained=tensor.requires_grad, persistent=persistent, **placed)
    return stored


def _is_persistent(module: nn.Module, name: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    return attribute not in non_persistent_buffers(module.get_submodule(owner))
