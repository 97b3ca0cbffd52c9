"""Errors of communication: one family, so that `except CommError` catches all of them."""

from __future__ import annotations

__all__ = ["ALL_RANKS", "CommError", "CommTimeout", "RemoteRankError"]

ALL_RANKS = "All ranks of the group make this call, so that it cannot be inside of an `if rank == 0:`"  # for messages


class CommError(RuntimeError):
    """A collective could not be completed; the message names verb, axis, ranks and call site."""


class CommTimeout(CommError):
    """Some rank did not take part in time: it is slow, stuck, or took another path through the program."""


class RemoteRankError(CommError):
    """Another rank failed first; the message carries that rank's number and its own message."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
