"""Writes folders in NeuronX Distributed's format: a file for each rank, by `torch.save` or as torch_xla does."""

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

from ...weights.shard_spec import ShardSpec
from ...weights.sums_file import write_sums
from .rank_files import TensorReference, file_of

__all__ = ["DividedTensor", "Part", "RankedTensor", "as_it_is", "row_parts", "write_files"]


def as_it_is(value: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself."""
    return value


class Part(NamedTuple):
    """A part of a whole tensor for one file.

    Attributes:
        file: path in the folder.
        keys: path of the part in the file's nested dicts.
        shape: of the part.
        cut: returns the part of a whole tensor; `as_it_is`: the part is the whole.
        is_expert: the part is of experts, which differ between ep ranks.
    """

    file: str
    keys: tuple[Any, ...]
    shape: tuple[int, ...]
    cut: Callable[[torch.Tensor], torch.Tensor] = as_it_is
    is_expert: bool = False


class DividedTensor(NamedTuple):
    """A whole tensor, which is read when it is written, with its parts for all files."""

    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    parts: Sequence[Part]


class RankedTensor(NamedTuple):
    """A whole tensor of a model, with the ranks that hold parts of it.

    Attributes:
        names: pp rank -> names in its state dict; a tied weight is on several pp ranks.
        spec: layout over tp.
        read: returns the whole tensor, without padding.
        origin: name in the checkpoint that is converted.
    """

    names: Mapping[int, Sequence[str]]
    spec: ShardSpec
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    origin: str = ""

    def divided(self, tp: int) -> DividedTensor:
        parts = [
            Part(file_of("model", rank, stage), (name,), self.spec.local_shape, partial(self.shard, rank))
            for stage, names in self.names.items()
            for rank in range(tp)
            for name in names
        ]
        return DividedTensor(self.dtype, self.read, parts)

    def shard(self, rank: int, whole: torch.Tensor) -> torch.Tensor:
        """The part of a tp rank."""
        return self.spec.local_slice(whole, rank)


def row_parts(
    files: Sequence[str],
    keys: tuple[Any, ...],
    shape: Sequence[int],
    shard: Callable[[torch.Tensor], torch.Tensor] = as_it_is,
) -> list[Part]:
    """Parts with equal numbers of rows, the last ones padded with zeros: ZeRO-1's division of a state over dp ranks.

    Args:
        files: of the dp ranks, in order.
        shape: of the shard that they divide; a shard without dims counts as a row.
        shard: cuts the shard out of the whole tensor.
    """
    count, *rest = shape or (1,)
    rows = -(-count // len(files))
    return [
        Part(file, keys, (rows, *rest), partial(_padded_rows, shard, index * rows, rows))
        for index, file in enumerate(files)
    ]


def _padded_rows(
    shard: Callable[[torch.Tensor], torch.Tensor], start: int, count: int, whole: torch.Tensor
) -> torch.Tensor:
    value = shard(whole)
    rows = (value if value.dim() else value.view(1))[start : start + count]
    missing = count - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def write_files(
    tensors: Sequence[DividedTensor],
    constants: Mapping[str, Mapping[Any, Any]],
    folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    xser: bool = False,
    marked: bool = True,
) -> None:
    """Writes files of tensors, with a marker `checkpoint` first, their checksums and `done` last.

    One whole tensor is in memory at a time.

    Args:
        constants: the other content of each file, in nested dicts: plain data without tensors.
        progress: called after each tensor with the number of written tensors and the total.
        xser: a file has references, `<file>.tensors/tensor_<n>.pt` the tensors, `<file>.info.pt` their shapes.
        marked: False: write no markers and checksums, since the files are a part of a checkpoint.
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
            else:  # memory that is never touched
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
        progress(count, len(tensors))
    for file in files:
        _sync(folder / file)
    if marked:
        apart = [path for file in files if xser for path in (folder / f"{file}.tensors").iterdir()]
        infos = [folder / f"{file}.info.pt" for file in files if xser]
        write_sums(folder, [*(folder / file for file in files), *apart, *infos])
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
    """Writes a part into a separate file, without sync: there are thousands, and a conversion can be repeated."""
    # `torch.save` of a view would write its whole storage.
    torch.save(value.detach().clone(), folder / f"tensor_{number}.pt")


def _laid_out(path: Path, state: Mapping[Any, Any]) -> Any:
    """Writes a file of `torch.save` with holes for tensors; returns its content, mapped into memory for writing."""
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


_PythonPickler: Any = pickle._Pickler  # the Python class, whose methods can be replaced


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
