"""Checksums of a file's blocks, XXH3 of 64 bits each (the `xxhash` package), which stand at its end.

Blocks begin where chunks do, so that a slice of a tensor is verified by what it touches and no more. A block of 256 KiB
fits into the cache of a core: whoever copies it verifies it in the same pass over memory.

    chunks of the file | lengths and checksums of blocks | their number, their crc32, the file's length, magic

torch.distributed.checkpoint reads by offsets, and unpickling stops where a pickle ends: neither sees the footer.
Checksums protect from accidents, and not from who wants to change a file.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from xxhash import xxh3_64_intdigest

from .errors import CheckpointCorrupted, CheckpointError

__all__ = ["BLOCK", "Blocks", "with_checksums"]

BLOCK = 256 << 10

_ENTRY = struct.Struct("<IQ")
_END = struct.Struct("<IIQ8s")
_MAGIC, _OLD_MAGIC = b"nxdblks2", b"nxdblks1"


def with_checksums(chunks: Iterable[memoryview | bytes]) -> Iterator[memoryview | bytes]:
    """The chunks, in blocks, and behind them the footer. `Storage.write` takes what this gives."""
    entries, length = [], 0
    for chunk in chunks:
        view = memoryview(chunk)
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            entries.append(_ENTRY.pack(len(block), xxh3_64_intdigest(block)))
            length += len(block)
            yield block
    table = b"".join(entries)
    length += len(table) + _END.size
    yield table + _END.pack(len(entries), zlib.crc32(table), length, _MAGIC)


class Blocks:
    """The blocks of a file, each of which is compared with its checksum once.

    Attributes:
        starts: where each block begins, and where the last one ends.
        wanted: for each block 1 if it is still to be compared; all are at first.

    Args:
        read: `read(start, stop)` gives the bytes of the file.
        size: of the file.
        name: of the file, for messages.

    Raises:
        CheckpointCorrupted: the file is truncated, or its footer damaged.
        CheckpointError: its checksums are those of an earlier version.
    """

    def __init__(self, read: Callable[[int, int], memoryview | bytes], size: int, name: str) -> None:
        self._name = name
        if size < _END.size:
            raise CheckpointCorrupted(f"{name} is truncated: it has {size} bytes")
        count, crc, length, magic = _END.unpack(read(size - _END.size, size))
        if magic == _OLD_MAGIC:
            raise CheckpointError(
                f"{name} has checksums of an earlier version of neuronx_dist, which this one does not read: load it "
                f"with the version that wrote it, and convert it from there"
            )
        end = size - _END.size - count * _ENTRY.size
        table = read(end, size - _END.size) if end >= 0 else b""
        if magic != _MAGIC or length != size or zlib.crc32(table) != crc:
            raise CheckpointCorrupted(f"{name} is truncated or damaged: its {size} bytes do not end with checksums")
        entries = list(_ENTRY.iter_unpack(table))
        self.starts = [0, *accumulate(length for length, _ in entries)]
        self._checksums = [checksum for _, checksum in entries]
        if self.starts[-1] != end:
            raise CheckpointCorrupted(f"{name} is damaged: its blocks are not all of its {size} bytes")
        self.wanted = bytearray(b"\1" * count)

    def overlapping(self, start: int, stop: int) -> range:
        """The numbers of the blocks that bytes `start` to `stop` lie in."""
        if start >= stop:
            return range(0)
        return range(bisect_right(self.starts, start) - 1, min(bisect_left(self.starts, stop), len(self.wanted)))

    def copy(self, data: memoryview, start: int, stop: int, target: memoryview) -> None:
        """Copies bytes `start` to `stop` of the file's `data`, and verifies their blocks while these are in the cache.

        Raises:
            CheckpointCorrupted: a block is not what was written.
        """
        starts, wanted = self.starts, self.wanted
        for index in self.overlapping(start, stop):
            first, last = starts[index], starts[index + 1]
            block = data[first:last]
            low, high = max(first, start), min(last, stop)
            target[low - start : high - start] = block if high - low == last - first else data[low:high]
            if wanted[index]:
                self._compare(index, block)

    def verify(self, data: memoryview, start: int, stop: int) -> None:
        """Compares the blocks that bytes `start` to `stop` of the file's `data` lie in.

        Raises:
            CheckpointCorrupted: a block is not what was written.
        """
        for index in self.overlapping(start, stop):
            if self.wanted[index]:
                self._compare(index, data[self.starts[index] : self.starts[index + 1]])

    def _compare(self, index: int, block: memoryview) -> None:
        if xxh3_64_intdigest(block) != self._checksums[index]:
            first, last = self.starts[index : index + 2]
            raise CheckpointCorrupted(f"{self._name} is damaged: bytes {first} to {last} are not what was written")
        self.wanted[index] = 0
