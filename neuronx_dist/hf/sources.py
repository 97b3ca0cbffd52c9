"""Sources of unsharded weights: the files of a checkpoint folder, or a state dict.

One tensor, or one slice of a tensor, is read at a time: of safetensors the slice's bytes, of a `.bin` file, which is
mapped into memory, its pages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch

from ..folder_names import leading_out
from ..weights.sums_file import check_sums
from ..weights.torch_files import read_plain

__all__ = [
    "SAFETENSORS_DTYPES",
    "SafetensorsFiles",
    "StateDict",
    "WeightSource",
    "checkpoint_files",
    "has_weights",
    "open_source",
]

# In the order in which transformers looks for them.
_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


# The names that safetensors has for dtypes.
SAFETENSORS_DTYPES = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class WeightSource(Protocol):
    """A source of unsharded tensors by name."""

    description: str

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        """Tensor `name`, or its `[start, stop)` along `dim`."""


def has_weights(folder: str | PathLike[str], *, subfolder: str = "", variant: str | None = None) -> bool:
    """Returns whether a folder holds weights that `load_pretrained` reads, and not a config alone."""
    return any((Path(folder) / subfolder / name).is_file() for name in _names(variant))


def open_source(
    source: str | PathLike[str] | Mapping[str, torch.Tensor],
    *,
    subfolder: str = "",
    variant: str | None = None,
    share: int = 0,
    shares: int = 1,
) -> WeightSource:
    """Opens the source for a state dict, a file, or a folder in Hugging Face's layout; see `load_pretrained`.

    Args:
        share, shares: the part of the folder's files to compare with its `SHA256SUMS`, if any, and the number of parts.
    """
    if isinstance(source, Mapping):
        return StateDict(source)
    files = checkpoint_files(source, subfolder=subfolder, variant=variant)
    check_sums(Path(source) / subfolder, share, shares)
    if files[0].suffix == ".safetensors":
        return SafetensorsFiles(files, str(source))
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(_mapped(file))
    return StateDict(tensors, str(source))


def checkpoint_files(source: str | PathLike[str], *, subfolder: str = "", variant: str | None = None) -> Sequence[Path]:
    """The weight files of a folder: one file, or the files that an index lists; for a file, the file itself.

    Raises:
        FileNotFoundError: there are none, or one that an index lists is not there.
        ValueError: the index cannot be read, or lists a file outside of the folder.
    """
    path = Path(source) / subfolder
    if path.is_file():
        return [path]
    names = _names(variant)
    first = next((path / name for name in names if (path / name).is_file()), None)
    if first is None:
        entries = f"it has: {sorted(entry.name for entry in path.iterdir())}" if path.is_dir() else "no such folder"
        raise FileNotFoundError(
            f"{path} has none of {', '.join(names)} ({entries}). Download a model of the Hub first (hf download); "
            f"load other formats with transformers, and pass the state dict"
        )
    if first.suffix != ".json":
        return [first]
    listed = _listed_files(first)
    outside = leading_out(listed)
    if outside:
        raise ValueError(f"{first} lists {', '.join(outside[:3])}, outside of its folder: do not trust this folder")
    files = [path / name for name in listed]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{path}: {first.name} lists {', '.join(missing)}, missing in the folder")
    return files


def _listed_files(index: Path) -> list[str]:
    """Returns the names of the files in an index, in order."""
    content: Any = None
    reason = 'it needs {"weight_map": {name of a tensor: name of a file}}'
    try:
        content = json.loads(index.read_text())
    except (ValueError, RecursionError) as error:
        reason = f"it is not JSON ({error})"
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    files = [*weight_map.values()] if isinstance(weight_map, dict) else []
    if not files or not all(isinstance(file, str) and file for file in files):
        raise ValueError(
            f"{index} ({index.stat().st_size} bytes) is cut off, a Git LFS pointer, or no index of weight files: "
            f"{reason}"
        )
    return sorted(set(files))


def _names(variant: str | None) -> Sequence[str]:
    """Names of weight files; variant "fp16": model.fp16.safetensors, model.safetensors.index.fp16.json, ..."""
    if variant is None:
        return _NAMES
    return [f"{stem}.{variant}.{suffix}" for stem, _, suffix in (name.rpartition(".") for name in _NAMES)]


class StateDict:
    """Weights in memory, such as `AutoModelForCausalLM.from_pretrained(..., gguf_file=...).state_dict()`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], description: str | None = None) -> None:
        self.tensors = tensors
        self.description = description or f"a state dict of {len(tensors)} tensors"

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        tensor = self.tensors[name].detach()
        return tensor if dim is None else tensor.narrow(dim, start, stop - start)


class SafetensorsFiles:
    """The tensors of safetensors files. Slices are read without reading the tensor."""

    def __init__(self, files: Sequence[Path], description: str) -> None:
        from safetensors import SafetensorError, safe_open

        self.description = description
        self._where: dict[str, Any] = {}
        for file in files:
            try:
                handle = safe_open(str(file), framework="pt", device="cpu")
            except SafetensorError as error:
                size = file.stat().st_size
                raise ValueError(
                    f"{file} ({size} bytes) is cut off, damaged, or a Git LFS pointer: {str(error).strip()}"
                ) from error
            self._where.update(dict.fromkeys(handle.keys(), handle))

    def names(self) -> Iterable[str]:
        return self._where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return SAFETENSORS_DTYPES[self._where[name].get_slice(name).get_dtype()]

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        if dim is None:
            tensor: torch.Tensor = self._where[name].get_tensor(name)
        else:
            tensor = self._where[name].get_slice(name)[(slice(None),) * dim + (slice(start, stop),)]
        return tensor


def _mapped(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a `.bin` file, mapped into memory. (Before torch 1.6 files were no zip: these are read whole.)"""
    tensors = read_plain(file, mmap=True)
    if not isinstance(tensors, Mapping):
        raise ValueError(f"{file} is no state dict: it holds a {type(tensors).__name__}")
    strange = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
    if strange:
        raise ValueError(f"{file} is no state dict: {strange[0]!r} is a {type(tensors[strange[0]]).__name__}")
    return dict(tensors)
