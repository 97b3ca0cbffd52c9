"""Where whole weights are read from: a folder of safetensors, or a state dict.

One tensor, or one slice of a tensor, is read at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch

__all__ = ["SafetensorsFolder", "StateDict", "WeightSource", "has_weights", "open_source"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightSource(Protocol):
    """Whole tensors by name."""

    description: str

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        """Tensor `name`, or its `[start, stop)` along `dim`."""


def has_weights(folder: str | PathLike[str]) -> bool:
    """Whether a folder holds weights that `load_pretrained` reads, and not a config alone."""
    return any((Path(folder) / name).is_file() for name in (_INDEX, _SINGLE))


def open_source(source: str | PathLike[str] | Mapping[str, torch.Tensor]) -> WeightSource:
    """The source for a folder (Hugging Face layout, safetensors, one file or several with an index) or a state dict."""
    return StateDict(source) if isinstance(source, Mapping) else SafetensorsFolder(source)


class StateDict:
    """Weights in memory, such as `AutoModelForCausalLM.from_pretrained(..., gguf_file=...).state_dict()`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.description = f"a state dict of {len(tensors)} tensors"

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        tensor = self.tensors[name].detach()
        return tensor if dim is None else tensor.narrow(dim, start, stop - start)


class SafetensorsFolder:
    """`model.safetensors`, or the files that `model.safetensors.index.json` lists.

    Slices are read without reading the tensor.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        from safetensors import safe_open

        path = Path(folder)
        index = path / _INDEX
        if index.is_file():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elif (path / _SINGLE).is_file():
            files = [_SINGLE]
        else:
            entries = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else "no such folder"
            raise FileNotFoundError(
                f"{path} has neither {_SINGLE} nor {_INDEX} (it has: {entries}). "
                f"Other formats: load them with transformers and pass the state dict"
            )
        self.description = str(path)
        self._where: dict[str, Any] = {}
        for name in files:
            if not (path / name).is_file():
                raise FileNotFoundError(f"{path / name} is missing: {index.name} lists it")
            handle = safe_open(str(path / name), framework="pt", device="cpu")
            self._where.update(dict.fromkeys(handle.keys(), handle))

    def names(self) -> Iterable[str]:
        return self._where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        if dim is None:
            tensor: torch.Tensor = self._where[name].get_tensor(name)
        else:
            tensor = self._where[name].get_slice(name)[(slice(None),) * dim + (slice(start, stop),)]
        return tensor
