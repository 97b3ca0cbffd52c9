"""The method of attention between sharded queries and sharded keys: ring, gather or all-to-all, by predicted cost.

    ring        blocks of keys and values go around, forward once and backward twice; memory: two blocks
    gather      keys and values are whole on every rank
    all_to_all  every rank gets some heads of the whole sequence (DeepSpeed Ulysses, arXiv:2309.14509)

Of those that take at most twice the memory of the ring, the one with the fewest bytes is used, and of equal ones the
one with the least memory. `attention_method("ring")` forces one; `attention_choices()` shows what was used, and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from ..attention import ring_elements
from .report import note

__all__ = [
    "Choice",
    "Cost",
    "attention_choices",
    "attention_method",
    "choose",
    "forced_method",
    "note_choice",
    "predicted",
    "set_attention_method",
    "token_order",
    "zigzag",
]

METHODS = ("auto", "ring", "gather", "all_to_all")
_default = ["auto"]
_method: ContextVar[str | None] = ContextVar("attention_method", default=None)
_order: ContextVar[int] = ContextVar("zigzag", default=0)
_notes: ContextVar[tuple[list[Choice], ...]] = ContextVar("attention_choices", default=())


class Cost(NamedTuple):
    """Bytes sent to or from the rank that has most, in forward and backward, and bytes that this rank holds."""

    bytes: int
    memory: int


class Choice(NamedTuple):
    """The method that an attention uses.

    Attributes:
        method: the one that is used.
        forced: whether `attention_method` said so.
        costs: of all that are possible.
        shapes: of the queries and the keys.
    """

    method: str
    forced: bool
    costs: Mapping[str, Cost]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]


def _checked(method: str) -> str:
    if method not in METHODS:
        raise ValueError(f"attention_method {method!r} is not one of {', '.join(METHODS)}")
    return method


def set_attention_method(method: str) -> None:
    """Sets the method of all following attentions: "ring", "gather", "all_to_all", or "auto", by predicted cost."""
    _default[0] = _checked(method)


@contextmanager
def attention_method(method: str) -> Iterator[None]:
    """`set_attention_method` for this thread: `with attention_method("ring"):`."""
    token = _method.set(_checked(method))
    try:
        yield
    finally:
        _method.reset(token)


def forced_method() -> str:
    """Returns the method that is set, or "auto"."""
    return _method.get() or _default[0]


@contextmanager
def zigzag(ranks: int) -> Iterator[None]:
    """Declares that tokens inside are in the zig-zag order of `attention.zigzag_order` for this number of ranks.

    Causal attention then goes by their positions in the sequence, and every rank computes as much.

    Raises:
        ValueError: `ranks` is below 1.
    """
    if ranks < 1:
        raise ValueError(f"zigzag({ranks}): the number of ranks must be at least 1")
    token = _order.set(ranks)
    try:
        yield
    finally:
        _order.reset(token)


def token_order() -> int:
    """Returns the number of ranks for which tokens are in zig-zag order; 0 if they are in the order of the sequence."""
    return _order.get()


@contextmanager
def attention_choices() -> Iterator[list[Choice]]:
    """Collects the choices of this thread: `with attention_choices() as choices:`."""
    choices: list[Choice] = []
    token = _notes.set((*_notes.get(), choices))
    try:
        yield choices
    finally:
        _notes.reset(token)


def note_choice(choice: Choice) -> None:
    """Reports a choice to the collectors of choices, and to open reports."""
    for choices in _notes.get():
        choices.append(choice)
    why = "forced" if choice.forced else "of least cost"
    costs = "; ".join(f"{method} {cost.bytes:,} bytes, holds {cost.memory:,}" for method, cost in choice.costs.items())
    note("scaled_dot_product_attention", f"{choice.method}, {why}: {costs}")


def predicted(
    sizes_q: Sequence[int],
    sizes_k: Sequence[int],
    row_q: int,
    row_k: int,
    itemsize: int,
    *,
    grad: bool,
    heads_divide: bool,
) -> dict[str, Cost]:
    """Returns the predicted cost of each possible method.

    Args:
        sizes_q, sizes_k: queries and keys of each rank.
        row_q: elements of a query and its output, over batch and heads.
        row_k: elements of a key and its value.
        grad: whether there is a backward pass.
        heads_divide: whether the heads can be divided evenly among the ranks.
    """
    ranks, keys = len(sizes_k), sum(sizes_k)
    rank_numbers = range(ranks)

    def ring(rank: int) -> int:
        forward = ring_elements(sizes_k, rank, row_k)
        return forward + (ring_elements(sizes_k, rank, row_k, backward=True) if grad else 0)

    def gather(rank: int) -> int:
        local_keys = sizes_k[rank]
        return row_k * max((ranks - 1) * local_keys, keys - local_keys) * (2 if grad else 1)

    def all_to_all(rank: int) -> int:
        sent = (sizes_q[rank] * row_q + sizes_k[rank] * row_k) * (ranks - 1) // ranks
        mean = (sum(sizes_q) * row_q + keys * row_k) // ranks
        received = mean - (sizes_q[rank] * row_q + sizes_k[rank] * row_k) // ranks
        return max(sent, received) * (2 if grad else 1)

    copies = 2 if grad else 1  # gradients are as large
    costs = {"ring": Cost(max(map(ring, rank_numbers)) * itemsize, 2 * max(sizes_k) * row_k * copies * itemsize)}
    if heads_divide:
        memory = (sum(sizes_q) * row_q + keys * row_k) // ranks * copies * itemsize
        costs["all_to_all"] = Cost(max(map(all_to_all, rank_numbers)) * itemsize, memory)
    costs["gather"] = Cost(max(map(gather, rank_numbers)) * itemsize, keys * row_k * copies * itemsize)
    return costs


def choose(costs: Mapping[str, Cost], forced: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> Choice:
    """Returns the forced method, or else the cheapest one.

    Raises:
        ValueError: the one that is forced cannot be used.
    """
    if forced != "auto":
        if forced not in costs:
            raise ValueError(
                f"attention_method({forced!r}): the heads of q {list(shapes[0])} and k {list(shapes[1])} cannot be "
                f"divided among the ranks; use one of {', '.join(costs)}"
            )
        return Choice(forced, True, costs, shapes)
    limit = 2 * costs["ring"].memory
    possible = [method for method, cost in costs.items() if cost.memory <= limit]
    return Choice(min(possible, key=lambda method: costs[method]), False, costs, shapes)
