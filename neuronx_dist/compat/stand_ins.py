"""Stand-ins for torch_xla and torch_neuronx, which scripts for NxD import, on machines without them.

Only scripts see them: an import of `torch_xla` by a file outside of Python's folders of installed packages, or its
`importlib.import_module`, gives the stand-in. It is no entry of `sys.modules`, and
`importlib.util.find_spec("torch_xla")` finds nothing, so that transformers, accelerate and all others that look for
torch_xla see that it is absent.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from types import MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from .. import comm
from ..comm.rank_selection import XLA
from ..torch_internals.operators import script_as
from ..torch_internals.tensors import tensor_factories, tensor_to
from .nxd_names import install_names, unavailable, unavailable_module
from .torch_xla.groups import local_device

__all__ = ["install"]

_PLACE = f"{__package__}.torch_xla"
# Import name -> the module with its functions here, or the reason why it has none.
_STAND_INS = {
    "torch_xla": f"{_PLACE}.top",
    "torch_xla.amp": f"{_PLACE}.small_modules",
    "torch_xla.amp.syncfree": f"{_PLACE}.small_modules",
    "torch_xla.core": f"{_PLACE}.top",
    "torch_xla.core.functions": "call neuronx_dist.spmd's operators, which have gradients",
    "torch_xla.core.xla_model": f"{_PLACE}.xla_model",
    "torch_xla.debug": f"{_PLACE}.top",
    "torch_xla.debug.metrics": f"{_PLACE}.small_modules",
    "torch_xla.debug.profiler": f"{_PLACE}.small_modules",
    "torch_xla.distributed": f"{_PLACE}.top",
    "torch_xla.distributed.fsdp": "use neuronx_dist.NeuronZero1Optimizer, or torch's fully_shard",
    "torch_xla.distributed.parallel_loader": f"{_PLACE}.parallel_loader",
    "torch_xla.distributed.spmd": "shard by neuronx_dist.parallelize, or by neuronx_dist.shard_tensor",
    "torch_xla.distributed.xla_backend": f"{_PLACE}.small_modules",
    "torch_xla.distributed.xla_multiprocessing": f"{_PLACE}.xla_multiprocessing",
    "torch_xla.distributed.zero_redundancy_optimizer": "use neuronx_dist.NeuronZero1Optimizer",
    "torch_xla.experimental": f"{_PLACE}.top",
    "torch_xla.experimental.custom_kernel": "call torch.nn.functional.scaled_dot_product_attention",
    "torch_xla.experimental.pjrt_backend": f"{_PLACE}.small_modules",
    "torch_xla.runtime": f"{_PLACE}.runtime",
    "torch_xla.utils": f"{_PLACE}.top",
    "torch_xla.utils.checkpoint": f"{_PLACE}.small_modules",
    "torch_xla.utils.serialization": f"{_PLACE}.small_modules",
    "torch_neuronx": f"{_PLACE}.neuronx",
    "torch_neuronx.utils": f"{_PLACE}.neuronx",
    "neuronxcc": "it is Neuron's compiler; write kernels in Triton, or use torch.compile",
    "nki": "it is Neuron's kernel language; write kernels in Triton, or use torch.compile",
    "nkilib": "it is Neuron's kernel language; write kernels in Triton, or use torch.compile",
}
# Names of torch_xla 2.9 without a function here, by module, and the reasons.
_EXPORT, _LOADER = "export a model by torch.export", "use MpDeviceLoader"
_BUCKETS = "call the function of one tensor; neuronx_dist.NeuronZero1Optimizer has buckets"
_ONE_DEVICE = "a process has one device: read torch.cuda.get_device_properties"
_UNAVAILABLE = {
    "torch_xla": dict.fromkeys(("save_as_stablehlo", "save_torch_model_as_stablehlo"), _EXPORT),
    "torch_xla.core.xla_model": {
        **dict.fromkeys(("get_stablehlo", "get_stablehlo_bytecode"), _EXPORT),
        **dict.fromkeys(("all_gather_bucketized", "reduce_scatter_bucketized", "CoalescingBuckets"), _BUCKETS),
        **dict.fromkeys(("send", "recv"), "call collective_permute, or neuronx_dist.comm.send and recv"),
        **dict.fromkeys(("set_replication", "xla_replication_devices", "DeviceContext"), _ONE_DEVICE),
        "create_optimized_replica_groups": "pass no groups: all ranks communicate",
    },
    "torch_xla.distributed.parallel_loader": dict.fromkeys(("PerDeviceLoader", "PerDeviceQueue"), _LOADER),
    "torch_xla.runtime": {
        **dict.fromkeys(("runtime_device_attributes", "global_runtime_device_attributes"), _ONE_DEVICE),
        "get_master_ip": "read MASTER_ADDR of os.environ",
    },
}
_PACKAGES = ("torch_xla", "torch_neuronx", "neuronxcc", "nki", "nkilib")
_INSTALLED = tuple(
    os.path.join(os.path.realpath(folder), "")
    for folder in (
        *map(sysconfig.get_path, ("purelib", "platlib", "stdlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    )
)
_library: torch.library.Library | None = None


@functools.cache
def install() -> None:
    """Makes scripts for NxD run in this process: `neuronx_distributed` is this package from then on.

    Where torch_xla is absent, scripts (not installed packages) also import stand-ins for it and for torch_neuronx,
    `init_process_group("xla")` starts the backend of this machine's device, and `device="xla"` is that device.

    Raises:
        RuntimeError: the published `neuronx_distributed` is imported already.
    """
    install_names()
    absent = frozenset(name for name in _PACKAGES if importlib.util.find_spec(name) is None)
    before = builtins.__import__

    @functools.wraps(before)
    def import_(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        if not level and (first := name.partition(".")[0]) in absent and _is_script(globals):
            module = _stand_in(name)
            for child in fromlist or ():
                if f"{name}.{child}" in _STAND_INS:
                    _stand_in(f"{name}.{child}")
            return module if fromlist else _stand_in(first)
        return before(name, globals, locals, fromlist or (), level)

    before_module = importlib.import_module

    @functools.wraps(before_module)
    def import_module(name: str, package: str | None = None) -> ModuleType:
        if name.partition(".")[0] in absent and _is_script(sys._getframe(1).f_globals):
            return _stand_in(name)
        return before_module(name, package)

    builtins.__import__, importlib.import_module = import_, import_module
    if "torch_xla" in absent:
        _serve_backend()
        _serve_device()


def _is_script(importer: Mapping[str, Any] | None) -> bool:
    """Returns whether the importing file is not part of an installed package, nor of this one."""
    if importer is None or str(importer.get("__name__", "")).partition(".")[0] == __name__.partition(".")[0]:
        return False
    file = importer.get("__file__")
    if not isinstance(file, str):
        return True
    path = os.path.realpath(file)
    return not path.startswith(_INSTALLED) and not {"site-packages", "dist-packages"} & {*path.split(os.sep)}


@functools.cache
def _stand_in(name: str) -> ModuleType:
    """Returns the stand-in, which is also an attribute of its parent."""
    first = name.partition(".")[0]
    place = _STAND_INS.get(name, _STAND_INS[first])
    if not place.startswith(__package__):
        module = unavailable_module(name, place)
    elif name not in _STAND_INS:
        others = ", ".join(other for other in _STAND_INS if other.startswith(first))
        raise ModuleNotFoundError(f"no module {name}: neuronx_dist.compat has stand-ins for {others}", name=name)
    else:
        module = ModuleType(name, importlib.import_module(place).__doc__)
        functions = importlib.import_module(place)
        module.__dict__.update({key: getattr(functions, key) for key in functions.__all__})
        module.__path__ = []
        for key, reason in _UNAVAILABLE.get(name, {}).items():
            setattr(module, key, unavailable(name, key, reason))
        if first == "torch_neuronx":
            module.__dict__["__getattr__"] = vars(unavailable_module(name, _STAND_INS["neuronxcc"]))["__getattr__"]
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(_stand_in(parent), child, module)
    return module


def _serve_backend() -> None:
    """Makes `init_process_group("xla")` start the backend of this machine's device."""
    before = dist.init_process_group

    @functools.wraps(before)
    def init_process_group(
        backend: str | None = None, init_method: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if backend != XLA:
            return before(backend, init_method, *args, **kwargs)
        timeout = args[0] if args else kwargs.get("timeout")
        comm.launch.init_distributed("auto", timeout.total_seconds() if timeout is not None else None)
        return None

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    comm.launch.backend_names.insert(0, XLA)


def _serve_device() -> None:
    """Makes the device "xla" this rank's device.

    Memory that a function of torch asks for on "xla" is allocated on this rank's device, at torch's dispatcher.
    `module.to("xla")` and `tensor.to("xla")`, for which torch asks torch_xla for the index first, are replaced; so are
    `torch.tensor`, `as_tensor` and `asarray`, which move what they made.
    """
    global _library

    def empty(size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
        layout = memory_format or torch.contiguous_format
        return torch.empty(size, dtype=dtype, device=local_device(), memory_format=layout)

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=local_device())

    _library = torch.library.Library("aten", "IMPL")
    _library.impl("empty.memory_format", empty, "XLA")
    _library.impl("empty_strided", empty_strided, "XLA")

    for factory in tensor_factories:
        served = _Served(factory)
        script_as(served, factory)
        setattr(torch, factory.__name__, served)
    initialise = torch.autocast.__init__

    @functools.wraps(initialise)
    def autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        initialise(self, local_device().type if device_type == XLA else device_type, *args, **kwargs)

    torch.autocast.__init__ = autocast  # type: ignore[method-assign]
    torch.Tensor.to = _Served(tensor_to)  # type: ignore[method-assign]
    torch.nn.Module.to = _Served(torch.nn.Module.to)  # type: ignore[method-assign]


class _Served:
    """A function of torch that takes "xla" as this rank's device.

    It equals the function that it replaces: torch passes `torch.Tensor.to` to modes, which look up its rules.
    """

    def __init__(self, before: Callable[..., Any]) -> None:
        functools.update_wrapper(self, before)
        vars(self).setdefault("__module__", None)  # as methods have: calls of this package's are not repeated
        self._before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_xla(kwargs.get("device")):
            kwargs["device"] = local_device()
        return self._before(*(local_device() if _is_xla(argument) else argument for argument in args), **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._before

    def __hash__(self) -> int:
        return hash(self._before)


def _is_xla(device: Any) -> bool:
    return (isinstance(device, str) and device.partition(":")[0] == XLA) or (
        isinstance(device, torch.device) and device.type == XLA
    )
