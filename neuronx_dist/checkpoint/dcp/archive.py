"""A tensor in the format of `torch.save`, without copying its bytes: a head, the data, a tail.

    head   the local headers of `archive/data.pkl`, `archive/version`, `archive/data/0`, contents of the first two
    data   the tensor, contiguous; it begins at a multiple of 64 bytes
    tail   the zip's directory, and zeros to a multiple of 64 bytes

Head and tail follow from dtype and shape alone. So a file's layout is known before it is written, and a reader of a
slice knows its offset. Zip's checksums stay 0: `torch.load` ignores them, and our checksums stand at the end of a file.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...torch_internals.tensors import rebuild_tensor

__all__ = ["ALIGNMENT", "MAX_BYTES", "Archive", "archive"]

ALIGNMENT = 64
# A larger zip needs other headers.
MAX_BYTES = (1 << 32) - (1 << 20)

_NAMES = (b"archive/data.pkl", b"archive/version", b"archive/data/0")
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")


class Archive(NamedTuple):
    """Bytes around the data of a tensor.

    Attributes:
        head, tail: the bytes before and after the data.
        nbytes: of the data.
        length: of head, data and tail, without the zeros at the end.
    """

    head: bytes
    nbytes: int
    tail: bytes
    length: int


def archive(dtype: torch.dtype, shape: Sequence[int]) -> Archive:
    """Bytes around the data of a contiguous tensor `[shape]` in a file of `torch.save`.

    Raises:
        ValueError: the tensor has 4 GiB or more.
    """
    # Plain ints: the cache takes sizes that know their axes, which a type check counts with, for equal ones.
    return _archive(dtype, tuple(int.__index__(size) for size in shape))


@lru_cache(4096)
def _archive(dtype: torch.dtype, shape: tuple[int, ...]) -> Archive:
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > MAX_BYTES:
        raise ValueError(f"a tensor {shape} of {dtype} is too large for one piece: {nbytes} bytes, of {MAX_BYTES}")
    contents = [_pickled(dtype, shape), b"3\n"]
    sizes = [*map(len, contents), nbytes]
    head, offsets = b"", []
    for name, size, content in zip(_NAMES, sizes, [*contents, None]):
        offsets.append(len(head))
        padding = 0 if content is not None else -(len(head) + _LOCAL.size + len(name)) % ALIGNMENT
        if 0 < padding < 4:  # a separate field has at least 4 bytes
            padding += ALIGNMENT
        extra = b"FB" + struct.pack("<H", padding - 4) + bytes(padding - 4) if padding else b""
        head += _LOCAL.pack(b"PK\3\4", 0, 0, 0, 0, 0, 0, size, size, len(name), padding) + name + extra
        head += content or b""
    directory = b"".join(
        _CENTRAL.pack(b"PK\1\2", 0, 0, 0, 0, 0, 0, 0, size, size, len(name), 0, 0, 0, 0, 0, offset) + name
        for name, size, offset in zip(_NAMES, sizes, offsets)
    )
    count, begin = len(_NAMES), len(head) + nbytes
    tail = directory + _END.pack(b"PK\5\6", 0, 0, count, count, len(directory), begin, 0)
    length = begin + len(tail)
    return Archive(head, nbytes, tail + bytes(-length % ALIGNMENT), length)


class _Storage(NamedTuple):
    nbytes: int


class _Tensor(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Pickler(pickle.Pickler):
    """Pickles a `_Tensor` as `torch.save` pickles the tensor that it describes."""

    def persistent_id(self, obj: Any) -> Any:
        return ("storage", torch.UntypedStorage, "0", "cpu", obj.nbytes) if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, _Tensor):
            return NotImplemented
        strides = [1]
        for size in obj.shape[:0:-1]:
            strides.insert(0, strides[0] * max(1, size))
        storage = _Storage(math.prod(obj.shape) * obj.dtype.itemsize)
        strides = strides if obj.shape else []
        args: Any = (storage, 0, tuple(obj.shape), tuple(strides), False, OrderedDict(), obj.dtype)
        return rebuild_tensor, args


def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(_Tensor(dtype, shape))
    return buffer.getvalue()
