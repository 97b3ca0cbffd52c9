"""Reading a checkpoint into any layout: of each file the slices that this rank needs, through a memory map."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from .. import comm
from ..weights.materialize import materialize_buffers
from .agreement import together
from .archive import archive
from .catalog import METADATA, Catalog, Chunk, Extent, SavedTensor, unpickled
from .checksums import BLOCK, Blocks
from .errors import CheckpointCorrupted, CheckpointMismatch
from .flattened_groups import JoinedGroups
from .memory import as_tensor
from .pieces import overlap
from .plain_data import unpacked
from .source import Rectangle, Source
from .state import check, expect, restore
from .storage import Storage
from .tags import MARKER
from .tensors import ShardedTensor, State, key_of

__all__ = ["CheckpointFiles", "fill", "is_of_dcp", "load", "load_from", "read_catalog"]

_LISTED = 8  # names of each kind in a message


class _Storage(Protocol):
    def map(self, path: str) -> memoryview:
        """The whole file as a memory map, or read into memory where there is none."""


def load(
    storage: _Storage,
    folder: str,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    verify: bool = True,
    device: str | torch.device = "cpu",
) -> None:
    """Reads a checkpoint of any layout into a model and an optimizer of this one. All ranks call it.

    Names, shapes and the optimizer's options are compared before anything is changed, and either all ranks go on or
    all raise.

    Args:
        strict: False: load what both have, whatever else there is.
        verify: compare what is read with its checksums; False: that has been done already.
        device: where parameters and buffers on meta get memory. Buffers that no checkpoint has get initial values.

    Raises:
        CheckpointMismatch: it is of another model: with `strict` names that are missing or not expected; in any case
            other shapes, of which the first are listed, or options of another class of optimizers.
        CheckpointCorrupted: a file is missing, truncated or changed. It may be found after a part was loaded.
    """

    def opened() -> Source:
        return JoinedGroups(CheckpointFiles(storage, folder, verify))

    load_from(opened, folder, model, optimizer, strict=strict, device=device)


def load_from(
    open_source: Callable[[], Source],
    name: str,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    *,
    strict: bool = True,
    device: str | torch.device = "cpu",
) -> None:
    """As `load`, from whatever is described as pieces of whole tensors. All ranks call it.

    Args:
        open_source: called on each rank; what it raises is raised on all.
        name: of the checkpoint, for messages.
    """
    with together(f"{name} was not loaded"):
        source = open_source()
        state = expect(model, optimizer, source.catalog, device)
    _compare(state, source.catalog, model is not None, optimizer is not None, strict, name)
    with together(f"{name} was not loaded"):
        _fill_objects(state, source)
        check(state, model, optimizer, source.catalog)
    with together(f"{name} was loaded in part"):
        _fill_tensors(state, source)
        restore(state, model, optimizer, source.catalog)
        if model is not None:
            materialize_buffers(model, device=device)


def is_of_dcp(storage: Storage, folder: str) -> bool:
    """Whether torch.distributed.checkpoint wrote a folder, and not `save_checkpoint`, which leaves its marker first."""
    return storage.exists(f"{folder}/{METADATA}") and not storage.exists(f"{folder}/{MARKER}")


def read_catalog(storage: _Storage, folder: str) -> Catalog:
    """What a checkpoint holds.

    Raises:
        CheckpointCorrupted: there is no `.metadata`, or not the one that was written.
    """
    path = f"{folder}/{METADATA}"
    content = _mapped(storage, path)
    catalog = unpickled(content, path)
    if catalog.checksums:
        Blocks(content, path).verify()
    return catalog


class _File:
    """A mapped file of a checkpoint."""

    def __init__(self, content: memoryview, path: str, checksums: bool) -> None:
        self.content = content
        self.path = path
        self.verifies = checksums
        self._blocks = Blocks(content, path) if checksums else None

    def bytes(self, start: int, stop: int) -> memoryview:
        """Verified bytes."""
        if stop > len(self.content):
            raise CheckpointCorrupted(f"{self.path} is truncated: it has {len(self.content)} bytes, of {stop}")
        if self._blocks is not None:
            self._blocks.verify(start, stop)
        return self.content[start:stop]


class CheckpointFiles:
    """The files of `save_checkpoint`, or of torch.distributed.checkpoint."""

    def __init__(self, storage: _Storage, folder: str, verify: bool) -> None:
        self.catalog = read_catalog(storage, folder)
        self._storage = storage
        self._folder = folder
        self._verify = verify and self.catalog.checksums
        self._files: dict[str, _File] = {}

    def object(self, extent: Extent) -> Any:
        return unpacked(extent.file, self._file(extent).bytes(extent.start, extent.start + extent.length))

    def open(self, chunk: Chunk, dtype: torch.dtype) -> _Source:
        return _Source(self._file(chunk.extent), chunk, dtype)

    def _file(self, extent: Extent) -> _File:
        if extent.file not in self._files:
            path = f"{self._folder}/{extent.file}"
            self._files[extent.file] = _File(_mapped(self._storage, path), path, self._verify)
        return self._files[extent.file]


def _fill_objects(state: State, source: Source) -> None:
    """Reads the objects of a state, as far as the checkpoint has them."""
    for path in state.objects:
        if key_of(path) in source.catalog.objects:
            state.objects[path] = source.object(source.catalog.objects[key_of(path)])


def _fill_tensors(state: State, source: Source) -> None:
    """Reads the tensors of a state, as far as the checkpoint has them."""
    catalog = source.catalog
    for key, tensor in state.tensors.items():
        if key in catalog.tensors:
            fill(tensor, catalog.tensors[key], source)


@torch.no_grad()
def fill(target: ShardedTensor, saved: SavedTensor, source: Source) -> None:
    """Reads this rank's pieces of a tensor."""
    local = target.tensor if target.tensor.device.type == "cpu" else torch.zeros_like(target.tensor, device="cpu")
    if sum(math.prod(piece.shape) for piece in target.pieces) < local.numel():
        local.zero_()  # the padding
    for chunk in saved.chunks:
        rectangle: Rectangle | None = None
        for piece in target.pieces:
            meeting = overlap(chunk.offset, chunk.shape, piece)
            if meeting is not None:
                rectangle = rectangle or source.open(chunk, saved.dtype)
                rectangle.copy(meeting[0], local[meeting[1]])
    if local is not target.tensor:
        target.tensor.copy_(local)


class _Source:
    """A saved rectangle."""

    def __init__(self, file: _File, chunk: Chunk, dtype: torch.dtype) -> None:
        self._file = file
        self._shape = chunk.shape
        self._whole: torch.Tensor | None = None
        start, length = chunk.extent.start, chunk.extent.length
        around = archive(dtype, chunk.shape)
        self._start = start + len(around.head)
        self._row = around.nbytes // max(1, chunk.shape[0]) if chunk.shape else around.nbytes
        head = file.bytes(start, start + min(len(around.head), length))
        if head != around.head or length != around.length:  # of torch.save, or of another version of this one
            content = io.BytesIO(file.bytes(start, start + length))
            self._whole = torch.load(content, map_location="cpu", weights_only=True)
            if tuple(self._whole.shape) != chunk.shape:
                raise CheckpointCorrupted(f"{file.path} has a tensor {tuple(self._whole.shape)}, not {chunk.shape}")
        else:
            self._data = as_tensor(file.content[self._start : self._start + around.nbytes], dtype, chunk.shape)

    def copy(self, slices: Sequence[slice], target: torch.Tensor) -> None:
        """Copies a part, and verifies it block by block while that is in the cache."""
        if self._whole is not None:
            target.copy_(self._whole[tuple(slices)])
            return
        if not slices:
            self._file.bytes(self._start, self._start + self._row)
            target.copy_(self._data)
            return
        rows, *rest = slices
        step = max(1, BLOCK // max(1, self._row) if self._file.verifies else rows.stop)
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            target[first - rows.start : last - rows.start].copy_(self._data[(slice(first, last), *rest)])
            self._file.bytes(self._start + first * self._row, self._start + last * self._row)


def _mapped(storage: _Storage, path: str) -> memoryview:
    try:
        return storage.map(path)
    except FileNotFoundError as error:
        raise CheckpointCorrupted(f"{path} is missing") from error


def _compare(state: State, catalog: Catalog, model: bool, optimizer: bool, strict: bool, folder: str) -> None:
    """Refuses a checkpoint of another model, on all ranks, with the same message.

    Raises:
        CheckpointMismatch: see `load`.
    """
    known = {key for tensor in state.tensors.values() for key in tensor.keys}
    known |= {key_of(path) for path in state.objects} | state.unneeded
    missing = [key for key in (*state.tensors, *map(key_of, state.objects)) if not catalog.has(key)]
    shapes = [
        f"{key} is {catalog.tensors[key].shape} there and {tensor.shape} here"
        for key, tensor in state.tensors.items()
        if key in catalog.tensors and catalog.tensors[key].shape != tensor.shape
    ]
    everyone = comm.gather_objects((known, missing, shapes))
    prefixes = tuple(["model."] * model + ["optimizer."] * optimizer)
    known = set().union(*(each[0] for each in everyone))
    unexpected = [
        key
        for key in (*catalog.tensors, *catalog.objects)
        if key.startswith(prefixes) and key not in known and not key.startswith("optimizer.master.")  # else not needed
    ]
    missing = list(dict.fromkeys(key for each in everyone for key in each[1]))
    shapes = list(dict.fromkeys(text for each in everyone for text in each[2]))
    lines = [_listed("of other shapes", shapes)]
    if strict:
        lines = [_listed("missing in it", missing), _listed("not in this model", unexpected), *lines]
    if any(lines):
        raise CheckpointMismatch(f"{folder} is of another model; nothing was changed. {' '.join(filter(None, lines))}")


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f", ... ({len(names) - _LISTED} more)" if len(names) > _LISTED else ""
    return f"{len(names)} {what}: {', '.join(names[:_LISTED])}{more}."
