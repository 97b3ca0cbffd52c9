"""The import name `neuronx_distributed`: each of its modules is the module of this package that has its place.

    neuronx_distributed.X   is   neuronx_dist.compat.neuronx_distributed.X, if that file exists,
                            else neuronx_dist.X,
                            else, for what needs Neuron's compiler, a module whose names raise where they are used

They are the same module objects, so that what a script sets in one is seen in the other. `pytorch_lightning`, the older
name of `lightning.pytorch`, is that too where lightning is installed: its strategies are what NxD's extend.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["install_names", "unavailable", "unavailable_module"]

_NAME = "neuronx_distributed"
_ROOT = __name__.partition(".")[0]
_LIGHTNING = ("pytorch_lightning", "lightning.pytorch")
_PLACES = (f"{__package__}.{_NAME}", _ROOT)

_INFERENCE = "it is for inference: use NxD Inference or vLLM with the weights that the converter writes"
_NKI = "it is Neuron's kernel language: use torch's functions, or Triton"
_TRACING = "forwards are recorded by neuronx_dist.program; NxDPPModel needs no tracer"
_SCHEDULE = "schedules are neuronx_dist.pipeline.OneFOneB, Interleaved, ...; NxDPPModel(schedule=) takes one"

# Parts of NxD without a counterpart, and what is used instead: modules, and names of modules that are here.
_UNAVAILABLE = {
    "trace": _INFERENCE,
    "inference": _INFERENCE,
    "quantization": "it is for inference on Neuron; torchao quantises a trained model",
    "operators": "they are for inference on Neuron: use torch.argmax, torch.topk",
    "experimental": "it is for inference on Neuron",
    "kernels.kernel_utils": _NKI,
    "modules.moe.moe_process_group": "they are for inference on Neuron; axes of the mesh, ep and tp, have groups",
    "optimizer.convert_zero_checkpoints": "run python -m neuronx_dist.scripts.convert_zero_checkpoints --help",
    "optimizer.zero_dcp_utils": "save_checkpoint writes and loads files of torch.distributed.checkpoint",
    "pipeline.scheduler": _SCHEDULE,
    "pipeline.trace": _TRACING,
    "trainer.checkpoint_storage": "save_checkpoint takes a path, or a URL of fsspec (s3://bucket/run)",
    "trainer.post_partition_hooks": "NxDPPModel is partitioned when it is made: act after it",
    "utils.medusa_utils": _INFERENCE,
    "utils.sampling": _INFERENCE,
    "utils.safetensors_utils": "hf.save_pretrained writes safetensors; tied weights are saved once",
    "utils.serialization": "messages between stages have recorded shapes; use pickle for objects",
    "utils.speculative_decoding": _INFERENCE,
    "utils.tensor_capture": "it is for inference on Neuron: use forward hooks",
    "utils.tensor_replacement": "it is for inference on Neuron: use forward hooks",
    "utils.timeline": "NxDPPModel(trace_file_path=) records a step; for others use torch.profiler",
}
_NAMES_UNAVAILABLE = {
    "": {
        "BaseNxDModel": _INFERENCE,
        "ModelBuilder": _INFERENCE,
        "NxDParallelState": _INFERENCE,
        "TorchScriptNxDModel": _INFERENCE,
        "convert_nxd_model_to_torchscript_model": _INFERENCE,
        "shard_checkpoint": _INFERENCE,
    },
    "kernels.flash_attn": dict.fromkeys(("NKIAttnFunc", "get_flash_attn_kernels"), _NKI),
    "kernels.ring_attention_kernel": dict.fromkeys(("NkiRingAttnFunc", "get_seq_tile_size"), _NKI),
    "modules.moe.moe_parallel_layers": {
        "ExpertFusedLinearWithAsyncCommunication": "ExpertMLPs sums over tp once a layer, not in each linear layer"
    },
    "modules.moe.shared_experts": dict.fromkeys(
        ("ColumnParallelLinearTransposed", "RowParallelLinearTransposed"),
        "their layout is that of Neuron's inference kernels: use ColumnParallelLinear and RowParallelLinear",
    ),
    "pipeline.model": {"mark_timeline": "NxDPPModel(trace_file_path=) records a step"},
    "pipeline.timeline": {"PPTimeline": "NxDPPModel(trace_file_path=) records a step; neuronx-dist timeline draws it"},
    "pipeline.partition": dict.fromkeys(
        ("PipelineIO", "adding_live_obj_for_previous_stages", "analyze_pipeline_module", "iterate_graph_model_outputs")
        + ("analyze_shared_weights_across_stages", "partition_traced_model", "stage_to_pipeline_parallel_rank"),
        "a recorded forward is cut by neuronx_dist.pipeline.cut",
    ),
    "trainer": dict.fromkeys(
        ("PostPartitionHooks", "hooks"), "NxDPPModel is partitioned when it is made: act after it"
    ),
    "trainer.trainer": {"filter_to_local_parameter_group": "NxDModel.parameters() are those of the stage"},
    "utils.model_utils": {"maybe_materalize_model": "torchdistx is not supported: build on meta (meta_device_init)"},
    "utils.activation_checkpoint": {"NxDCheckpointWrapper": "checkpoint_wrapper changes a module in place"},
}

# Modules that NxD's modules import, and which its users reach, and patch, through them.
_IMPORTED = {
    "pipeline.model": ("parallel_layers.parallel_state",),
    "trainer.optimizer": ("parallel_layers.grads",),
    "trainer.trainer": ("parallel_layers.parallel_state",),
}


def install_names() -> None:
    """Makes `neuronx_distributed` this package in this process; a second call changes nothing.

    Raises:
        RuntimeError: the published package is imported already.
    """
    present = sys.modules.get(_NAME)
    if present is not None and present.__name__.partition(".")[0] != _ROOT:
        raise RuntimeError(
            f"{_NAME} is imported already, from {getattr(present, '__file__', None)}: import neuronx_dist.compat "
            f"before anything that imports {_NAME}"
        )
    older = sys.modules.get(_LIGHTNING[0])
    if older is not None and older.__name__ != _LIGHTNING[1] and _exists(_LIGHTNING[1]):
        warnings.warn(
            f"{_LIGHTNING[0]} is imported already, from {getattr(older, '__file__', None)}: its Trainer does not take "
            f"this package's strategies, which extend {_LIGHTNING[1]}; import neuronx_dist.compat before it",
            stacklevel=2,
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the module in the place of one of NxD's."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in (_NAME, _LIGHTNING[0]) or self._place(fullname) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        place = self._place(spec.name)
        assert place is not None
        if place.partition(".")[0] in (_ROOT, "lightning"):
            module = importlib.import_module(place)
            spec.loader_state = module.__spec__
            package, _, part = spec.name.partition(".")
            if package != _NAME:
                return module
            for other in _IMPORTED.get(part, ()):
                setattr(module, other.rpartition(".")[2], importlib.import_module(f"{_ROOT}.{other}"))
            for name, reason in _NAMES_UNAVAILABLE.get(part, {}).items():
                if name not in vars(module):
                    setattr(module, name, unavailable(spec.name, name, reason))
            return module
        return unavailable_module(spec.name, place)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:  # importlib has replaced the module's spec
            module.__spec__ = spec.loader_state

    @staticmethod
    def _place(fullname: str) -> str | None:
        """Returns the name of the module here, the reason why there is none, or None for no module of NxD."""
        first, _, part = fullname.partition(".")
        for package in _PLACES if first == _NAME else _LIGHTNING[1:]:
            name = f"{package}.{part}" if part else package
            if _exists(name):
                return name
        if first != _NAME:
            return None
        parts = part.split(".")
        places = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        return next((_UNAVAILABLE[place] for place in places if place in _UNAVAILABLE), None)


def _exists(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its package does not exist
        return False


def unavailable_module(name: str, reason: str) -> ModuleType:
    """Returns a module whose every name is a class that raises `NotImplementedError` where it is used."""

    def get(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        return unavailable(name, attribute, reason)

    module = ModuleType(name, f"Not available here: {reason}.")
    module.__dict__["__getattr__"] = get
    module.__path__ = []
    return module


class _Refusing(type):
    """Class of classes whose instances and attributes are not available."""

    reason = ""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(cls.reason)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(cls.reason)


def unavailable(module: str, name: str, reason: str) -> type:
    """Returns a class that raises `NotImplementedError` where it is instantiated, called or asked for a method."""
    text = f"{module}.{name} is not available here: {reason}"
    return _Refusing(name, (), {"__module__": module, "reason": text})
