"""Checksums of a file's blocks, XXH3 of 64 bits each (the `xxhash` package), which stand at its end.

Blocks begin where chunks do, so that reading a slice of a tensor verifies the touched blocks alone. A block of 256 KiB
fits into the cache of a core, so it is verified in the same pass over memory in which it is copied.

    chunks of the file | lengths and checksums of blocks | their number, their crc32, the file's length, magic

torch.distributed.checkpoint reads by offsets, and unpickling stops where a pickle ends: neither sees the footer.
Checksums protect from accidents, not from an attacker.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from xxhash import xxh3_64_intdigest

from ..errors import CheckpointCorrupted, CheckpointError

__all__ = ["BLOCK", "Blocks", "Ranges", "merged", "readers_of", "share_blocks", "with_checksums"]

BLOCK = 256 << 10
Ranges = list[tuple[int, int]]  # `(start, stop)` of bytes or blocks

_ENTRY = struct.Struct("<IQ")
_END = struct.Struct("<IIQ8s")
_MAGIC, _OLD_MAGIC = b"nxdblks2", b"nxdblks1"


def with_checksums(chunks: Iterable[memoryview | bytes]) -> Iterator[memoryview | bytes]:
    """Yields the chunks in blocks, and then the footer, for `Storage.write`."""
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
        starts: start of each block, and the end of the last one.
        wanted: for each block 1 if it is still to be compared; at first all are 1.

    Args:
        read: `read(start, stop)` returns bytes of the file.
        size: of the file.
        name: of the file, for error messages.

    Raises:
        CheckpointCorrupted: the file is truncated, or its footer damaged.
        CheckpointError: the checksums are of an earlier version.
    """

    def __init__(self, read: Callable[[int, int], memoryview | bytes], size: int, name: str) -> None:
        self._name = name
        if size < _END.size:
            raise CheckpointCorrupted(f"{name} is truncated: it has {size} bytes")
        count, crc, length, magic = _END.unpack(read(size - _END.size, size))
        if magic == _OLD_MAGIC:
            raise CheckpointError(
                f"{name} has checksums of an earlier version of neuronx_dist, which this version cannot read: load "
                "it with the version that wrote it, and convert it there"
            )
        end = size - _END.size - count * _ENTRY.size
        table = read(end, size - _END.size) if end >= 0 else b""
        if magic != _MAGIC or length != size or zlib.crc32(table) != crc:
            raise CheckpointCorrupted(f"{name} is truncated or damaged: its {size} bytes do not end with checksums")
        entries = list(_ENTRY.iter_unpack(table))
        self.starts = [0, *accumulate(length for length, _ in entries)]
        self._checksums = [checksum for _, checksum in entries]
        if self.starts[-1] != end:
            raise CheckpointCorrupted(f"{name} is damaged: its blocks do not add up to its {size} bytes")
        self.wanted = bytearray(b"\1" * count)

    def overlapping(self, start: int, stop: int) -> range:
        """Numbers of the blocks that contain bytes `start` to `stop`."""
        if start >= stop:
            return range(0)
        return range(bisect_right(self.starts, start) - 1, min(bisect_left(self.starts, stop), len(self.wanted)))

    def copy(self, data: memoryview, start: int, stop: int, target: memoryview) -> None:
        """Copies bytes `start` to `stop` of the file's `data`, and verifies their blocks while they are in the cache.

        Raises:
            CheckpointCorrupted: a block differs from what was written.
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
        """Verifies the blocks that contain bytes `start` to `stop` of the file's `data`.

        Raises:
            CheckpointCorrupted: a block differs from what was written.
        """
        for index in self.overlapping(start, stop):
            if self.wanted[index]:
                self._compare(index, data[self.starts[index] : self.starts[index + 1]])

    def _compare(self, index: int, block: memoryview) -> None:
        if xxh3_64_intdigest(block) != self._checksums[index]:
            first, last = self.starts[index : index + 2]
            raise CheckpointCorrupted(f"{self._name} is damaged: bytes {first} to {last} have a wrong checksum")
        self.wanted[index] = 0


# --- the rank that verifies a block: one rank for each block, which reads it anyway if any rank does


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The ranges in order, with touching or overlapping ranges merged."""
    result: Ranges = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def readers_of(file: str, number: int, needs: Sequence[Mapping[str, Ranges]]) -> dict[int, Ranges]:
    """Readers of a file, and the bytes they need; a file that no rank needs is read by rank `number % ranks`.

    Args:
        needs: for each rank the needed bytes, by file.
    """
    return {rank: need[file] for rank, need in enumerate(needs) if need.get(file)} or {number % len(needs): []}


def share_blocks(blocks: Blocks, readers: Mapping[int, Ranges], rank: int) -> None:
    """Keeps `wanted` set for the blocks of a file that `rank` is to verify, and clears the others.

    Blocks that several ranks need go to these ranks by turns; blocks that none needs go to all readers by turns.
    """
    order = sorted(readers)
    events = []  # (number of a block, reader, whether it needs blocks from there on)
    for reader, ranges in readers.items():
        touched = (blocks.overlapping(start, stop) for start, stop in ranges)
        for start, stop in merged((block.start, block.stop) for block in touched):
            events += [(start, reader, True), (stop, reader, False)]
    wanted = bytearray(len(blocks.wanted))
    active: set[int] = set()
    last = 0
    for at, reader, begins in [*sorted(events), (len(wanted), -1, False)]:
        holders = sorted(active) or order
        if at > last and rank in holders:
            first = last + (holders.index(rank) - last) % len(holders)
            wanted[first : at : len(holders)] = b"\1" * len(range(first, at, len(holders)))
        last = at
        (active.add if begins else active.discard)(reader)
    blocks.wanted = wanted
