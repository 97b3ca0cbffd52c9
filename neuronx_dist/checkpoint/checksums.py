"""Checksums of a file's blocks, which stand at its end.

A block of at most 512 KiB has the CRC-32 of the sums of its 4 KiB pages (64-bit words, modulo 2^64): one flipped bit, a
lost, moved or zeroed page change it, at a fraction of the time that a CRC-32 of all bytes takes. Blocks begin where
chunks do, so that reading a slice of a tensor verifies what it touches and no more.

    chunks of the file | lengths and checksums of blocks | their number, their crc32, the file's length, magic

torch.distributed.checkpoint reads by offsets, and unpickling stops where a pickle ends: neither sees the footer.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator

import torch

from .errors import CheckpointCorrupted
from .memory import as_bytes, as_tensor

__all__ = ["BLOCK", "Blocks", "footer_size", "with_checksums"]

BLOCK = 512 << 10  # two of them fit into the cache of a core
_PAGE = 4096

_ENTRY = struct.Struct("<II")
_END = struct.Struct("<IIQ8s")
_MAGIC = b"nxdblks1"


def with_checksums(chunks: Iterable[memoryview | bytes]) -> Iterator[memoryview | bytes]:
    """The chunks, in blocks, and behind them the footer. `Storage.write` takes what this gives."""
    entries, length = [], 0
    for chunk in chunks:
        view = memoryview(chunk)
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            entries.append(_ENTRY.pack(len(block), _checksum(block)))
            length += len(block)
            yield block
    table = b"".join(entries)
    length += len(table) + _END.size
    yield table + _END.pack(len(entries), zlib.crc32(table), length, _MAGIC)


def footer_size(lengths: Iterable[int]) -> int:
    """Bytes that `with_checksums` adds to chunks of these lengths."""
    return sum(-(-length // BLOCK) for length in lengths) * _ENTRY.size + _END.size


class Blocks:
    """The checksums of a file, which are compared as its parts are read.

    Args:
        data: the whole file, as bytes or a memory map.
        name: of the file, for messages.

    Raises:
        CheckpointCorrupted: the file is truncated, or its footer damaged.
    """

    def __init__(self, data: memoryview, name: str) -> None:
        self._data = data
        self._name = name
        if len(data) < _END.size:
            raise CheckpointCorrupted(f"{name} is truncated: it has {len(data)} bytes")
        count, crc, length, magic = _END.unpack(data[-_END.size :])
        table = data[max(0, len(data) - _END.size - count * _ENTRY.size) : -_END.size]
        if magic != _MAGIC or length != len(data) or zlib.crc32(table) != crc:
            raise CheckpointCorrupted(
                f"{name} is truncated or damaged: its {len(data)} bytes do not end with checksums"
            )
        entries = list(_ENTRY.iter_unpack(table))
        self._checksums = [checksum for _, checksum in entries]
        self._starts = [0]
        for size, _ in entries:
            self._starts.append(self._starts[-1] + size)
        if self._starts[-1] + len(table) + _END.size != length:
            raise CheckpointCorrupted(f"{name} is damaged: its blocks are not all of its {length} bytes")
        self._verified = bytearray(len(entries))

    def verify(self, start: int = 0, stop: int | None = None) -> None:
        """Compares the blocks that bytes `start` to `stop` lie in, each once.

        Raises:
            CheckpointCorrupted: a block is not what was written.
        """
        stop = self._starts[-1] if stop is None else stop
        index = bisect_right(self._starts, start) - 1
        while index < len(self._verified) and self._starts[index] < stop:
            if not self._verified[index]:
                first, last = self._starts[index], self._starts[index + 1]
                if _checksum(self._data[first:last]) != self._checksums[index]:
                    raise CheckpointCorrupted(
                        f"{self._name} is damaged: bytes {first} to {last} are not what was written"
                    )
                self._verified[index] = True
            index += 1


def _checksum(block: memoryview) -> int:
    """Of the sums of whole pages, and then of the bytes behind them."""
    pages = len(block) // _PAGE * _PAGE
    crc = 0
    if pages:
        words = as_tensor(block[:pages], torch.int64, (-1, _PAGE // 8))
        crc = zlib.crc32(as_bytes(words.sum(1)))
    return zlib.crc32(block[pages:], crc)
