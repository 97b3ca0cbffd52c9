"""A device type outside torch, "imitated", whose tensors hold CPU tensors: registered through PrivateUse1, in Python.

A process registers it once, and keeps it: use it in a process of its own, which has one device, number 0. As with
TorchNeuron, using the runtime before the process group exists is an error. `CALLS` lists calls of streams and waits.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["CALLS", "Held", "NAME", "register"]

NAME = "imitated"
CALLS: list[str] = []
_generator = torch.Generator()
_library = torch.library.Library("aten", "IMPL")
_is_started = False


def _runtime() -> None:
    if not _is_started:
        raise AssertionError("the device's runtime was used before init_process_group")


class Held(torch.Tensor):
    """A tensor of the device: shape, strides and dtype of a CPU tensor, which holds its values."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Held:
        _runtime()
        options: dict[str, Any] = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        options |= {"dtype": held.dtype, "layout": held.layout, "device": torch.device(NAME, 0)}
        x: Held = torch.Tensor._make_wrapper_subclass(cls, held.size(), **options)  # type: ignore[attr-defined]
        x.held = held
        return x

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{NAME}({self.held})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _on_cpu(x: Any) -> Any:
    if isinstance(x, Held):
        return x.held
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == NAME else x


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator on the tensors that are held; the device draws from a generator of its own."""
    if any(argument.name == "generator" for argument in func._schema.arguments) and kwargs.get("generator") is None:
        kwargs = {**kwargs, "generator": _generator}
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    known = {id(_on_cpu(x)): x for x in tensors}
    device = kwargs.get("device")
    leaves = (device is not None and device.type == "cpu") or (
        func is torch.ops.aten.copy_.default and not isinstance(args[0], Held)
    )
    args, kwargs = pytree.tree_map(_on_cpu, (args, kwargs))
    result = func(*args, **kwargs)
    if leaves:
        return result
    return pytree.tree_map_only(torch.Tensor, lambda x: known[id(x)] if id(x) in known else Held(x), result)


def _empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return Held(torch.empty(size, dtype=dtype, device="cpu"))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, **_: Any) -> Any:
    return Held(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        CALLS.append("Event")

    def record(self) -> None:
        CALLS.append("Event.record")


class Stream:
    def wait_event(self, event: Event) -> None:
        CALLS.append("Stream.wait_event")

    def synchronize(self) -> None:
        CALLS.append("Stream.synchronize")


class _Device(types.ModuleType):
    """`torch.imitated`."""

    Event, Stream = Event, Stream

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return _is_started

    def device_count(self) -> int:
        _runtime()
        return 1

    def current_device(self) -> int:
        _runtime()
        return 0

    def current_stream(self) -> Stream:
        _runtime()
        return Stream()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        CALLS.append("stream")
        yield

    def synchronize(self) -> None:
        _runtime()
        CALLS.append("synchronize")

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        _runtime()
        return _generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        _runtime()
        _generator.set_state(state)

    @contextmanager
    def device(self, index: Any) -> Iterator[None]:
        yield

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        _generator.manual_seed(seed)

    def _is_in_bad_fork(self) -> bool:
        return False


class Group(dist.ProcessGroup):
    """A process group for tensors of the device, which gloo communicates."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        self._name = self._desc = ""

    def getBackendName(self) -> str:
        return NAME

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
        return [torch.device(NAME)]

    def shutdown(self) -> None:
        pass

    def allreduce(self, *args: Any) -> Any:
        return self._gloo.allreduce(*pytree.tree_map(_on_cpu, args))

    def broadcast(self, *args: Any) -> Any:
        return self._gloo.broadcast(*pytree.tree_map(_on_cpu, args))

    def allgather(self, *args: Any) -> Any:
        return self._gloo.allgather(*pytree.tree_map(_on_cpu, args))

    def all_gather_single(self, out: Any, x: Any, options: Any) -> Any:
        out = _on_cpu(out)
        return self._gloo.allgather([list(out.view(-1).chunk(self.size()))], [_on_cpu(x).reshape(-1)])

    def reduce_scatter_single(self, *args: Any) -> Any:
        return self._gloo._reduce_scatter_base(*pytree.tree_map(_on_cpu, args))

    def all_to_all_single(self, *args: Any) -> Any:
        return self._gloo.alltoall_base(*pytree.tree_map(_on_cpu, args))

    def send(self, *args: Any) -> Any:
        return self._gloo.send(*pytree.tree_map(_on_cpu, args))

    def recv(self, *args: Any) -> Any:
        return self._gloo.recv(*pytree.tree_map(_on_cpu, args))


def _group(options: Any, _: Any) -> Group:
    global _is_started
    _is_started = True
    return Group(options)


def register() -> None:
    """Registers the device type, its operators, and its backend."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Device(f"torch.{NAME}"))
    _library.impl("empty.memory_format", _empty, "PrivateUse1")
    _library.impl("empty_strided", _empty_strided, "PrivateUse1")
    dist.Backend.register_backend(NAME, _group, extended_api=True, devices=[NAME])
