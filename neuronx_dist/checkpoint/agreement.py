"""Errors of one rank raised on all ranks, so that no rank waits for ever and all do the same next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .. import comm
from .errors import CheckpointCorrupted, CheckpointError

__all__ = ["agree", "by_rank", "listed", "text_of", "together"]


def agree(error: BaseException | None, doing: str) -> None:
    """Exchanges errors between ranks; all ranks call it, and either all go on or all raise.

    Raises:
        CheckpointCorrupted: on every rank, if a rank found a damaged file, with the messages of all ranks.
        CheckpointError: on every rank, with the messages of the ranks that failed. On a failed rank, a CheckpointError,
            a ValueError or a TypeError is raised unchanged.
    """
    damage = str(error) if isinstance(error, CheckpointCorrupted) else ""
    everyone = comm.gather_objects((text_of(error), damage))
    failed = {rank: message for rank, (message, _) in enumerate(everyone) if message}
    if not failed:
        return
    damaged = list(dict.fromkeys(damage for _, damage in everyone if damage))
    if damaged:
        raise CheckpointCorrupted(listed(damaged)) from error
    if isinstance(error, (CheckpointError, ValueError, TypeError)):
        raise error
    raise CheckpointError(f"{doing}: {by_rank(failed)}") from error


@contextmanager
def together(doing: str) -> Iterator[None]:
    """Wraps code without communication, on all ranks, which at its end `agree` on whether it succeeded everywhere."""
    error: Exception | None = None
    try:
        yield
    except comm.CommError:
        raise
    except Exception as failure:
        error = failure
    agree(error, doing)


def text_of(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def by_rank(messages: dict[int, str]) -> str:
    """The error messages, each once, with the ranks that raised it."""
    ranks: dict[str, list[int]] = {}
    for rank, message in messages.items():
        ranks.setdefault(message, []).append(rank)
    lines = [
        f"rank {', '.join(map(str, who[:8]))}{', ...' if len(who) > 8 else ''}: {text}" for text, who in ranks.items()
    ]
    return listed(lines)


def listed(messages: Sequence[str]) -> str:
    """The first of several messages, and the number of further ones."""
    return "; ".join(messages[:4]) + (f"; and {len(messages) - 4} more" if len(messages) > 4 else "")
