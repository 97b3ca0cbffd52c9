"""Errors of one rank as errors of all, so that none waits for ever and all do the same next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .. import comm
from .errors import CheckpointCorrupted, CheckpointError

__all__ = ["agree", "by_rank", "listed", "text_of", "together"]


def agree(error: BaseException | None, doing: str) -> None:
    """Exchanges whether something failed; all ranks call it, and all go on, or all raise.

    Raises:
        CheckpointCorrupted: on every rank, if any found a file damaged: with what each found.
        CheckpointError: on every rank, with the message of each that failed. Where it was this one, and the error is a
            checkpoint's, a ValueError or a TypeError, that is raised as it is.
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
    """Code that communicates nothing, on all ranks; at its end they `agree` on whether it succeeded everywhere."""
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
    """What went wrong, each message once, with the ranks that say so."""
    ranks: dict[str, list[int]] = {}
    for rank, message in messages.items():
        ranks.setdefault(message, []).append(rank)
    lines = [
        f"rank {', '.join(map(str, who[:8]))}{', ...' if len(who) > 8 else ''}: {text}" for text, who in ranks.items()
    ]
    return listed(lines)


def listed(messages: Sequence[str]) -> str:
    """The first of several messages, and how many more there are."""
    return "; ".join(messages[:4]) + (f"; and {len(messages) - 4} more" if len(messages) > 4 else "")
