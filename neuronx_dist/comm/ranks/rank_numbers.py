"""The base class of ints that differ from rank to rank, which a training run loads; the rest is in `rank_values.py`.

Such ints are made only where one rank is played in place of many.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["RankNumber", "concrete", "is_member"]


class RankNumber(int):
    """An int whose value on other ranks is known, and whose reads are reported: the base of `rank_values.RankValue`."""

    def is_in(self, ranks: Sequence[int]) -> bool:
        """Returns whether this number is one of `ranks`, as a single read."""
        raise NotImplementedError


def concrete(x: int) -> int:
    """Returns this rank's number as a plain int, without a report: for code that behaves equally for all numbers."""
    return int.__pos__(x) if isinstance(x, RankNumber) else x


def is_member(rank: int, ranks: Sequence[int]) -> bool:
    """Returns whether `rank` is one of `ranks`, as a single read."""
    return rank.is_in(ranks) if isinstance(rank, RankNumber) else rank in ranks
