"""Reads a checkpoint into any layout: of each file the slices that this rank needs, through a memory map.

One rank compares each block of the files with its checksum, a rank that reads the block if any does. Local files are
compared before anything is changed, and read from the page cache afterwards. Files elsewhere are read once, and
compared in the same pass over memory in which they are copied: a damaged block may be found after other tensors were
overwritten, and the error says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from ... import comm
from ...weights.host_memory import as_bytes, as_tensor
from ...weights.materialize import materialize_buffers
from ..agreement import together
from ..errors import CheckpointCorrupted, CheckpointError, CheckpointMismatch
from ..pieces import overlap
from ..rank_tensors import ShardedTensor, State, key_of
from ..run_state import check, expect, restore
from ..storage import Storage
from ..tags import MARKER
from .archive import archive
from .catalog import METADATA, Catalog, Extent, SavedTensor, StoredChunk, unpickled
from .checkpoint_source import CheckpointSource, RectangleRead, StoredRectangle
from .checksums import Blocks, Ranges, merged, readers_of, share_blocks
from .flattened_groups import JoinedGroups
from .plain_data import unpacked

__all__ = ["CheckpointFiles", "fill", "is_of_dcp", "load", "load_from", "read_catalog"]

_LISTED = 8  # names of each kind in an error message
_STEP = 1 << 20  # bytes of rows that are copied at a time and then verified


def load(
    storage: Storage,
    folder: str,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    checksums: bool = False,
    overwritten: frozenset[str] = frozenset(),
    device: str | torch.device = "cpu",
) -> None:
    """Reads a checkpoint of any layout into a model and an optimizer of this one. All ranks call it.

    Names, shapes and the optimizer's options are compared before anything is changed, and either all ranks go on or
    all raise. All files of the checkpoint are compared with their checksums, unread files included.

    Args:
        strict: False: load what model and checkpoint have in common.
        checksums: whether files without checksums (torch.distributed.checkpoint's) count as damaged.
        overwritten: keys of tensors that must be loaded, since they hold parts of a damaged checkpoint.
        device: where parameters and buffers on meta get memory. Buffers that no checkpoint has get initial values.

    Raises:
        CheckpointMismatch: the checkpoint is of another model: with `strict` missing or unexpected names; in any case
            other shapes, of which the first are listed, or options of another class of optimizers.
        CheckpointCorrupted: on all ranks: a file is missing, truncated or changed; the error's `overwritten` has the
            keys of tensors that hold values of the file.
    """

    def opened() -> CheckpointSource:
        return JoinedGroups(CheckpointFiles(storage, folder, checksums))

    load_from(opened, folder, model, optimizer, strict=strict, overwritten=overwritten, device=device)


def load_from(
    open_source: Callable[[], CheckpointSource],
    name: str,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    *,
    strict: bool = True,
    overwritten: frozenset[str] = frozenset(),
    device: str | torch.device = "cpu",
) -> None:
    """Loads like `load`, from any `CheckpointSource`. All ranks call it.

    Args:
        open_source: called on each rank; its error is raised on all ranks.
        name: of the checkpoint, for error messages.
    """
    with together(f"{name} was not loaded"):
        source = open_source()
        catalog = source.catalog
        state = expect(model, optimizer, catalog, device)
        objects = {path: catalog.objects[key_of(path)] for path in state.objects if key_of(path) in catalog.objects}
        tensors = [(tensor, catalog.tensors[key]) for key, tensor in state.tensors.items() if key in catalog.tensors]
        reads = (
            RectangleRead(chunk, saved.dtype, saved_slices)
            for tensor, saved in tensors
            for chunk, saved_slices, _ in _meetings(tensor, saved)
        )
        local_needs = source.needs(objects.values(), reads)
    needs = _compare(state, catalog, model is not None, optimizer is not None, strict, name, overwritten, local_needs)
    with together(f"{name} was not loaded"):
        source.share(needs, objects.values())
        for path, extent in objects.items():
            state.objects[path] = source.object(extent)
        try:
            check(state, model, optimizer, catalog)
        except CheckpointError as error:
            raise type(error)(f"{name}: {error}") from None
    try:
        with together(f"{name} was loaded in part"):
            for tensor, saved in tensors:
                fill(tensor, saved, source)
            source.finish()
    except CheckpointCorrupted as error:
        error.overwritten = frozenset(key for key in catalog.tensors if model is not None and key.startswith("model."))
        raise
    with together(f"{name} was loaded in part"):
        restore(state, model, optimizer, catalog)
        if model is not None:
            materialize_buffers(model, device=device)


def is_of_dcp(storage: Storage, folder: str) -> bool:
    """Returns whether torch.distributed.checkpoint wrote a folder; `save_checkpoint` leaves a marker first."""
    return storage.exists(f"{folder}/{METADATA}") and not storage.exists(f"{folder}/{MARKER}")


def read_catalog(storage: Storage, folder: str, checksums: bool = False) -> Catalog:
    """Reads the catalog of a checkpoint.

    Args:
        checksums: whether a checkpoint counts as damaged if its files have no checksums.

    Raises:
        CheckpointCorrupted: `.metadata` is missing, or differs from what was written.
    """
    path = f"{folder}/{METADATA}"
    try:
        content = storage.map(path)
    except FileNotFoundError as error:
        raise CheckpointCorrupted(f"{path} is missing") from error
    if checksums:
        _verify(content, path)
    catalog = unpickled(content, path)
    if catalog.checksums and not checksums:
        _verify(content, path)
    catalog.checksums |= checksums
    return catalog


def _verify(content: memoryview, path: str) -> None:
    Blocks(lambda start, stop: content[start:stop], len(content), path).verify(content, 0, len(content))


class _File:
    """A file of a checkpoint, mapped when it is first used.

    Attributes:
        blocks: the checksums of the file, if it has any.
        needs: the bytes that this rank uses; None: all.
    """

    def __init__(self, storage: Storage, path: str, checksums: bool) -> None:
        self.path = path
        self.needs: Ranges | None = None
        self.blocks: Blocks | None = None
        self._storage = storage
        self._content: memoryview | None = None
        try:
            self.size = storage.size(path)
            if checksums:
                self.blocks = Blocks(lambda start, stop: storage.read(path, start, stop), self.size, path)
        except FileNotFoundError as error:
            raise CheckpointCorrupted(f"{path} is missing") from error

    @property
    def content(self) -> memoryview:
        if self._content is None:
            ranges = self.needs
            if ranges is not None and self.blocks is not None:
                starts = self.blocks.starts
                wanted = [index for index, wants in enumerate(self.blocks.wanted) if wants]
                ranges = merged([*ranges, *((starts[index], starts[index + 1]) for index in wanted)])
            self._content = self._storage.map(self.path, ranges)
        return self._content

    def copy(self, start: int, stop: int, target: memoryview) -> None:
        """Copies bytes, and verifies their blocks if these are wanted."""
        if self.blocks is not None:
            self.blocks.copy(self.content, start, stop, target)
        else:
            target[:] = self.content[start:stop]

    def unpacked(self, start: int, stop: int) -> Any:
        """Reads an object of `torch.save` at this place."""
        if self.blocks is not None:
            self.blocks.verify(self.content, start, stop)
        return unpacked(self.path, self._storage.read(self.path, start, stop))

    def bytes(self, start: int, stop: int) -> memoryview:
        """Reads bytes, and verifies their blocks if these are wanted."""
        if stop > self.size:
            raise CheckpointCorrupted(f"{self.path} is truncated: it has {self.size} bytes, of {stop}")
        if self.blocks is not None:
            self.blocks.verify(self.content, start, stop)
        return self.content[start:stop]


class CheckpointFiles:
    """The files of `save_checkpoint`, or of torch.distributed.checkpoint.

    Each block is verified by one rank: in `share` if the files are local, so that no damage is found after a tensor was
    overwritten; otherwise while it is read, and in `finish` the blocks that no rank reads.

    Args:
        checksums: whether files without checksums count as damaged.
    """

    def __init__(self, storage: Storage, folder: str, checksums: bool = False) -> None:
        self.catalog = read_catalog(storage, folder, checksums)
        self._storage = storage
        self._folder = folder
        self._files: dict[str, _File] = {}
        if storage.local_path("") is not None:  # elsewhere it takes a request for each file
            self._check_sizes(self.catalog.extents())

    def needs(self, objects: Iterable[Extent], reads: Iterable[RectangleRead]) -> dict[str, Ranges]:
        objects, reads = list(objects), list(reads)
        self._check_sizes([*objects, *(read.chunk.extent for read in reads)])
        needs: dict[str, list[tuple[int, int]]] = {}
        if self.catalog.checksums:
            for extent in objects:
                needs.setdefault(extent.file, []).append((extent.start, extent.start + extent.length))
            for read in reads:
                needs.setdefault(read.chunk.extent.file, []).extend(_bytes_of(read))
        return {file: merged(ranges) for file, ranges in needs.items()}

    def _check_sizes(self, extents: Iterable[Extent]) -> None:
        """Raises a CheckpointCorrupted if a file is missing, or shorter than the catalog says."""
        ends: dict[str, int] = {}
        for extent in extents:
            ends[extent.file] = max(extent.start + extent.length, ends.get(extent.file, 0))
        for file, end in ends.items():
            path = f"{self._folder}/{file}"
            try:
                size = self._storage.size(path)
            except FileNotFoundError as error:
                raise CheckpointCorrupted(f"{path} is missing") from error
            if size < end:
                raise CheckpointCorrupted(
                    f"{path} is truncated: it has {size} bytes, and {METADATA} refers to {end} of it"
                )

    def share(self, needs: Sequence[Mapping[str, Ranges]], objects: Iterable[Extent]) -> None:
        if not self.catalog.checksums:
            return
        rank = comm.rank("world")
        for number, name in enumerate(self.catalog.files()):
            readers = readers_of(name, number, needs)
            if rank in readers:
                file = self._file(name)
                file.needs = readers[rank]
                assert file.blocks is not None
                share_blocks(file.blocks, readers, rank)
        for extent in objects:  # verified before it is unpickled
            blocks = self._file(extent.file).blocks
            assert blocks is not None
            for index in blocks.overlapping(extent.start, extent.start + extent.length):
                blocks.wanted[index] = 1
        if self._storage.local_path("") is not None:
            self.finish()

    def object(self, extent: Extent) -> Any:
        return unpacked(extent.file, self._file(extent.file).bytes(extent.start, extent.start + extent.length))

    def open(self, chunk: StoredChunk, dtype: torch.dtype) -> _SavedRectangle:
        return _SavedRectangle(self._file(chunk.extent.file), chunk, dtype)

    def finish(self) -> None:
        for file in self._files.values():
            if file.blocks is not None and any(file.blocks.wanted):
                file.bytes(0, file.blocks.starts[-1])

    def _file(self, name: str) -> _File:
        if name not in self._files:
            self._files[name] = _File(self._storage, f"{self._folder}/{name}", self.catalog.checksums)
        return self._files[name]


def _meetings(
    target: ShardedTensor, saved: SavedTensor
) -> Iterator[tuple[StoredChunk, tuple[slice, ...], tuple[slice, ...]]]:
    """Overlaps of the saved rectangles of a tensor with this rank's pieces: `(chunk, slices of it, slices here)`."""
    for chunk in saved.chunks:
        for piece in target.pieces:
            meeting = overlap(chunk.offset, chunk.shape, piece)
            if meeting is not None:
                yield (chunk, *meeting)


@torch.no_grad()
def fill(target: ShardedTensor, saved: SavedTensor, source: CheckpointSource) -> None:
    """Reads this rank's pieces of a tensor."""
    memory = local = target.memory
    if local.device.type != "cpu":  # torch.zeros_like(xla_tensor, device="cpu") has data_ptr 0
        local = torch.zeros(local.shape, dtype=local.dtype)
    if sum(math.prod(piece.shape) for piece in target.pieces) < local.numel():
        local.zero_()  # the padding
    opened: tuple[StoredChunk, StoredRectangle] | None = None
    for chunk, saved_slices, local_slices in _meetings(target, saved):
        if opened is None or opened[0] is not chunk:
            opened = chunk, source.open(chunk, saved.dtype)
        opened[1].copy(saved_slices, local[local_slices])
    if local is not memory:
        memory.copy_(local)
    increment_version(memory)  # bytes are written without autograd's knowledge


def _bytes_of(read: RectangleRead) -> Iterator[tuple[int, int]]:
    """Ranges of bytes of a file that a read touches."""
    extent, around = read.chunk.extent, archive(read.dtype, read.chunk.shape)
    if extent.length != around.length:  # of another version: see `_SavedRectangle`
        return
    start = extent.start + len(around.head)
    yield extent.start, start
    rows = read.slices[0] if read.slices else slice(0, 1)
    row = around.nbytes // max(1, read.chunk.shape[0]) if read.slices else around.nbytes
    yield start + rows.start * row, start + rows.stop * row


class _SavedRectangle:
    """A rectangle of a tensor in a file."""

    def __init__(self, file: _File, chunk: StoredChunk, dtype: torch.dtype) -> None:
        self._file = file
        self._shape = chunk.shape
        self._dtype = dtype
        self._whole: Any = None
        start, stop = chunk.extent.start, chunk.extent.start + chunk.extent.length
        around = archive(dtype, chunk.shape)
        self._start = start + len(around.head)
        self._row = around.nbytes // max(1, chunk.shape[0]) if chunk.shape else around.nbytes
        if chunk.extent.length != around.length or file.bytes(start, self._start) != around.head:
            self._whole = file.unpacked(start, stop)  # of torch.save, or of another version of this one
            shape = tuple(self._whole.shape) if isinstance(self._whole, torch.Tensor) else type(self._whole).__name__
            if shape != chunk.shape:
                raise CheckpointCorrupted(
                    f"{file.path} has {shape} from byte {start} on, in place of a tensor {chunk.shape}"
                )

    def copy(self, slices: Sequence[slice], target: torch.Tensor) -> None:
        """Copies a part, and verifies it block by block while a block is in the cache."""
        if self._whole is not None:
            target.copy_(self._whole[tuple(slices)])
            return
        rows, *rest = slices or [slice(0, 1)]
        start, stop = self._start + rows.start * self._row, self._start + rows.stop * self._row
        is_bytes = target.dtype == self._dtype and target.is_contiguous()
        if is_bytes and all(part == slice(0, size) for part, size in zip(rest, self._shape[1:])):
            self._file.copy(start, stop, as_bytes(target))
            return
        content = self._file.content[self._start : self._start + self._row * (self._shape[0] if self._shape else 1)]
        data = as_tensor(content, self._dtype, self._shape)
        if not slices:
            target.copy_(data)
            self._file.bytes(start, stop)
            return
        step = max(1, _STEP // max(1, self._row))
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            target[first - rows.start : last - rows.start].copy_(data[(slice(first, last), *rest)])
            self._file.bytes(self._start + first * self._row, self._start + last * self._row)


def _compare(
    state: State,
    catalog: Catalog,
    model: bool,
    optimizer: bool,
    strict: bool,
    folder: str,
    overwritten: frozenset[str],
    needs: dict[str, Ranges],
) -> list[dict[str, Ranges]]:
    """Refuses a checkpoint of another model, with the same message on all ranks; returns the `needs` of all ranks.

    Raises:
        CheckpointMismatch: see `load`.
    """
    known = {key for tensor in state.tensors.values() for key in tensor.keys}
    known |= {key_of(path) for path in state.objects} | state.unneeded
    missing = [key for key in (*state.tensors, *map(key_of, state.objects)) if not catalog.has(key)]
    shapes = [
        f"{key} has shape {catalog.tensors[key].shape} in the checkpoint and {tensor.shape} in this model"
        for key, tensor in state.tensors.items()
        if key in catalog.tensors and catalog.tensors[key].shape != tensor.shape
    ]
    everyone = comm.gather_objects((known, missing, shapes, needs))
    prefixes = tuple(["model."] * model + ["optimizer."] * optimizer)
    known = set().union(*(answer[0] for answer in everyone))
    unexpected = [
        key
        for key in (*catalog.tensors, *catalog.objects)
        if key.startswith(prefixes) and key not in known and not key.startswith("optimizer.master.")  # else not needed
    ]
    missing = list(dict.fromkeys(key for answer in everyone for key in answer[1]))
    shapes = list(dict.fromkeys(text for answer in everyone for text in answer[2]))
    lines = [_listed("missing in it", missing if strict else [key for key in missing if key in overwritten])]
    lines += [_listed("not in this model", unexpected if strict else []), _listed("of other shapes", shapes)]
    if any(lines):
        raise CheckpointMismatch(f"{folder} is of another model; nothing was changed. {' '.join(filter(None, lines))}")
    return [answer[3] for answer in everyone]


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f", ... ({len(names) - _LISTED} more)" if len(names) > _LISTED else ""
    return f"{len(names)} {what}: {', '.join(names[:_LISTED])}{more}."
