"""The files of a checkpoint in torch.distributed.checkpoint's format, written from the memory of the tensors.

    .metadata           the place of each piece of each tensor (`catalog`)
    __<rank>_0.distcp   pieces that this rank wrote, each in the format of `torch.save` (`archive`); objects too

`torch.distributed.checkpoint.load` reads these files. Each ends with checksums of its blocks (`checksums`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ... import accelerator, comm
from ...comm.host import on_host
from ...weights.host_memory import as_bytes, as_tensor
from ..agreement import together
from ..optimizer_state import GROUPS, merged_groups
from ..pieces import TensorPiece, cut, whole_piece
from ..rank_tensors import Path, State, key_of
from .archive import ALIGNMENT, archive
from .catalog import METADATA, Catalog, Extent, SavedTensor, StoredChunk, pickled
from .checksums import with_checksums
from .flattened_groups import flattened_groups
from .plain_data import packed
from .staging import StagedCopy, Staging, changes_in_step_only

__all__ = ["WholeTensor", "WritePlan", "plan", "write", "write_whole"]

_MAX_PIECE = 256 << 20  # bytes; larger pieces are cut, so that replicas share them


class _Storage(Protocol):
    def write(self, path: str, chunks: Iterator[memoryview | bytes]) -> Any: ...


class _Claim(NamedTuple):
    """A piece that a rank holds and could write."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class _Tensor(NamedTuple):
    """Description of a whole tensor, equal on all ranks that hold a part."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    paths: tuple[Path, ...]


class _Holdings(NamedTuple):
    """The tensors, pieces and objects that a rank could write."""

    tensors: dict[str, _Tensor]
    claims: list[_Claim]
    objects: dict[Path, int]  # path -> bytes
    groups: list[dict[str, Any]] | None


class WritePlan:
    """The part of a checkpoint that this rank writes.

    Attributes:
        files: names of this rank's files.
        nbytes: size of the larger file, without checksums.
    """

    def __init__(self, name: str, items: Sequence[tuple[int, Any]], nbytes: int, metadata: bytes | None) -> None:
        self.nbytes = nbytes
        self.files = ([name] if items else []) + ([METADATA] if metadata is not None else [])
        self._items = items  # (start, bytes or a piece of a tensor), in order
        self._metadata = metadata
        self._staged: torch.Tensor | None = None

    def stage(
        self,
        buffer: torch.Tensor | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        storages: Collection[int] = (),
        model: nn.Module | None = None,
    ) -> Staging:
        """Copies the tensors that this rank writes into host memory: at once, or when the result's `finish` is called.

        Args:
            buffer: of an earlier `Staging`, reused if it is large enough. Pinned where the accelerator takes that.
            optimizer, storages: tensors in these storages (by address) are copied later, and the optimizer's next step
                waits for the copies.
            model: its `load_state_dict` waits for the copies too.
        """
        if buffer is None or buffer.numel() < self.nbytes:
            buffer = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=accelerator.pins_memory())
        sources = self._tensors()
        later = []
        waits: set[str] = set()  # device types whose copies are under way
        for start, item in self._items:
            if isinstance(item, bytes):
                buffer[start : start + len(item)] = as_tensor(memoryview(bytearray(item)), torch.uint8, (len(item),))
                continue
            source = next(sources)
            target = buffer[start : start + source.numel() * source.element_size()]
            copy = StagedCopy(target.view(source.dtype).view(source.shape), source)
            if changes_in_step_only(source, storages):
                later.append(copy)
            else:
                streams = accelerator.has_streams(source.device.type)
                copy.target.copy_(source, non_blocking=streams)
                if streams:
                    waits.add(source.device.type)
        for device_type in waits:
            accelerator.synchronize(device_type)
        self._staged = buffer
        return Staging(buffer, later, optimizer, model)

    def chunks(self, name: str) -> Iterator[memoryview | bytes]:
        """The content of a file, with checksums: from staged memory if there is any, else from the tensors."""
        return with_checksums([self._metadata or b""] if name == METADATA else self._content())

    def _content(self) -> Iterator[memoryview | bytes]:
        sources = iter(()) if self._staged is not None else self._tensors()
        for start, item in self._items:
            if isinstance(item, bytes):
                yield item
            elif self._staged is not None:
                yield as_bytes(self._staged[start : start + item.numel() * item.element_size()])
            else:
                yield as_bytes(next(sources).contiguous().cpu())

    def _tensors(self) -> Iterator[torch.Tensor]:
        tensors = [item for _, item in self._items if not isinstance(item, bytes)]
        on_host(tensors, copy=False)  # computes pending work of XLA devices as one program
        return iter(tensors)


def plan(state: State) -> WritePlan:
    """Divides the writing among the ranks that hold equal pieces, and lays out the files. All ranks call it.

    It communicates two `gather_objects` over the world; nothing else is communicated until the files are written.

    Raises:
        ValueError: ranks describe a tensor differently; a piece of a tensor is on no rank; an object is no plain data
            (ranks without the object get a CheckpointError).
    """
    with together("no checkpoint was saved"):
        objects = {path: packed(key_of(path), value) for path, value in state.objects.items()}
    views = {
        _Claim(key, part.offset, part.shape): tensor.memory[part.local]
        for key, tensor in state.tensors.items()
        for piece in tensor.pieces
        for part in cut(piece, _MAX_PIECE // tensor.tensor.element_size())
    }
    tensors = {
        key: _Tensor(tensor.shape, tensor.tensor.dtype, tuple(tensor.paths)) for key, tensor in state.tensors.items()
    }
    sizes = {path: len(content) for path, content in objects.items()}
    everyone = comm.gather_objects(_Holdings(tensors, list(views), sizes, state.groups))

    rank = comm.rank("world")
    if state.groups is not None:
        groups = merged_groups([holdings.groups or [] for holdings in everyone])
        for path, value in flattened_groups(groups).items():
            objects[path] = packed(f"{key_of(GROUPS)}[{path[2]}][{path[3]!r}]", value)
            everyone[0].objects[path] = len(objects[path])
    merged = _merged(everyone)
    shares = _shares(everyone, merged)
    items, nbytes = _items(shares[rank], merged, objects, views)
    metadata = pickled(_catalog(shares, merged)) if rank == 0 else None
    return WritePlan(_file_name(rank), items, nbytes, metadata)


def write(plan: WritePlan, storage: _Storage, folder: str) -> None:
    """Writes this rank's files, without communication. `.metadata` of rank 0 names files of all ranks: wait for all."""
    for name in plan.files:
        storage.write(f"{folder}/{name}", plan.chunks(name))


class WholeTensor(NamedTuple):
    """A tensor that is read when it is written, so that one process can convert a model larger than its memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[TensorPiece], torch.Tensor]


def write_whole(
    tensors: Mapping[Path, WholeTensor], objects: Mapping[Path, bytes], storage: _Storage, folder: str
) -> list[str]:
    """Writes whole tensors and packed objects, by path, as one rank's files; one piece is in memory at a time.

    Returns:
        Names of the files.
    """
    described = {key_of(path): _Tensor(tensor.shape, tensor.dtype, (path,)) for path, tensor in tensors.items()}
    claims = {
        _Claim(key_of(path), piece.offset, piece.shape): (tensor, piece)
        for path, tensor in tensors.items()
        for piece in cut(whole_piece(tensor.shape), _MAX_PIECE // tensor.dtype.itemsize)
    }
    share = _Share([(path, len(content)) for path, content in objects.items()], list(claims))

    def content() -> Iterator[memoryview | bytes]:
        for content in objects.values():
            yield content + bytes(-len(content) % ALIGNMENT)
        for claim in share.claims:
            tensor, piece = claims[claim]
            around = archive(tensor.dtype, claim.shape)
            yield around.head
            yield as_bytes(tensor.read(piece).contiguous())
            yield around.tail

    metadata = pickled(_catalog([share], described))
    storage.write(f"{folder}/{_file_name(0)}", with_checksums(content()))
    storage.write(f"{folder}/{METADATA}", with_checksums([metadata]))
    return [_file_name(0), METADATA]


class _Share(NamedTuple):
    """The pieces and objects that a rank writes, in order."""

    objects: list[tuple[Path, int]]
    claims: list[_Claim]


def _merged(everyone: Sequence[_Holdings]) -> dict[str, _Tensor]:
    """The tensors of all ranks, by key.

    Raises:
        ValueError: ranks describe a tensor differently.
    """
    merged: dict[str, _Tensor] = {}
    for rank, holdings in enumerate(everyone):
        for key, tensor in holdings.tensors.items():
            if merged.setdefault(key, tensor) != tensor:
                raise ValueError(
                    f"{key} has shape {tensor.shape} and dtype {tensor.dtype} on rank {rank}, but "
                    f"{merged[key].shape} and {merged[key].dtype} on an earlier rank: two tensors have the same name"
                )
    return merged


def _shares(everyone: Sequence[_Holdings], tensors: dict[str, _Tensor]) -> list[_Share]:
    """Divides pieces among ranks, large ones first: each goes to the holder with the least to write so far.

    Raises:
        ValueError: the pieces of a tensor do not cover it.
    """
    holders: dict[_Claim, list[int]] = {}
    owners: dict[Path, tuple[int, int]] = {}
    for rank, holdings in enumerate(everyone):
        for claim in holdings.claims:
            holders.setdefault(claim, []).append(rank)
        for path, size in holdings.objects.items():
            owners.setdefault(path, (rank, size))
    missing = {key: math.prod(tensor.shape) for key, tensor in tensors.items()}
    for claim in holders:
        missing[claim.key] -= math.prod(claim.shape)
    for key, elements in missing.items():
        if elements:
            raise ValueError(
                f"{key}, of shape {tensors[key].shape}, cannot be saved: the pieces of it that ranks hold have "
                f"{math.prod(tensors[key].shape) - elements} elements"
            )
    load = [0] * len(everyone)
    chosen: dict[_Claim, int] = {}
    for claim in sorted(holders, key=lambda claim: -math.prod(claim.shape) * tensors[claim.key].dtype.itemsize):
        writer = min(holders[claim], key=load.__getitem__)
        load[writer] += math.prod(claim.shape) * tensors[claim.key].dtype.itemsize
        chosen[claim] = writer
    shares = [_Share([], []) for _ in everyone]
    for path, (rank, size) in owners.items():
        shares[rank].objects.append((path, size))
    for claim in holders:
        shares[chosen[claim]].claims.append(claim)
    return shares


def _positions(share: _Share, tensors: dict[str, _Tensor]) -> Iterator[tuple[Path | _Claim, int, int]]:
    """`(item, start, length)` of all items in a rank's file."""
    start = 0
    for path, size in share.objects:
        yield path, start, size
        start += size + -size % ALIGNMENT
    for claim in share.claims:
        around = archive(tensors[claim.key].dtype, claim.shape)
        yield claim, start, around.length
        start += len(around.head) + around.nbytes + len(around.tail)


def _items(
    share: _Share, tensors: dict[str, _Tensor], objects: dict[Path, bytes], views: dict[_Claim, torch.Tensor]
) -> tuple[list[tuple[int, bytes | torch.Tensor]], int]:
    """The content of this rank's file, bytes and tensors by turns, with positions; and the size of the file."""
    items: list[tuple[int, bytes | torch.Tensor]] = []
    small, begin = b"", 0  # bytes between tensors
    for what, start, _ in _positions(share, tensors):
        small += bytes(start - begin - len(small))
        if isinstance(what, _Claim):
            around = archive(tensors[what.key].dtype, what.shape)
            items += [(begin, small + around.head), (start + len(around.head), views[what])]
            begin, small = start + len(around.head) + around.nbytes, around.tail
        else:
            small += objects[what]
    if small:
        items.append((begin, small))
    return items, begin + len(small)


def _catalog(shares: Sequence[_Share], tensors: dict[str, _Tensor]) -> Catalog:
    """The catalog of all ranks' files."""
    catalog = Catalog()
    for tensor in tensors.values():  # tensors without elements included, of which no rank writes a piece
        for path in tensor.paths:
            catalog.tensors[key_of(path)] = SavedTensor(tensor.shape, tensor.dtype)
            catalog.paths[key_of(path)] = path
    for rank, share in enumerate(shares):
        for what, start, length in _positions(share, tensors):
            extent = Extent(_file_name(rank), start, length)
            if not isinstance(what, _Claim):
                catalog.objects[key_of(what)] = extent
                catalog.paths[key_of(what)] = what
                continue
            for path in tensors[what.key].paths:
                catalog.tensors[key_of(path)].chunks.append(StoredChunk(what.offset, what.shape, extent))
    return catalog


def _file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"
