"""What a training run has to know of ints that differ from rank to rank; the ints themselves are in `rank_values.py`.

These are made only where one rank is played in place of many.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["RankNumber", "concrete", "is_member"]


class RankNumber(int):
    """An int whose value on other ranks is known, and whose reads are reported: the base of `rank_values.RankValue`."""

    def is_in(self, ranks: Sequence[int]) -> bool:
        """Whether it is one of `ranks`, as one read."""
        raise NotImplementedError


def concrete(x: int) -> int:
    """This rank's number as a plain int, nothing reported: for code that takes the same way whatever it is."""
    return int.__pos__(x) if isinstance(x, RankNumber) else x


def is_member(rank: int, ranks: Sequence[int]) -> bool:
    """Whether `rank` is one of `ranks`, as one read."""
    return rank.is_in(ranks) if isinstance(rank, RankNumber) else rank in ranks
