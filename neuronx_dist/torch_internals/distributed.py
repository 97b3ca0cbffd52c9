"""Process groups, and files of `torch.distributed.checkpoint`."""

from __future__ import annotations

import datetime
import functools
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

_INTERFACES = (dist.ProcessGroup, torch._C._distributed_c10d.Backend)  # of groups, and of what moves their bytes


def default_store() -> Any:
    """Returns the store of the job's processes, which passes on failures and agreements."""
    return dist.distributed_c10d._get_default_store()


def default_group() -> dist.ProcessGroup:
    """Returns the group of all processes, which knows the devices and options of `init_process_group`."""
    return dist.distributed_c10d._get_default_group()


def device_types(group: dist.ProcessGroup) -> list[torch.device]:
    """Devices whose tensors a group communicates; without it the device of a job cannot be chosen."""
    return group._device_types


def backend_timeout(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """Returns the timeout that a group was made with; None if torch does not say."""
    try:
        options = getattr(group._get_backend(device_types(group)[-1]), "options", None)
    except RuntimeError:  # a group in Python may have no backend below it
        return None
    return getattr(options, "_timeout", None)


def python_class(group: dist.ProcessGroup) -> type | None:
    """Returns the class in Python that implements a group, or its backend; None: C++, which has every method."""
    implementation: type = type(group)
    if implementation is dist.ProcessGroup:
        implementation = type(group._get_backend(device_types(group)[-1]))
    bases = [base for base in implementation.__mro__ if base not in _INTERFACES]
    members = [member for base in bases for member in vars(base).values()]
    is_native = any(type(member).__name__ == "instancemethod" for member in members)  # pybind11's methods
    is_python = any(isinstance(member, FunctionType) for member in members)
    return implementation if is_python and not is_native else None


def overrides(implementation: type, method: str) -> bool:
    """Returns whether the class of a group or backend defines a method: torch's interfaces have all, which raise."""
    return getattr(implementation, method, None) not in [getattr(base, method, None) for base in _INTERFACES]


def is_registered(group: dist.ProcessGroup) -> bool:
    """Returns whether a group has not been destroyed, alone or with all others: else a cached one would be reused."""
    return group in dist.distributed_c10d._world.pg_map


def set_ranks(group: dist.ProcessGroup, indices: dict[int, int]) -> None:
    """Registers the index of each rank in a group: without it torch refuses global ranks as peers."""
    dist.distributed_c10d._world.pg_group_ranks[group] = indices


def make_group(ranks: Sequence[int], name: Any, device: torch.device | None, **options: Any) -> dist.ProcessGroup:
    """Makes a group among its members alone, under `name`: members of `new_group` count differently."""
    position = list(ranks).index(dist.get_rank()) if dist.get_rank() in ranks else None
    group, _ = dist.distributed_c10d._new_process_group_helper(
        len(ranks), position, list(ranks), dist.get_backend(), default_store(), name, device_id=device, **options
    )
    return group


def storage_info(filesystem: Any, *extent: Any) -> Any:
    """Makes the entry of a file in `.metadata`: path, offset and length.

    Args:
        filesystem: the module `torch.distributed.checkpoint.filesystem`, which takes a second to import.
    """
    return filesystem._StorageInfo(*extent)


def before_saving(check: Callable[[Any], None]) -> None:
    """Makes `torch.distributed.checkpoint.save` and `async_save` call `check(state dict)` first.

    It does nothing as long as the script has not imported them. Without it they save the shards of one rank for all.
    """
    saver = sys.modules.get("torch.distributed.checkpoint.state_dict_saver")
    if saver is not None:
        _watch(saver, check)


@functools.cache
def _watch(saver: Any, check: Callable[[Any], None]) -> None:
    resolve = saver._stateful_to_state_dict

    @functools.wraps(resolve)
    def checked(state_dict: Any) -> Any:
        resolved = resolve(state_dict)
        check(resolved)
        return resolved

    saver._stateful_to_state_dict = checked


def is_flattened(param: torch.Tensor) -> bool:
    """Returns whether a parameter is or views a flat one of FullyShardedDataParallel; without it pieces are wholes."""
    return bool(param.__dict__.get("_fsdp_flattened", False))


def before_flattening(tensor_class: type, refuse: Callable[[torch.Tensor], bool]) -> None:
    """Makes FullyShardedDataParallel call `refuse(param)` first; without it its error is of memory or of views."""
    tensor_class._fsdp_flattened = property(refuse)  # type: ignore[attr-defined]


def before_averaging(check: Callable[[Sequence[torch.Tensor], dist.ProcessGroup | None], None]) -> None:
    """Makes the model averagers of torch call `check(parameters, group)` first, once the script has imported them.

    Without it they average shards. (`torch.distributed.optim.PostLocalSGDOptimizer` averages by one of them.)
    """
    averaging = sys.modules.get("torch.distributed.algorithms.model_averaging.utils")
    if averaging is not None:
        _watch_averaging(averaging, check)


@functools.cache
def _watch_averaging(averaging: Any, check: Callable[[Sequence[torch.Tensor], dist.ProcessGroup | None], None]) -> None:
    average = averaging.average_parameters

    @functools.wraps(average)
    def checked(params: Any, process_group: dist.ProcessGroup | None) -> None:
        params = list(params)
        check(params, process_group)
        average(iter(params), process_group)

    averaging.average_parameters = checked
