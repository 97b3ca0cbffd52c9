"""Checkpoints of parallel modules: merged into the original's, each value saved once, loaded into any layout.

    merged = merge_state_dicts([module states of all ranks], [optimizer states of all ranks])
    load_merged_state_dict(module, merged[0], optimizer, merged[1])       # under any plan; or into the original

    torch.save(deduped_state_dict(module, optimizer), f"{rank}.pt")       # each value on one rank
    load_deduped_state_dict(module, *torch.load(f"{rank}.pt"), ...)       # in the same layout

A rank's `module.state_dict()` and `optimizer.state_dict()` contain their layout (`layouts.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from ... import comm
from ...mesh import Axis
from ...weights.shard_spec import ShardSpec
from .layouts import LAYOUT, StateLayout, layout_of
from .optimizer_layout import MASTER, RankState, Rows, names_of_groups, spec_for, state_dict_with
from .parallel_module import ParallelModule

__all__ = [
    "deduped_state_dict",
    "deduped_state_dicts",
    "load_deduped_state_dict",
    "load_merged_state_dict",
    "load_merged_state_dicts",
    "load_sharded_state_dict",
    "merge_state_dicts",
]


def merge_state_dicts(
    module_state_dicts: Sequence[Mapping[str, Any]],
    optimizer_state_dicts: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Merges the state dicts of all ranks, or of one unit, into those of the original module and its plain optimizer.

    Under ZeRO the ranks of one group of `zero_ngroups` are enough. Deduped state dicts merge as well. The optimizer may
    be any elementwise one.

    Raises:
        ValueError: a part of a tensor is in none of the state dicts; or a state dict has no layout.
    """
    if not module_state_dicts:
        raise ValueError("merge_state_dicts got no state dicts: pass the state dicts of all ranks, or of one unit")
    layouts = [layout_of(state) for state in module_state_dicts]
    names = list(dict.fromkeys(name for state in module_state_dicts for name in state))
    merged: dict[str, Any] = OrderedDict()
    for name in names:
        pieces: dict[int, Any] = {}
        spec = ShardSpec()
        for state, layout in zip(module_state_dicts, layouts):
            if name in state:
                value = state[name]
                spec = layout.specs.get(name, spec)
                pieces.setdefault(spec.index_of(layout.index), value)
        merged[name] = _assembled(name, pieces, spec)
    if optimizer_state_dicts is None:
        return merged, None
    return merged, _merged_optimizer([RankState.of(state) for state in optimizer_state_dicts])


def load_merged_state_dict(
    module: nn.Module,
    module_state_dict: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    optimizer_state_dict: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
) -> None:
    """Loads an unsharded state dict, of `merge_state_dicts` or of the original module and optimizer, into this layout.

    Args:
        module: a parallel module, a module with parallel submodules, or the original.
        optimizer: an optimizer of `build_optimizer`, or a plain one of the original.
        device: the module is moved there first; None: to the mesh's device, unless that is a CPU or there is no mesh.

    Raises:
        ValueError: the state is of another model.
    """
    _move(module, device)
    state = module.state_dict()
    local: Mapping[str, Any] = module_state_dict
    if any(isinstance(submodule, ParallelModule) for submodule in module.modules()):
        layout = layout_of(state)
        local = OrderedDict((name, value) for name, value in module_state_dict.items() if name not in layout.elsewhere)
        for name, value in state.items():
            if name in local and isinstance(value, torch.Tensor):
                local[name] = _local_part(name, local[name], layout.spec(name, value.shape), layout.index)
    module.load_state_dict(local)
    if optimizer is not None and optimizer_state_dict is not None:
        if LAYOUT in optimizer.state_dict():
            _load_optimizer(optimizer, optimizer_state_dict)
        else:
            optimizer.load_state_dict(dict(optimizer_state_dict))


def deduped_state_dict(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Returns this rank's state dicts without values of earlier ranks: all ranks together have each value once."""
    state = module.state_dict()
    layout = layout_of(state)
    before = {name for name, group in _tied_groups(module).items() if group.rank != 0}  # an earlier stage has them
    for name in list(state):
        is_first = layout.unit == 0 and layout.specs.get(name, ShardSpec()).is_first(layout.index)
        if not is_first or name in before:
            del state[name]
    if optimizer is None:
        return state, None
    whole = optimizer.state_dict()
    rank_state = RankState.of(whole)
    states = {
        name: {key: value for key, value in values.items() if _is_first(rank_state, name, value, name not in before)}
        for name, values in rank_state.states.items()
    }
    return state, state_dict_with(optimizer, states, whole["param_groups"])


def load_deduped_state_dict(
    module: nn.Module,
    module_state_dict: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    optimizer_state_dict: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
) -> None:
    """Loads a state dict of `deduped_state_dict`, of this rank and layout; other ranks send the missing values.

    All ranks call it together.

    Args:
        device: the module is moved there first; None: to the mesh's device, unless that is a CPU or there is no mesh.

    Raises:
        ValueError: the state is of another rank or layout.
    """
    _move(module, device)
    state = module.state_dict()
    here, saved = layout_of(state), layout_of(module_state_dict)
    _check_same_layout(here, saved)
    tied = _tied_groups(module)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            tensor = module_state_dict.get(name, value).to(value.device).contiguous().clone()
            copies = here.specs.get(name, ShardSpec()).replicated_over
            axes = ("dp", *((copies,) if copies else ()), *([tied[name]] if name in tied else ()))
            state[name] = _received(tensor, axes)
    module.load_state_dict(state)
    if optimizer is not None and optimizer_state_dict is not None:
        _load_deduped_optimizer(optimizer, optimizer_state_dict, tied)


def load_sharded_state_dict(
    module: nn.Module,
    module_state_dict: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    optimizer_state_dict: dict[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
) -> None:
    """Loads what `module.state_dict()` and `optimizer.state_dict()` returned on this rank in the same layout.

    Args:
        device: the module is moved there first; None: to the mesh's device, unless that is a CPU or there is no mesh.
    """
    _move(module, device)
    module.load_state_dict(module_state_dict)
    if optimizer is not None and optimizer_state_dict is not None:
        optimizer.load_state_dict(optimizer_state_dict)


load_merged_state_dicts = load_merged_state_dict
deduped_state_dicts = deduped_state_dict


def _move(module: nn.Module, device: str | torch.device | None) -> None:
    if device is None and comm.is_initialized() and comm.current().backend.device.type != "cpu":
        device = comm.current().backend.device
    if device is not None:
        module.to(device)


# --- modules ----------------------------------------------------------------------------------------------------------


def _assembled(name: str, pieces: Mapping[int, Any], spec: ShardSpec) -> Any:
    if not spec.is_sharded:
        return next(iter(pieces.values()))
    missing = [index for index in range(spec.num_partitions) if index not in pieces]
    if missing:
        raise ValueError(
            f"shard {missing[0]} of {spec.num_partitions} of {name!r} is in none of the state dicts: pass the state "
            "dicts of all ranks, or at least of one unit"
        )
    device = pieces[0].device
    return spec.assemble([pieces[index].to(device) for index in range(spec.num_partitions)])


def _local_part(name: str, value: torch.Tensor, spec: ShardSpec, index: int) -> torch.Tensor:
    if tuple(value.shape) != spec.unpadded_shape:
        raise ValueError(
            f"{name!r} has shape {list(value.shape)} in the state dict but {list(spec.unpadded_shape)} in this module: "
            "load the state dict of the same model"
        )
    return spec.local_slice(value, spec.index_of(index))


def _check_same_layout(here: StateLayout, saved: StateLayout) -> None:
    for what in ("plan_ngpus", "runtime_ngpus", "rank", "specs"):
        if getattr(here, what) != getattr(saved, what):
            raise ValueError(
                f"a deduped state dict can only be loaded where it was saved: it has {what} {getattr(saved, what)}, "
                f"here {what} is {getattr(here, what)}. Merge the state dicts of all ranks (merge_state_dicts), and "
                "load the result by load_merged_state_dict"
            )


def _tied_groups(module: nn.Module) -> dict[str, comm.Communicator]:
    return module.stages_of_weights() if isinstance(module, ParallelModule) else {}


def _received(tensor: torch.Tensor, axes: Sequence[Any]) -> torch.Tensor:
    """Broadcasts a tensor from the first rank along each axis in turn; on other ranks `tensor` is the buffer."""
    if comm.is_initialized():
        for axis in axes:
            tensor = comm.broadcast(tensor, axis, out=tensor)
    return tensor


# --- optimizers -------------------------------------------------------------------------------------------------------


def _merged_optimizer(ranks: Sequence[RankState]) -> dict[str, Any]:
    """Returns the state dict of a plain optimizer of the original."""
    groups: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    for group, names in zip(ranks[0].groups, names_of_groups(ranks[0], [rank.group_names for rank in ranks])):
        first = len(numbers)
        numbers.update((name, first + offset) for offset, name in enumerate(names))
        groups.append({**group, "params": [numbers[name] for name in names]})
    state: dict[int, dict[str, Any]] = {}
    masters: dict[int, torch.Tensor] = {}
    for name, number in numbers.items():
        keys = dict.fromkeys(key for rank in ranks for key in rank.states.get(name, ()))
        values = {key: _merged_value(ranks, name, key) for key in keys}
        if MASTER in values:  # no part of the state, or a plain optimizer would use it
            masters[number] = values.pop(MASTER)
        if values:
            state[number] = values
    return {"state": state, "param_groups": groups, **({"master_weights": masters} if masters else {})}


def _merged_value(ranks: Sequence[RankState], name: str, key: str) -> Any:
    holders = [rank for rank in ranks if key in rank.states.get(name, ())]
    value = holders[0].states[name][key]
    if not holders[0].is_elementwise(name, value):
        return value
    by_shard: dict[int, dict[int, torch.Tensor]] = {}
    for rank in holders:
        shard = spec_for(rank, name).index_of(rank.index)
        by_shard.setdefault(shard, {}).setdefault(rank.rows.index, rank.states[name][key])
    first, spec = holders[0], spec_for(holders[0], name)
    what = f"{key} of {name}"
    shards, absent = {}, None
    for index, pieces in by_shard.items():
        missing = [row for row in range(first.rows.degree) if row not in pieces]
        if missing:
            absent = missing[0]
        else:
            rows = [pieces[row].to(value.device) for row in range(first.rows.degree)]
            shards[index] = first.rows.join(rows, first.shapes[name])
    if absent is not None and (spec.is_sharded or not shards):
        raise ValueError(
            f"part {absent} of {first.rows.degree} of {what!r}, which ZeRO divides, is in none of the state dicts: "
            "pass the state dicts of all ranks"
        )
    return _assembled(what, shards, spec)


def _load_optimizer(optimizer: torch.optim.Optimizer, merged: Mapping[str, Any]) -> None:
    current = RankState.of(optimizer.state_dict())
    stages = comm.gather_objects(current.group_names, "pp") if comm.is_initialized() else [current.group_names]
    names = [name for group in names_of_groups(current, stages) for name in group]
    given = [index for group in merged["param_groups"] for index in group["params"]]
    if len(names) != len(given) or len(current.groups) != len(merged["param_groups"]):
        raise ValueError(
            f"the loaded optimizer state has {len(given)} parameters in {len(merged['param_groups'])} groups, but this "
            f"optimizer has {len(names)} in {len(current.groups)}: load the state of the same model and optimizer"
        )
    whole = {index: dict(state) for index, state in merged["state"].items()}
    for index, master in merged.get("master_weights", {}).items():
        whole.setdefault(index, {})[MASTER] = master
    states: dict[str, dict[str, Any]] = {}
    for name, index in zip(names, given):
        if index in whole and name in current.shapes:
            spec = spec_for(current, name)
            states[name] = {
                key: current.rows.cut(spec.local_slice(value, spec.index_of(current.index))).clone()
                if _is_whole(value, spec)
                else deepcopy(value)
                for key, value in whole[index].items()
            }
    optimizer.load_state_dict(state_dict_with(optimizer, states, merged["param_groups"]))


def _is_whole(value: Any, spec: ShardSpec) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) == spec.unpadded_shape and value.dim() > 0


def _is_first(state: RankState, name: str, value: Any, is_first_stage: bool) -> bool:
    """Returns whether this rank is the first that has a value."""
    if not isinstance(value, torch.Tensor):
        return True
    first_copy = is_first_stage and (state.unit == 0 if state.rows.is_whole else state.rows.copy == 0)
    if not state.is_elementwise(name, value):
        return first_copy and state.index == 0 and state.rows.index == 0
    return first_copy and spec_for(state, name).is_first(state.index)


def _load_deduped_optimizer(
    optimizer: Any, state_dict: Mapping[str, Any], tied: Mapping[str, comm.Communicator]
) -> None:
    current, saved = RankState.of(optimizer.state_dict()), RankState.of(state_dict)
    if (current.rank, current.rows, current.specs) != (saved.rank, saved.rows, saved.specs):
        raise ValueError(
            f"the optimizer's deduped state was saved by rank {saved.rank} with {saved.rows}, but this is rank "
            f"{current.rank} with {current.rows}: merge the state dicts of all ranks (merge_state_dicts), and load the "
            "result by load_merged_state_dict"
        )
    descriptions = {
        name: {key: _description(saved, name, value) for key, value in values.items()}
        for name, values in saved.states.items()
    }
    by_rank = comm.gather_objects(descriptions) if comm.is_initialized() else [descriptions]
    states: dict[str, dict[str, Any]] = {}
    for name in current.shapes:
        known: dict[str, Any] = {}
        for described in by_rank:
            known = {**described.get(name, {}), **known}
        for key in sorted(known):
            is_elementwise, dtype, shape_or_value = known[key]
            value = saved.states.get(name, {}).get(key)
            if dtype is None:
                value = shape_or_value if value is None else value
            else:
                shape = current.rows.shape(current.shapes[name]) if is_elementwise else shape_or_value
                device = comm.current().backend.device if comm.is_initialized() else torch.device("cpu")
                tensor = torch.empty(shape, dtype=dtype, device=device) if value is None else value.to(device).clone()
                copies = spec_for(current, name).replicated_over if is_elementwise else "tp"
                value = _received_state(optimizer, tensor, is_elementwise, copies, current.rows)
                value = _received(value, [tied[name]] if name in tied else ())
            states.setdefault(name, {})[key] = value
    optimizer.load_state_dict(state_dict_with(optimizer, states, state_dict["param_groups"]))


def _description(saved: RankState, name: str, value: Any) -> tuple[bool, Any, Any]:
    if not isinstance(value, torch.Tensor):
        return False, None, value
    return saved.is_elementwise(name, value), value.dtype, tuple(value.shape)


def _received_state(
    optimizer: Any, tensor: torch.Tensor, is_elementwise: bool, copies: Axis, rows: Rows
) -> torch.Tensor:
    if not comm.is_initialized():
        return tensor
    axes: list[Any] = ["dp"]
    if not rows.is_whole:
        shard = optimizer.shards[0]
        axes = [shard.replicas, *(() if is_elementwise else (shard.group,))]
    return _received(tensor, [*axes, *((copies,) if copies else ())])
