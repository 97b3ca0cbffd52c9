"""The values that a module had when it was recorded, in files of whole tensors, of which each rank reads its part.

weights.safetensors     parameters and buffers by the original's names, a tied one once
constants.safetensors   tensors that the forward uses and no name leads to: parts of the code, needed always
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ..hf.sources import SafetensorsFiles, StateDict, WeightSource
from ..hf.writing import write_weights
from ..spmd.types import Shard
from .stored import Stored

__all__ = ["CONSTANTS", "WEIGHTS", "open_weights", "read_part", "write_constants", "write_initial"]

WEIGHTS = "weights.safetensors"
CONSTANTS = "constants.safetensors"


def write_initial(module: nn.Module, stored: Mapping[str, Stored], folder: Path) -> None:
    """Writes the values of a module; of one on meta, nothing.

    Raises:
        ValueError: some of its tensors have values and others have none.
    """
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    held = {name: tensors[name] for name, each in stored.items() if each.kind in ("parameter", "buffer")}
    missing = [name for name, tensor in held.items() if tensor.is_meta]
    if len(missing) == len(held):
        return
    if missing:
        raise ValueError(
            f"{missing[0]} has no value (it is on meta), and {len(held) - len(missing)} other tensors have one: "
            "initialise all of them, or build the whole module on meta"
        )
    _write(held, folder, WEIGHTS)


def write_constants(constants: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes the constants of a program by their names; none, no file."""
    if constants:
        _write(constants, folder, CONSTANTS)


def open_weights(folder: Path, file: str) -> WeightSource | None:
    """The tensors of a file; None: there is none."""
    path = folder / file
    return SafetensorsFiles([path], str(path)) if path.is_file() else None


def read_part(source: WeightSource, name: str, stored: Stored, axis: str, size: int, index: int) -> torch.Tensor:
    """The part of a stored tensor that shard `index` of `size` holds.

    Raises:
        ValueError: the file holds a tensor of another shape.
    """
    if source.shape(name) != stored.shape:
        raise ValueError(
            f"{source.description}: {name} has shape {list(source.shape(name))}, and the program was emitted for "
            f"{list(stored.shape)}: these are weights of another model"
        )
    if not isinstance(stored.type, Shard) or size == 1:
        return source.read(name)
    dim, blocks = stored.type.dim, stored.type.stride
    start, stop = stored.spec(axis, size).positions(index)
    block = stored.shape[dim] // blocks
    pieces = [source.read(name, dim, number * block + start, number * block + stop) for number in range(blocks)]
    return pieces[0] if blocks == 1 else torch.cat(pieces, dim)


def _write(tensors: Mapping[str, torch.Tensor], folder: Path, file: str) -> None:
    whole = StateDict({name: tensor.detach().cpu() for name, tensor in tensors.items()})
    part = folder / f".{file}"
    write_weights(whole, part, max_bytes=2**63)
    (part / "model.safetensors").replace(folder / file)
    part.rmdir()
