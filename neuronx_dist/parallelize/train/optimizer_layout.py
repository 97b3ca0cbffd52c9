"""An optimizer's state on one rank, by parameter names, whether ZeRO shards it or not.

    from a state dict                `RankState.of(state_dict)`: {name: {key: value}}, the layout of this rank's part
    into an optimizer's              `state_dict_with(optimizer, states, options)`

A value is *elementwise* if it has one element for each element of this rank's part of the parameter (`exp_avg`); other
values, such as `step`, are equal everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ... import comm
from ...optimizer.zero1 import NeuronZero1Optimizer
from ...weights.shard_spec import ShardSpec
from ..config import ComputeConfig
from .layouts import LAYOUT, position_data, spec_from_data, specs_data
from .parallel_module import ParallelModule

__all__ = ["MASTER", "RankState", "Rows", "names_of_groups", "optimizer_layout", "spec_for", "state_dict_with"]

MASTER = "master_weight"  # the key of the copy of a weight that ZeRO keeps in a finer dtype
States = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Rows:
    """The rows of a parameter that ZeRO assigns to a rank: piece `index` of `degree`, and the number of the copy."""

    degree: int = 1
    index: int = 0
    copy: int = 0

    def shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of an elementwise value for a parameter of shape `local` on this rank."""
        if self.is_whole:
            return tuple(local)
        rows, *rest = local or (1,)
        return (-(-rows // self.degree), *rest)

    @property
    def is_whole(self) -> bool:
        return self.degree == 1

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows of a value, `[rows, ...]`, padded with zeros."""
        if self.is_whole:
            return value
        value = value.reshape(value.shape or (1,))
        count = self.shape(value.shape)[0]
        piece = value[self.index * count : (self.index + 1) * count]
        padding = value.new_zeros(count - piece.shape[0], *value.shape[1:])
        return torch.cat([piece, padding])

    def join(self, pieces: Sequence[torch.Tensor], local: Sequence[int]) -> torch.Tensor:
        """Joins the pieces of all ranks, as `cut` returned them."""
        if self.is_whole:
            return pieces[0]
        return torch.cat(list(pieces)).reshape(-1)[: math.prod(local)].reshape(tuple(local))


@dataclass
class RankState:
    """An optimizer's state on one rank.

    Attributes:
        states: by parameter name and key.
        groups: the parameter groups: options, and names of their parameters as "params".
        shapes: shapes of the parameters on this rank.
        specs: layouts of the sharded parameters.
        index: index of this rank's shard of them.
        rows: the rows that ZeRO assigns to this rank.
        order: the names of all parameters of the module, other pipeline stages included.
    """

    rank: int
    unit: int
    index: int
    plan_ngpus: int
    runtime_ngpus: int
    states: States
    groups: list[dict[str, Any]]
    shapes: dict[str, tuple[int, ...]]
    specs: dict[str, ShardSpec]
    rows: Rows
    order: list[str]

    @property
    def group_names(self) -> list[list[str]]:
        """The names of the parameters of each group that are on this rank."""
        return [group["params"] for group in self.groups]

    @classmethod
    def of(cls, state_dict: Mapping[str, Any]) -> RankState:
        """Reads the `state_dict()` of an optimizer of `build_optimizer`.

        Raises:
            ValueError: the state dict is of another optimizer.
        """
        layout = state_dict.get(LAYOUT)
        if layout is None:
            raise ValueError(
                "the optimizer's state dict has no layout, so build_optimizer did not make its optimizer; load a state "
                "dict of the original module's optimizer by load_merged_state_dict"
            )
        names: list[str] = layout["names"]
        if "base_state" in state_dict:
            trained = [names[index] for index in layout["trained"]]
            states = {trained[index]: dict(state) for index, state in state_dict["base_state"].items()}
            for index, master in state_dict.get("sharded_master_weights", {}).items():
                if index < len(trained):  # a stage without parameters has a master without a parameter
                    states.setdefault(trained[index], {})[MASTER] = master
        else:
            states = {names[index]: dict(state) for index, state in state_dict["state"].items()}
        groups = [
            {**group, "params": [names[index] for index in group["params"] if names]}  # a stage may have no parameters
            for group in state_dict["param_groups"]
        ]
        return cls(
            **{name: layout[name] for name in ("rank", "unit", "index", "plan_ngpus", "runtime_ngpus")},
            states=states,
            groups=groups,
            shapes={name: tuple(shape) for name, shape in zip(names, layout["shapes"])},
            specs={name: spec_from_data(data) for name, data in layout["specs"].items()},
            rows=Rows(**layout["rows"]),
            order=layout["order"],
        )

    def is_elementwise(self, name: str, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and tuple(value.shape) == self.rows.shape(self.shapes[name])


def optimizer_layout(
    optimizer: torch.optim.Optimizer, module: nn.Module, config: ComputeConfig | None
) -> dict[str, Any]:
    """Returns the layout that `RankState` reads beside an optimizer's state dict, as plain data."""
    names = {id(param): name for name, param in module.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"] if id(param) in names]
    named = {names[id(param)]: param for param in params}
    rows, trained = Rows(), list(range(len(params)))
    if isinstance(optimizer, NeuronZero1Optimizer):
        position = {id(param): index for index, param in enumerate(params)}
        trained = [position[id(shard.param)] for shard in optimizer.shards if id(shard.param) in position]
        first = next(iter(optimizer.shards), None)
        if first is not None:
            rows = Rows(first.degree, first.group.rank, first.replicas.rank)
    index = comm.rank("tp") if comm.is_initialized() else 0
    return {
        **position_data(index, config),
        "names": list(named),
        "order": module.parameter_names() if isinstance(module, ParallelModule) else [*names.values()],
        "shapes": [list(param.shape) for param in named.values()],
        "specs": specs_data(named),
        "rows": {"degree": rows.degree, "index": rows.index, "copy": rows.copy},
        "trained": trained,
    }


def state_dict_with(
    optimizer: torch.optim.Optimizer, states: States, options: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the state dict of an optimizer with other states, by parameter names, and other options of its groups."""
    state_dict = optimizer.state_dict()
    layout = state_dict[LAYOUT]
    names: list[str] = layout["names"]
    groups = [
        {**group, **{key: value for key, value in new.items() if key not in ("params", "param_names")}}
        for group, new in zip(state_dict["param_groups"], options)
    ]
    result = {**state_dict, "param_groups": groups}
    plain = {name: {key: x for key, x in state.items() if key != MASTER} for name, state in states.items()}
    if "base_state" in state_dict:
        trained = {number: names[index] for number, index in enumerate(layout["trained"])}
        result["base_state"] = {number: plain[name] for number, name in trained.items() if plain.get(name)}
        masters = {number: states[name][MASTER] for number, name in trained.items() if MASTER in states.get(name, ())}
        result["sharded_master_weights"] = masters  # the other masters are made from the weights
    else:
        result["state"] = {index: plain[name] for index, name in enumerate(names) if plain.get(name)}
    return result


def names_of_groups(state: RankState, ranks: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """Returns the names in each parameter group of the original, from the groups of ranks with one stage each."""
    position = {name: number for number, name in enumerate(state.order)}
    groups = []
    for parts in zip(*ranks, strict=True):
        names = list(dict.fromkeys(name for part in parts for name in part))
        groups.append(names if len(names) == len(parts[0]) else sorted(names, key=position.__getitem__))
    return groups


def spec_for(state: RankState, name: str) -> ShardSpec:
    """Returns the layout of a parameter over the ranks of a unit."""
    return state.specs.get(name, ShardSpec(full_shape=state.shapes[name]))
