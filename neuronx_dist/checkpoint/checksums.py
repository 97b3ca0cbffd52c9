"""Checksums of a file's blocks, which stand at its end.

A block of at most 4 MiB has the CRC-32 of the sums of its 4 KiB pages (64-bit words, modulo 2^64): one flipped bit, a
lost, moved or zeroed page change it, at a fraction of the time that a CRC-32 of all bytes takes. Blocks begin where
chunks do, so that reading a slice of a tensor verifies what it touches and no more.

    chunks of the file | footer: block lengths and checksums, crc32 of the footer, length of the footer, magic

torch.distributed.checkpoint reads by offsets, and unpickling stops where a pickle ends: neither sees the footer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["BLOCK", "Blocks", "with_checksums"]

BLOCK = 4 << 20


def with_checksums(chunks: Iterable[memoryview | bytes]) -> Iterator[memoryview | bytes]:
    """The chunks, and behind them the footer. `Storage.write` takes what this gives."""
    raise NotImplementedError


class Blocks:
    """The checksums of a file, which are compared as its parts are read.

    Args:
        data: the whole file, as bytes or a memory map.
        name: of the file, for messages.

    Raises:
        CheckpointCorrupted: the file is truncated, or its footer damaged.
    """

    def __init__(self, data: memoryview, name: str) -> None:
        raise NotImplementedError

    def verify(self, start: int = 0, stop: int | None = None) -> None:
        """Compares the blocks that bytes `start` to `stop` lie in, each once.

        Raises:
            CheckpointCorrupted: a block is not what was written.
        """
        raise NotImplementedError
