"""Which rank verifies which block of a checkpoint's files: one for each, which reads it anyway if any rank does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .checksums import Blocks

__all__ = ["Ranges", "merged", "readers_of", "share_blocks"]

Ranges = list[tuple[int, int]]  # `(start, stop)` of bytes or blocks


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The ranges in order, those that touch or overlap as one."""
    result: Ranges = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def readers_of(file: str, number: int, needs: Sequence[Mapping[str, Ranges]]) -> dict[int, Ranges]:
    """The ranks that read a file, and what they need of it; of a file that nobody needs it is rank `number % ranks`.

    Args:
        needs: for each rank the bytes that it needs, by file.
    """
    return {rank: each[file] for rank, each in enumerate(needs) if each.get(file)} or {number % len(needs): []}


def share_blocks(blocks: Blocks, readers: Mapping[int, Ranges], rank: int) -> None:
    """Leaves those of a file's blocks wanted that `rank` is to verify.

    The blocks that several ranks need go to these by turns, and those that none needs to all readers of the file.
    """
    order = sorted(readers)
    events = []  # (number of a block, reader, whether it needs blocks from there on)
    for reader, ranges in readers.items():
        touched = (blocks.overlapping(start, stop) for start, stop in ranges)
        for start, stop in merged((each.start, each.stop) for each in touched):
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
