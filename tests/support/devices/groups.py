"""Process groups of devices that nobody here has, imitated over gloo: exactly the published methods and limits.

    neuron          TorchNeuron's group as published: no messages, equal all-to-all only, a barrier of all ranks only
    neuron_single   the same with the method names of torch 2.13 and later (`all_gather_single`, ...)
    tpu_dist        torch_tpu's group: no messages, no coalesced or object collectives, no gather or scatter,
                    ascending ranks, no `split_group`

`imitate("neuron without broadcast")` takes methods away from one of them. A call that the group lacks raises, so that a
new dependency on a method is noticed. The groups hold CPU tensors. Facts: docs/devices.md.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroup

from neuronx_dist.comm.backends import capabilities

__all__ = ["BACKENDS", "imitate"]

_NAMES_OF_COLLECTIVES = {
    name
    for name in dir(ProcessGroup)
    if name.startswith(("all", "_allgather", "reduce", "_reduce", "broadcast", "gather", "scatter", "send", "recv"))
    or name in ("barrier", "monitored_barrier", "split_group", "merge_remote_group", "_start_coalescing")
} | {"all_gather_single", "reduce_scatter_single", "all_to_all_single"}


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor as bytes: gloo does not move all dtypes."""
    return x.view(-1).view(torch.uint8)


class Imitation(ProcessGroup):
    """Base of the imitated groups: no collective at all, on a gloo group that has all."""

    NAME = ""
    MISSING: frozenset[str] = frozenset()  # methods that were taken away

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._ranks = list(options.global_ranks_in_group)  # empty for the default group
        self._gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        self._name = self._desc = ""

    def __getattribute__(self, name: str) -> Any:
        kind = type(self)
        is_there = any(name in vars(base) for base in kind.__mro__[: kind.__mro__.index(Imitation)])
        if name in _NAMES_OF_COLLECTIVES and (not is_there or name in kind.MISSING):
            raise NotImplementedError(f"ProcessGroup{kind.__name__} has no {name}")
        return super().__getattribute__(name)

    def getBackendName(self) -> str:
        return self.NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_desc(self) -> str:
        return self._desc

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def shutdown(self) -> None:
        pass


class _Reductions(Imitation):
    """Calls that every imitated group has."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return self._gloo.allreduce(tensors, options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        """Broadcasts as published: every rank but the source contributes zeros to a sum."""
        (x,) = tensors
        if self.rank() != options.rootRank:
            x.zero_()
        return self._gloo.allreduce([_bytes(x)], AllreduceOptions())

    def allgather(self, outs: list[list[torch.Tensor]], xs: list[torch.Tensor], options: Any = None) -> Any:
        return self._gloo.allgather([[_bytes(out) for out in outs[0]]], [_bytes(xs[0])])

    def barrier(self, opts: Any = None) -> Any:
        if self._ranks:
            raise NotImplementedError("barrier is supported on the default group only")
        return self._gloo.barrier()


class _Rooted(_Reductions):
    """Collectives with a root, of TorchNeuron's group."""

    def reduce(self, tensors: Any, options: Any) -> Any:
        return self._gloo.reduce(tensors, options)

    def gather(self, outs: Any, xs: Any, options: Any) -> Any:
        return self._gloo.gather(outs, xs, options)

    def scatter(self, outs: Any, xs: Any, options: Any) -> Any:
        return self._gloo.scatter(outs, xs, options)


def _gather(gloo: Any, out: torch.Tensor, x: torch.Tensor) -> Any:
    assert out.shape == (gloo.size() * x.shape[0], *x.shape[1:])
    out = _bytes(out)
    return gloo.allgather([list(out.chunk(gloo.size()))], [_bytes(x)])


def _all_to_all(gloo: Any, out: torch.Tensor, x: torch.Tensor, sizes: list[int], sent: list[int]) -> Any:
    bytes_of = lambda y, parts: [n * (y.nbytes // max(1, y.shape[0])) for n in parts]  # noqa: E731
    return gloo.alltoall_base(_bytes(out), _bytes(x), bytes_of(out, sizes), bytes_of(x, sent))


class Neuron(_Rooted):
    """TorchNeuron's group before torch 2.13's names."""

    NAME = "neuron"

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> Any:
        return _gather(self._gloo, out, x)

    def _reduce_scatter_base(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> Any:
        return self._gloo._reduce_scatter_base(out, x, options)

    def alltoall_base(self, out: torch.Tensor, x: torch.Tensor, sizes: Any, sent: Any, options: Any) -> Any:
        if len({*sizes}) > 1 or len({*sent}) > 1:
            raise RuntimeError(f"ProcessGroupNeuron: all_to_all takes equal splits only, got {sizes} and {sent}")
        return _all_to_all(self._gloo, out, x, [], [])


class NeuronSingle(_Rooted):
    """TorchNeuron's group with the names of torch 2.13 and later."""

    NAME = "neuron_single"

    def all_gather_single(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> Any:
        return _gather(self._gloo, out, x)

    def reduce_scatter_single(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> Any:
        return self._gloo._reduce_scatter_base(out, x, options)

    def all_to_all_single(self, out: torch.Tensor, x: torch.Tensor, sizes: Any, sent: Any, options: Any) -> Any:
        if len({*sizes}) > 1 or len({*sent}) > 1:
            raise RuntimeError(f"ProcessGroupNeuron: all_to_all takes equal splits only, got {sizes} and {sent}")
        return _all_to_all(self._gloo, out, x, [], [])


class TpuDist(_Reductions):
    """torch_tpu's group."""

    NAME = "tpu_dist"

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        if self._ranks != sorted(self._ranks):
            raise RuntimeError(f"tpu_dist: the ranks of a group must ascend, got {self._ranks}")

    def allgather(self, outs: list[list[torch.Tensor]], xs: list[torch.Tensor], options: Any = None) -> Any:
        if xs[0].dtype in (torch.uint8, torch.int64) and xs[0].dim() == 1:  # as `all_gather_object` calls it
            raise NotImplementedError("tpu_dist has no object collectives")
        return super().allgather(outs, xs, options)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    def all_gather_single(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> Any:
        return _gather(self._gloo, out, x)

    def reduce_scatter_single(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> Any:
        return self._gloo._reduce_scatter_base(out, x, options)

    def all_to_all_single(self, out: torch.Tensor, x: torch.Tensor, sizes: Any, sent: Any, options: Any) -> Any:
        return _all_to_all(self._gloo, out, x, sizes, sent)


BACKENDS = {kind.NAME: kind for kind in (Neuron, NeuronSingle, TpuDist)}


def imitate(words: str) -> str:
    """Registers the backend that `words` describe: "neuron", "tpu_dist without broadcast"; returns its name."""
    name, _, lacking = words.partition(" without ")
    whole = BACKENDS[name]
    registered = "_".join(words.split()).lower()
    if hasattr(dist.Backend, registered.upper()):
        return registered
    missing = frozenset(lacking.split())
    inherited = {method: getattr(ProcessGroup, method) for method in missing}
    kind = type(whole.__name__, (whole,), {"MISSING": missing, **inherited})
    if name in capabilities.LIMITS:
        capabilities.LIMITS[registered] = capabilities.LIMITS[name]
    dist.Backend.register_backend(registered, lambda options, _: kind(options), extended_api=True, devices=["cpu"])
    return registered
