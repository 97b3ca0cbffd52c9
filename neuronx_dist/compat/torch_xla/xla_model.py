"""torch_xla.core.xla_model on any device.

A device that is not XLA computes at once, so `mark_step` has nothing to do and step closures run where they are added.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ... import comm
from ...gradients.reduce import complete_reduction
from ...parallel_layers import comm as collectives
from ...parallel_layers.utils import move_all_tensor_to_cpu
from ...torch_internals.tensors import pytree
from .groups import communicator, in_world, local_device, local_rank, rank, size

__all__ = [
    "REDUCE_AND",
    "REDUCE_MAX",
    "REDUCE_MIN",
    "REDUCE_MUL",
    "REDUCE_OR",
    "REDUCE_SUM",
    "RateTracker",
    "_fetch_gradients",
    "add_step_closure",
    "all_gather",
    "all_reduce",
    "all_reduce_bucketized_gradients",
    "all_to_all",
    "broadcast_master_param",
    "check_view_sharing",
    "collective_broadcast",
    "collective_permute",
    "do_on_ordinals",
    "fork_rng",
    "get_local_ordinal",
    "get_memory_info",
    "get_ordinal",
    "get_rng_state",
    "get_xla_supported_devices",
    "is_master_ordinal",
    "is_xla_tensor",
    "mark_step",
    "master_print",
    "mesh_reduce",
    "optimization_barrier_",
    "optimizer_step",
    "reduce_gradients",
    "reduce_scatter",
    "rendezvous",
    "save",
    "send_cpu_data_to_device",
    "set_rng_state",
    "unlazy",
    "wait_device_ops",
    "xla_device",
    "xla_device_hw",
    "xla_device_kind",
    "xla_real_devices",
    "xla_rendezvous",
    "xrt_world_size",
]

REDUCE_SUM, REDUCE_MUL, REDUCE_MIN, REDUCE_MAX, REDUCE_AND, REDUCE_OR = "sum", "mul", "min", "max", "and", "or"
_OPS = {REDUCE_SUM: "sum", REDUCE_MIN: "min", REDUCE_MAX: "max"}

Groups = Sequence[Sequence[int]] | None


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """Returns this rank's device, whatever its type; `n` is not used, since a process has one device."""
    return local_device()


def get_xla_supported_devices(devkind: str | None = None, max_devices: int | None = None) -> list[str]:
    """Returns the names of this process's devices: one."""
    return [str(local_device())][:max_devices]


def xla_real_devices(devices: Any = None) -> list[str]:
    """Returns the names of devices, or of this process's device."""
    return [str(device) for device in devices] if devices else [str(local_device())]


def xla_device_hw(device: Any) -> str:
    """Returns a device's type in capitals: "CPU", "CUDA"."""
    return torch.device(device).type.upper()


def xla_device_kind(device: Any = None) -> str:
    """Returns the name of the accelerator's model, or "cpu"."""
    chosen = torch.device(device) if device is not None else local_device()
    return torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else chosen.type


def is_xla_tensor(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is on this rank's device."""
    return tensor.device.type == local_device().type


def get_memory_info(device: Any = None) -> dict[str, int]:
    """Returns `bytes_used` and `bytes_limit` of an accelerator; an empty dict for the CPU."""
    chosen = torch.device(device) if device is not None else local_device()
    if chosen.type == "cpu":
        return {}
    free, total = torch.accelerator.get_memory_info(chosen)
    return {"bytes_used": total - free, "bytes_limit": total}


def mark_step(wait: bool = False, **kwargs: Any) -> None:
    """Does nothing: operators have run already."""


def wait_device_ops(devices: Any = ()) -> None:
    """Waits until the device has run what was started on it."""
    if local_device().type != "cpu":
        torch.accelerator.synchronize()


def add_step_closure(closure: Callable[..., Any], args: Sequence[Any] = (), run_async: bool = False) -> None:
    """Calls `closure(*args)` now: the values of the step are there."""
    closure(*args)


def unlazy(tensors: Any) -> None:
    """Does nothing: tensors have values."""


def optimization_barrier_(tensors: Any) -> None:
    """Does nothing: no compiler moves operators."""


def check_view_sharing(obj: Any) -> None:
    """Does nothing: views of one tensor may go anywhere."""


def get_ordinal(defval: int = 0) -> int:
    """Returns this process's rank."""
    return rank()


def get_local_ordinal(defval: int = 0) -> int:
    """Returns this process's index on its host."""
    return local_rank()


def xrt_world_size(defval: int = 1) -> int:
    """Returns the number of ranks."""
    return size()


def is_master_ordinal(local: bool = True) -> bool:
    """Returns whether this is the first rank, of its host or of all."""
    return (local_rank() if local else rank()) == 0


def master_print(*args: Any, fd: Any = None, local: bool = False, flush: bool = False) -> None:
    """Prints on rank 0, or with `local` on the first rank of each host."""
    if is_master_ordinal(local=local):
        print(*args, file=fd or sys.stdout, flush=flush)


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] | None = None) -> list[bytes]:
    """Waits for all ranks, and returns the payload of each.

    Raises:
        CommError: ranks are at different tags.
        NotImplementedError: `replicas`.
    """
    if replicas:
        raise NotImplementedError(f"rendezvous({tag!r}, replicas={replicas}): only all ranks together are possible")
    if size() == 1:
        return [payload]
    with in_world():
        everywhere = comm.gather_objects((tag, payload))
    others = sorted({other for other, _ in everywhere})
    if len(others) > 1:
        raise comm.CommError(f"rendezvous({tag!r}): the ranks are at different rendezvous: {others}")
    return [data for _, data in everywhere]


def xla_rendezvous(payload: bytes = b"", ordinals: Sequence[int] | None = None, tag: str | None = None) -> list[bytes]:
    """Waits for all ranks, and returns the payload of each."""
    return rendezvous(tag or "torch_xla.core.xla_model.xla_rendezvous", payload, ordinals)


def all_reduce(
    reduce_type: str,
    inputs: Any,
    scale: float = 1.0,
    groups: Groups = None,
    cctx: Any = None,
    pin_layout: bool = True,
) -> Any:
    """Reduces over the ranks of `groups`, times `scale`: a tensor gives a new one, a list is changed in place.

    Raises:
        NotImplementedError: `REDUCE_MUL`; `REDUCE_AND` and `REDUCE_OR`: use min and max.
    """
    op, is_tensor = _op("all_reduce", reduce_type), isinstance(inputs, torch.Tensor)
    with in_world(), torch.no_grad():
        reduced = collectives.all_reduce(op, inputs.clone() if is_tensor else inputs, communicator(groups))
        for tensor in reduced if scale != 1.0 else ():
            tensor.mul_(scale)
    return reduced[0] if is_tensor else None


def all_gather(
    value: torch.Tensor,
    dim: int = 0,
    groups: Groups = None,
    output: torch.Tensor | None = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Gathers the tensors of all ranks of `groups` along `dim`."""
    with in_world(), torch.no_grad():
        value = value if value.dim() else value.reshape(1)
        return collectives.all_gather(value, dim % value.dim(), communicator(groups), output)


def reduce_scatter(
    reduce_type: str,
    input: torch.Tensor,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: torch.Tensor | None = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Reduces over the ranks of `groups`; each gets its part along `scatter_dim`, times `scale`."""
    with in_world(), torch.no_grad():
        op, axis = _op("reduce_scatter", reduce_type), communicator(groups)
        return collectives.reduce_scatter(op, input, scale, scatter_dim, shard_count, axis, output)


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Sends each rank of `groups` its part along `split_dimension`; joins what arrives along `concat_dimension`."""
    with in_world(), torch.no_grad():
        result: torch.Tensor = comm.all_to_all(
            value, communicator(groups), split_dim=split_dimension, concat_dim=concat_dimension
        )
        return result


def collective_permute(value: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    """Sends `value` from the first to the second rank of each pair; ranks that are no destination get zeros."""
    with in_world(), torch.no_grad():
        result: torch.Tensor = comm.permute(value, "world", pairs=[(source, target) for source, target in pairs])
        return result


def collective_broadcast(
    tensors: Sequence[torch.Tensor], root_ordinal: int = 0, groups: Groups = None, pin_layout: bool = True
) -> None:
    """Sets tensors to those of a rank, in place.

    Raises:
        ValueError: `groups`, of which this rank's has not `root_ordinal`.
    """
    with in_world(), torch.no_grad():
        axis = communicator(groups)
        ranks = comm.communicator(axis).ranks
        if root_ordinal not in ranks:
            raise ValueError(
                f"collective_broadcast: rank {root_ordinal} is not in this rank's group {[*ranks]}: call it with the "
                "root of each group"
            )
        for tensor in tensors:
            comm.broadcast(tensor.detach(), axis, src=ranks.index(root_ordinal), out=tensor.detach())


def do_on_ordinals(target: Callable[..., Any], data: Any = (), ordinals: Collection[int] | int = (0,)) -> Any:
    """Calls `target(*data)`, with tensors on the CPU, on some ranks; the others wait for it, and return None."""
    chosen = (ordinals,) if isinstance(ordinals, int) else ordinals
    result = target(*move_all_tensor_to_cpu(data)) if rank() in chosen else None
    rendezvous("torch_xla.core.xla_model.do_on_ordinals")
    return result


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """Returns `reduce_fn` of the list of all ranks' data."""
    if size() == 1:
        return reduce_fn([data])
    with in_world():
        return reduce_fn(comm.gather_objects(move_all_tensor_to_cpu(data)))


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Sets parameters and buffers to those of rank 0: of a model that is equal on all ranks."""
    collective_broadcast([*model.parameters(), *model.buffers()])


def reduce_gradients(optimizer: torch.optim.Optimizer, groups: Groups = None, pin_layout: bool = True) -> None:
    """Averages the gradients over the ranks of `groups`; without them over the data-parallel ranks of the mesh."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    with in_world(), torch.no_grad():
        axis = ("dp", "cp") if groups is None else communicator(groups)
        if axis in ("dp", ("dp", "cp")) and comm.size(axis) == comm.size(("dp", "cp")):
            complete_reduction(params)
            return
        for grad in collectives.all_reduce("sum", [p.grad for p in params if p.grad is not None], axis):
            grad.div_(comm.size(axis))


def all_reduce_bucketized_gradients(
    gradients: Sequence[torch.Tensor], scale: float, groups: Groups, pin_layout: bool, bucket_cap_mb: int = 0
) -> None:
    """Sums gradients over the ranks of `groups`, times `scale`, in place."""
    all_reduce(REDUCE_SUM, list(gradients), scale, groups)


def _fetch_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns the gradients of an optimizer's parameters, as scripts pass them to a reduction."""
    return [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict[str, Any] | None = None,
    groups: Groups = None,
    pin_layout: bool = True,
) -> Any:
    """Averages the gradients as `reduce_gradients`, and steps."""
    if not hasattr(optimizer, "nxd_config"):  # an `NxDOptimizer` reduces them itself
        reduce_gradients(optimizer, groups)
    return optimizer.step(**(optimizer_args or {}))


def save(data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False) -> None:
    """Saves data, on the CPU, by `torch.save` on the first rank; the other ranks wait for it."""
    on_cpu = move_all_tensor_to_cpu(data)
    if not master_only or is_master_ordinal(local=not global_master):
        torch.save(on_cpu, file_or_path)
    if master_only:
        rendezvous("torch_xla.core.xla_model.save")


def send_cpu_data_to_device(datas: Any, device: Any, input_sharding: Any = None) -> Any:
    """Moves the tensors of nested containers to a device."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), datas)


def set_rng_state(seed: int | torch.Tensor, device: Any = None) -> None:
    """Seeds torch's generators, or sets the CPU's to a state of `get_rng_state`."""
    if isinstance(seed, torch.Tensor):
        torch.set_rng_state(seed)
    else:
        torch.manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Returns the state of the CPU's generator."""
    return torch.get_rng_state()


@contextmanager
def fork_rng(device: Any = None, enabled: bool = True) -> Iterator[None]:
    """Restores the state of torch's generators at the end."""
    here = local_device()
    devices, kind = ([], "cuda") if here.type == "cpu" else ([here], here.type)
    with torch.random.fork_rng(devices, enabled, device_type=kind):
        yield


class RateTracker:
    """Number of items a second, which a script adds step by step."""

    def __init__(self, smooth_factor: float | None = None) -> None:
        self._start = self._last = time.monotonic()
        self._smoothing = 0.4 if smooth_factor is None else smooth_factor
        self._count = self._since = self._rate = 0.0

    def add(self, count: float) -> None:
        """Adds items that are done."""
        self._count += count
        self._since += count

    def rate(self) -> float:
        """Returns the rate since the last call, smoothed with earlier ones."""
        now = time.monotonic()
        if now > self._last and self._since:
            latest = self._since / (now - self._last)
            self._rate = self._rate * self._smoothing + latest * (1 - self._smoothing) if self._rate else latest
            self._last, self._since = now, 0.0
        return self._rate

    def global_rate(self) -> float:
        """Returns the rate since the start."""
        return self._count / max(time.monotonic() - self._start, 1e-9)


def _op(verb: str, reduce_type: str) -> str:
    if reduce_type not in _OPS:
        raise NotImplementedError(f"{verb}: reduction {reduce_type!r} is not possible; possible: {', '.join(_OPS)}")
    return _OPS[reduce_type]
