"""What a stage holds while it does each of its tasks, as numbers: the most of it decides the memory of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .tasks import RECEIVE_FOR, RECEIVES, SENDS, Kind, Task

__all__ = ["most_held"]

_Amounts = tuple[int, ...]


def most_held(
    tasks: Sequence[Task], num_chunks: int, send_window: Callable[[Kind], int]
) -> dict[tuple[Kind, int], set[_Amounts]]:
    """What a stage holds during computations of each kind and chunk: of all times those at which it holds the most.

    Amounts are, for each chunk, the forwards without any part of their backward, those between its halves, and 1 if
    there are gradients of weights; then messages: activations and gradients that are on their way from here, and that
    are expected.

    Args:
        tasks: of the stage, messages included.
        send_window: most sends of a kind that are on their way.
    """
    whole, halved, has_gradients = [0] * num_chunks, [0] * num_chunks, [0] * num_chunks
    messages = dict.fromkeys((Kind.SEND_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_FORWARD, Kind.RECV_BACKWARD), 0)
    held: dict[tuple[Kind, int], set[_Amounts]] = {}
    for task in tasks:
        kind, chunk = task.kind, task.chunk
        if kind in SENDS:
            messages[kind] = min(send_window(kind), messages[kind] + 1)
            continue
        if kind in RECEIVES:
            messages[kind] += 1
            continue
        if kind is Kind.FORWARD:
            whole[chunk] += 1
        held.setdefault((kind, chunk), set()).add((*whole, *halved, *has_gradients, *messages.values()))
        if kind in RECEIVE_FOR:
            messages[RECEIVE_FOR[kind]] = max(0, messages[RECEIVE_FOR[kind]] - 1)
        if kind is Kind.BACKWARD_WEIGHT:
            halved[chunk] -= 1
        elif kind is not Kind.FORWARD:
            whole[chunk] -= 1
            halved[chunk] += kind is Kind.BACKWARD_INPUT
        has_gradients[chunk] |= kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    return {computation: _largest(amounts) for computation, amounts in held.items()}


def _largest(every: Iterable[_Amounts]) -> set[_Amounts]:
    """Those that no other one exceeds or equals in all amounts."""
    largest: set[_Amounts] = set()
    for amounts in sorted(every, reverse=True):  # what exceeds another comes before it
        if not any(all(a >= b for a, b in zip(other, amounts)) for other in largest):
            largest.add(amounts)
    return largest
