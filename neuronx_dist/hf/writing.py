"""A folder of safetensors files, written one tensor at a time, from any source of whole weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..weights.host_memory import as_bytes
from .sources import SAFETENSORS_DTYPES, WeightSource

__all__ = ["copy_configs", "write_weights"]

_MAX_BYTES = 5_000_000_000  # of a file, as transformers divides them
_CONFIGS = {".json", ".txt", ".model", ".jinja"}  # config, generation_config, what a tokenizer needs
_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


def write_weights(
    weights: WeightSource,
    folder: Path,
    max_bytes: int = _MAX_BYTES,
    done: Callable[[int], None] = lambda count: None,
) -> None:
    """Writes `model.safetensors`, or several files and their index; a tensor is in memory at a time.

    Args:
        max_bytes: of the tensors of a file.
        done: called after each tensor with the number of tensors written so far.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(weights, max_bytes)
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = ["model.safetensors"]
    count = 0
    for file, names in zip(files, shards):
        with open(folder / file, "wb") as stream:
            stream.write(_header(weights, names))
            for name in names:
                stream.write(as_bytes(weights.read(name).detach().contiguous()))
                count += 1
                done(count)
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards) for name in names}
        metadata = {"total_size": sum(_nbytes(weights, name) for name in weight_map)}
        index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True)
        (folder / "model.safetensors.index.json").write_text(index + "\n")


def copy_configs(source: Path, folder: Path) -> None:
    """Copies the files that are not weights: config, generation config, tokenizer.

    Raises:
        ValueError: a file is a symbolic link that leads out of the folder, or out of the hub's cache that it is in.
    """
    root = source.resolve()
    root = root.parent.parent if root.parent.name == "snapshots" else root  # files there are links to ../../blobs
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in _CONFIGS and ".index." not in file.name:
            if not file.resolve().is_relative_to(root):
                raise ValueError(
                    f"{file} is a symbolic link to {file.resolve()}, outside of {root}: its content is not copied; "
                    "put the file itself there, or remove the link"
                )
            shutil.copyfile(file, folder / file.name)


def _shards(weights: WeightSource, max_bytes: int) -> list[list[str]]:
    """The names in each file."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in weights.names():
        nbytes = _nbytes(weights, name)
        if shards[-1] and size + nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def _header(weights: WeightSource, names: Sequence[str]) -> bytes:
    """The header before the tensors: its length, then names, dtypes, shapes and positions as JSON."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        dtype = weights.dtype(name)
        if dtype not in _DTYPE_NAMES:
            advice = ": hold torch.view_as_real of it, and view_as_complex in forward" if dtype.is_complex else ""
            raise ValueError(f"{name} has dtype {dtype}, which safetensors does not support{advice}")
        end = start + _nbytes(weights, name)
        entries[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(weights.shape(name)),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _nbytes(weights: WeightSource, name: str) -> int:
    return int(torch.Size(weights.shape(name)).numel()) * weights.dtype(name).itemsize
