"""Folders as NeuronX Distributed writes them: a file for each rank, of `torch.save` or of torch_xla's serialization."""

from __future__ import annotations

import mmap
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..weights.shard_spec import ShardSpec
from .nxd_files import TensorReference

__all__ = ["DividedTensor", "Part", "RankedTensor", "file_of", "padded_rows", "write_files"]


class Part(NamedTuple):
    """What a file gets of a whole tensor.

    Attributes:
        file: its path in the folder.
        keys: where the part stands in the file's nested dicts.
        shape: of the part.
        cut: makes it of the whole.
        is_expert: it is of experts, of which each ep rank has others.
    """

    file: str
    keys: tuple[Any, ...]
    shape: tuple[int, ...]
    cut: Callable[[torch.Tensor], torch.Tensor]
    is_expert: bool = False


class DividedTensor(NamedTuple):
    """A whole tensor, which is read when it is written, and what each file gets of it."""

    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    parts: Sequence[Part]


class RankedTensor(NamedTuple):
    """A whole tensor of a model, and who holds which part of it.

    Attributes:
        names: in the state dict of a pp rank, by its number: a tied weight is on several.
        spec: its layout over tp.
        read: the whole tensor, without padding.
        origin: its name in the checkpoint that is converted.
    """

    names: Mapping[int, Sequence[str]]
    spec: ShardSpec
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    origin: str = ""

    def divided(self, tp: int) -> DividedTensor:
        parts = [
            Part(file_of("model", rank, stage), (name,), self.spec.local_shape, partial(self._shard, rank))
            for stage, names in self.names.items()
            for rank in range(tp)
            for name in names
        ]
        return DividedTensor(self.dtype, self.read, parts)

    def _shard(self, rank: int, whole: torch.Tensor) -> torch.Tensor:
        return self.spec.local_slice(whole, rank)


def padded_rows(whole: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """`count` rows of a tensor from `start` on, with zeros behind its last one: a dp rank's part under ZeRO-1."""
    rows = whole[start : start + count]
    missing = count - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def file_of(part: str, tp: int, pp: int, dp: int = 0, ep: int | None = None) -> str:
    """The path of a rank's file; `part` is "model" or "optim"."""
    expert = "" if ep is None else f"ep_rank_{ep:02d}_"
    return f"{part}/dp_rank_{dp:02d}_{expert}tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"


def write_files(
    tensors: Sequence[DividedTensor],
    constants: Mapping[str, Mapping[Any, Any]],
    folder: Path,
    done: Callable[[int], None] = lambda count: None,
    *,
    xser: bool = False,
    marked: bool = True,
) -> None:
    """Writes files of tensors, the marker `checkpoint` first and `done` last; one whole tensor is in memory at a time.

    Args:
        constants: of each file what else it holds, in nested dicts: plain data without tensors.
        done: is told after each tensor how many have been written.
        xser: a file has references, `<file>.tensors/tensor_<n>.pt` the tensors, `<file>.info.pt` their shapes.
        marked: False: write no markers: the files are a part of a checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if marked:
        (folder / "checkpoint").write_text("1")
    files = {file: OrderedDict(state) for file, state in constants.items()}
    numbers = dict.fromkeys(files, 0)
    writers: list[list[Callable[[torch.Tensor], None]]] = []
    shapes: dict[str, dict[int, dict[str, Any]]] = {file: {} for file in files}
    for tensor in tensors:
        writers.append([])
        for part in tensor.parts:
            if xser:
                number = numbers[part.file]
                numbers[part.file] += 1
                shapes[part.file][number] = {
                    "dtype": tensor.dtype,
                    "shape": torch.Size(part.shape),
                    "expert_model_parallel": part.is_expert,
                }
                _put(files[part.file], part.keys, _reference(number))
                writers[-1].append(partial(_save_apart, folder / f"{part.file}.tensors", number))
            else:  # memory that nothing touches
                _put(files[part.file], part.keys, torch.empty(part.shape, dtype=tensor.dtype))
                writers[-1].append(partial(_copy, files, part))
    for file, state in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if xser:
            torch.save(state, path, pickle_module=_WITH_REFERENCES)
            torch.save(shapes[file], folder / f"{file}.info.pt")
            (folder / f"{file}.tensors").mkdir(exist_ok=True)
        else:
            files[file] = _laid_out(path, state)
    for count, (tensor, writes) in enumerate(zip(tensors, writers), 1):
        whole = tensor.read()
        for part, write in zip(tensor.parts, writes):
            write(part.cut(whole))
        del whole
        done(count)
    for file in files:
        _sync(folder / file)
    if marked:
        (folder / "done").write_text("1")


def _put(state: dict[Any, Any], keys: Sequence[Any], value: Any) -> None:
    for key in keys[:-1]:
        state = state.setdefault(key, {})
    state[keys[-1]] = value


def _copy(files: Mapping[str, Any], part: Part, value: torch.Tensor) -> None:
    """Writes a part into a file, through its memory map."""
    target = files[part.file]
    for key in part.keys:
        target = target[key]
    target.copy_(value)


def _save_apart(folder: Path, number: int, value: torch.Tensor) -> None:
    """Writes a part into a file of its own. It is not synced: there are thousands, and a conversion can be repeated."""
    # Of a view, `torch.save` writes all that it is a view of.
    torch.save(value.detach().clone(), folder / f"tensor_{number}.pt")


def _laid_out(path: Path, state: Mapping[Any, Any]) -> Any:
    """A file of `torch.save` with holes for tensors, and what is in it, mapped to be written."""
    with torch.serialization.skip_data():
        torch.save(state, path)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _sync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _reference(number: int) -> TensorReference:
    reference = TensorReference()
    reference.tid = number
    return reference


_PythonPickler: Any = pickle._Pickler  # the one whose methods can be replaced


class _Pickler(_PythonPickler):  # type: ignore[misc]
    """Writes the name of torch_xla's class for references, whether torch_xla is installed or not."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj is TensorReference:
            self.write(pickle.GLOBAL + b"torch_xla.utils.serialization\nTensorReference\n")
            self.memoize(obj)
        else:
            super().save_global(obj, name)

    dispatch = {**_PythonPickler.dispatch, type: save_global}


_WITH_REFERENCES = SimpleNamespace(Pickler=_Pickler, __name__="pickle")
