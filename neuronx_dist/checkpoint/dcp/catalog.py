"""Catalog of a checkpoint's tensors and their places: `.metadata`, a pickle of torch.distributed.checkpoint's classes.

A pickle can name any function and have it called. Reading allows the names of these classes alone, and replaces each by
an empty record: no code of a checkpoint runs, and none of torch.distributed.checkpoint. Nor does a small file take much
memory or time: sizes are compared with the bytes that they have in a file, and messages hold the beginning of a value.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem, metadata

from ...torch_internals.distributed import storage_info
from ..errors import CheckpointCorrupted

__all__ = ["METADATA", "Catalog", "StoredChunk", "Extent", "SavedTensor", "pickled", "unpickled"]

METADATA = ".metadata"

# In `storage_meta.modules` of what is written here: the files end with checksums.
_CHECKSUMS = "neuronx_dist.checkpoint: files end with checksums"
_DCP_VERSION = "1.0.0"


class Extent(NamedTuple):
    """Place of an item: `length` bytes of a file, from `start` on."""

    file: str
    start: int
    length: int


class StoredChunk(NamedTuple):
    """A rectangle of a whole tensor, with its place."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    extent: Extent


@dataclass
class SavedTensor:
    """A tensor in a checkpoint: the shape and dtype of the whole, and its rectangles."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[StoredChunk] = field(default_factory=list)


@dataclass
class Catalog:
    """Content of a checkpoint.

    Attributes:
        tensors, objects: by key.
        paths: path of each key in a nested state dict, for readers of torch.distributed.checkpoint.
        checksums: whether the files end with checksums; files that torch.distributed.checkpoint wrote do not.
    """

    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    objects: dict[str, Extent] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    checksums: bool = True

    def has(self, key: str) -> bool:
        return key in self.tensors or key in self.objects

    def files(self) -> list[str]:
        """Names of the files of the checkpoint, without `.metadata`."""
        return sorted({extent.file for extent in self.extents()})

    def extents(self) -> Iterator[Extent]:
        """Yields the places of all items."""
        yield from (chunk.extent for tensor in self.tensors.values() for chunk in tensor.chunks)
        yield from self.objects.values()


def pickled(catalog: Catalog) -> bytes:
    """The catalog as the bytes of `.metadata`."""
    entries: dict[str, Any] = {}
    extents: dict[Any, Any] = {}
    for key, tensor in catalog.tensors.items():
        chunks = []
        for index, chunk in enumerate(tensor.chunks):
            offset = torch.Size(chunk.offset)
            chunks.append(metadata.ChunkStorageMetadata(offset, torch.Size(chunk.shape)))
            extents[metadata.MetadataIndex(key, offset, index)] = storage_info(filesystem, *chunk.extent)
        properties = metadata.TensorProperties(dtype=tensor.dtype)
        entries[key] = metadata.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    for key, extent in catalog.objects.items():
        entries[key] = metadata.BytesStorageMetadata()
        extents[metadata.MetadataIndex(key)] = storage_info(filesystem, *extent)
    return pickle.dumps(
        metadata.Metadata(
            state_dict_metadata=entries,
            planner_data=dict(catalog.paths),
            storage_data=extents,
            storage_meta=metadata.StorageMeta(modules=[_CHECKSUMS] if catalog.checksums else []),
            version=_DCP_VERSION,
        )
    )


def unpickled(content: bytes | memoryview, name: str) -> Catalog:
    """Reads the bytes of `.metadata`, ours or torch.distributed.checkpoint's.

    Args:
        name: of the file, for error messages.

    Raises:
        CheckpointCorrupted: no metadata of a checkpoint, or it names code that could run, or a file elsewhere.
    """
    try:
        return _catalog(_Unpickler(io.BytesIO(content)).load())
    except CheckpointCorrupted as error:
        raise CheckpointCorrupted(f"{name}: {error}") from None
    except Exception as error:  # whatever damaged bytes make of a pickle
        raise CheckpointCorrupted(
            f"{name} is damaged, or not the metadata of a checkpoint ({type(error).__name__} while it was read); "
            "nothing was executed"
        ) from error


class _Record:
    """Record of an object in a pickle: its arguments, or its state."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.args = (state,)

    def get(self, name: str) -> Any:
        """An attribute of the recorded object."""
        return self.args[0].get(name)


_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_CLASSES = {
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in metadata.__all__),
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.Size",
    "torch.serialization._get_layout",
    # the folder that torch.distributed.checkpoint wrote to
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


_PythonUnpickler: Any = pickle._Unpickler


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    """Makes only records; `find_class` imports nothing.

    In C, an index of 2^29 in a file of 9 bytes has a table of 8 GiB allocated; in Python the table is a dict. Reading
    20,000 pieces takes 0.7 s in place of 0.1. Sets, and dicts with tuples as keys, are in no metadata: the hash of
    nested tuples takes as long as they are when written out.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._classes = {name: type(name, (_Record,), {}) for name in _CLASSES}

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path in self._classes:
            return self._classes[path]
        if path in _DTYPES:
            return _DTYPES[path]
        raise CheckpointCorrupted(
            f"it refers to {path[:200]}, which does not belong in metadata. Nothing was executed; do not trust this "
            "folder"
        )

    def load_setitem(self) -> None:
        self._check_key(self.stack[-2])
        super().load_setitem()

    def load_setitems(self) -> None:
        for key in self.stack[::2]:  # since the mark
            self._check_key(key)
        super().load_setitems()

    def load_dict(self) -> None:
        for key in self.stack[::2]:
            self._check_key(key)
        super().load_dict()

    def _check_key(self, key: Any) -> None:
        if not isinstance(key, (str, int, _Record)):
            raise CheckpointCorrupted(f"it has a {type(key).__name__} as a name")

    dispatch = {
        code: handler
        for code, handler in _PythonUnpickler.dispatch.items()
        if code not in (pickle.EMPTY_SET[0], pickle.FROZENSET[0], pickle.BYTEARRAY8[0])
    } | {
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
    }


def _catalog(root: _Record) -> Catalog:
    """Converts the records of a pickle to a catalog, and checks them."""
    extents: dict[tuple[str, tuple[int, ...] | None], Extent] = {}
    for index, info in root.get("storage_data").items():
        offset = index.get("offset")
        extents[_name(index.get("fqn")), None if offset is None else _sizes(offset)] = _extent(info)
    storage = root.get("storage_meta")
    modules = (storage.get("modules") if storage is not None else None) or []
    paths = root.get("planner_data") or {}
    catalog = Catalog(paths={key: tuple(path) for key, path in paths.items()}, checksums=_CHECKSUMS in modules)
    for key, entry in root.get("state_dict_metadata").items():
        _name(key)
        if type(entry).__name__.endswith(".BytesStorageMetadata"):
            catalog.objects[key] = _place(extents, key, None)
            continue
        properties, shape = entry.get("properties").args[0], _sizes(entry.get("size"))
        dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
        if not isinstance(dtype, torch.dtype):
            raise CheckpointCorrupted(f"{key} has dtype {short(dtype)}")
        tensor = SavedTensor(shape, dtype)
        for chunk in entry.get("chunks"):
            offset, size = _sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))
            if len(offset) != len(shape) or any(at + n > full_size for at, n, full_size in zip(offset, size, shape)):
                raise CheckpointCorrupted(f"{key}, of shape {shape}, has a piece {size} at {offset}")
            tensor.chunks.append(StoredChunk(offset, size, _place(extents, key, offset)))
            nbytes, length = math.prod(size) * dtype.itemsize, tensor.chunks[-1].extent.length
            if nbytes > length:
                raise CheckpointCorrupted(f"{key} has a piece {size} of {nbytes} bytes in a place of {length}")
        if sum(math.prod(chunk.shape) for chunk in tensor.chunks) != math.prod(shape):
            raise CheckpointCorrupted(f"the pieces of {key} do not add up to its {math.prod(shape)} elements")
        twice = _overlapping(tensor.chunks)
        if twice is not None:
            one, other = twice
            raise CheckpointCorrupted(
                f"two pieces of {key} overlap, {one.shape} at {one.offset} and {other.shape} at {other.offset}, and "
                "others are missing"
            )
        catalog.tensors[key] = tensor
    return catalog


def _overlapping(chunks: Sequence[StoredChunk]) -> tuple[StoredChunk, StoredChunk] | None:
    """Returns two rectangles that share an element, if there are any: a sweep along the dim with most offsets."""
    rectangles = [chunk for chunk in chunks if math.prod(chunk.shape)]
    if len(rectangles) < 2:
        return None
    dim = max(range(len(rectangles[0].shape)), key=lambda dim: len({chunk.offset[dim] for chunk in rectangles}))
    active: list[StoredChunk] = []
    for chunk in sorted(rectangles, key=lambda chunk: chunk.offset[dim]):
        active = [other for other in active if other.offset[dim] + other.shape[dim] > chunk.offset[dim]]
        for other in active:
            starts = map(max, zip(chunk.offset, other.offset))
            stops = (min(a + n, b + m) for a, n, b, m in zip(chunk.offset, chunk.shape, other.offset, other.shape))
            if all(start < stop for start, stop in zip(starts, stops)):
                return other, chunk
        active.append(chunk)
    return None


def _name(key: Any) -> str:
    if not isinstance(key, str):
        raise CheckpointCorrupted(f"it has {short(key)} as the name of a tensor")
    return key


def _place(extents: dict[tuple[str, tuple[int, ...] | None], Extent], key: str, offset: Any) -> Extent:
    if (key, offset) not in extents:
        at = "" if offset is None else f", for its piece at {offset}"
        raise CheckpointCorrupted(f"it names no file for {key}{at}")
    return extents[key, offset]


def _extent(info: _Record) -> Extent:
    name, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or name in (".", ".."):
        raise CheckpointCorrupted(f"it refers to the file {short(name)}, which is outside of this folder")
    if info.get("transform_descriptors"):
        compression = short(info.get("transform_descriptors"))
        raise CheckpointCorrupted(f"{name} is compressed ({compression}), which is not supported")
    return Extent(name, *_sizes(_Record((start, length))))


def _sizes(record: Any) -> tuple[int, ...]:
    """A `torch.Size`."""
    values = tuple(record.args[0])
    if not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise CheckpointCorrupted(f"{short(values)} are not valid sizes")
    return values
