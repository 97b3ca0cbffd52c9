"""The import name `neuronx_distributed`: each of its modules is the module of this package that has its place.

    neuronx_distributed.X   is   neuronx_dist.compat.neuronx_distributed.X, if that file exists,
                            else neuronx_dist.X,
                            else, for what needs Neuron's compiler, a module whose names raise where they are used

They are the same module objects, so that what a script sets in one is seen in the other.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["install_names", "unavailable_module"]

_NAME = "neuronx_distributed"
_ROOT = __name__.partition(".")[0]
_PLACES = (f"{__package__}.{_NAME}", _ROOT)

# Parts of NxD that are no part of training, and what is used instead.
_UNAVAILABLE = {
    "trace": "it compiles models for inference on Neuron: use NxD Inference, or vLLM; "
    "neuronx_dist.hf.save_pretrained writes a trained model's weights for them",
    "inference": "use NxD Inference, or vLLM",
    "quantization": "it is for inference on Neuron; torchao quantises a trained model",
    "operators": "they are for inference on Neuron: use torch's argmax and topk",
    "experimental": "it is for inference on Neuron",
    "utils.medusa_utils": "it is for speculative decoding: use NxD Inference, or vLLM",
    "utils.sampling": "it is for inference: use transformers' generate",
    "utils.speculative_decoding": "use NxD Inference, or vLLM",
    "utils.tensor_capture": "it is for inference on Neuron: use forward hooks",
    "utils.tensor_replacement": "it is for inference on Neuron: use forward hooks",
}


def install_names() -> None:
    """Makes `neuronx_distributed` this package in this process; a second call changes nothing.

    Raises:
        RuntimeError: the published package is imported already.
    """
    present = sys.modules.get(_NAME)
    if present is not None and not present.__name__.startswith(_ROOT):
        raise RuntimeError(
            f"{_NAME} is imported already, from {getattr(present, '__file__', None)}: import neuronx_dist.compat "
            f"before anything that imports {_NAME}"
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the module in the place of one of NxD's."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != _NAME or self._place(fullname) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        place = self._place(spec.name)
        assert place is not None
        if place.startswith(_ROOT):
            module = importlib.import_module(place)
            spec.loader_state = module.__spec__
            return module
        return unavailable_module(spec.name, place)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:  # importlib has replaced the module's spec
            module.__spec__ = spec.loader_state

    @staticmethod
    def _place(fullname: str) -> str | None:
        """Returns the name of the module here, the reason why there is none, or None for no module of NxD."""
        part = fullname.partition(".")[2]
        for package in _PLACES:
            name = f"{package}.{part}" if part else package
            if _exists(name):
                return name
        first, second = part.split(".")[0], ".".join(part.split(".")[:2])
        return _UNAVAILABLE.get(second, _UNAVAILABLE.get(first))


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

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{name}.{attribute} is not available here: {reason}")

        return type(attribute, (), {"__init__": refuse, "__class_getitem__": refuse, "__module__": name})

    module = ModuleType(name, f"Not available here: {reason}.")
    module.__dict__["__getattr__"] = get
    module.__path__ = []
    return module
