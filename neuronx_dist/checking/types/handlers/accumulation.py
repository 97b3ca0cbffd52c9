"""The type that backward adds to a leaf's gradient: the dual of the leaf's type, or the result of its hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ....spmd.errors import SpmdTypeError
from ....spmd.tensor_type import Note, Origin, TensorType
from ....spmd.types import SAME, VARYING, P, Shard, SpmdType, V
from ..messages.explain import shown
from ..session import Session

__all__ = [
    "accumulated_error",
    "accumulating",
    "averages_leaf",
    "fits",
    "gradient_type",
    "incoming_origins",
    "set_incoming",
]


def set_incoming(
    mode: Session, leaf: Tensor, type_: TensorType | None, origins: dict[str, Origin] | None = None
) -> None:
    """Stores the type of the gradient that a leaf's hooks returned; None: the type without hooks."""
    mode.incoming[id(leaf)] = (leaf, type_, origins)


def averages_leaf(
    mode: Session, leaf: Tensor | None, node: Any, type_: TensorType, axis: str, actual: SpmdType, expected: SpmdType
) -> bool:
    """Returns whether a hand-written backward gives a leaf its gradient times a power of the size of a data axis.

    So does the gather of FSDP, which averages. The leaf's gradient then has the type `type_` of what was returned, if
    all that backward adds to it comes from such functions: see `accumulating`.
    """
    if leaf is None or axis not in mode.data_axes() or not fits(actual.base, expected.base):
        return False
    if not mode.probing:
        _, before, nodes = mode.averaged_leaves.setdefault(id(leaf), (leaf, type_, set()))
        if before is not type_:
            raise accumulated_error(leaf, mode.gradient_type(type_), before, type_)
        nodes.add(node)
        set_incoming(mode, leaf, type_)
    return True


def _uses(tensors: Any, leaves: Iterable[Tensor]) -> dict[int, set[Any]]:
    """The nodes that add to each leaf's gradient in a backward of `tensors`, by id of the leaf."""
    found: dict[int, set[Any]] = {id(leaf): set() for leaf in leaves}
    left = [x.grad_fn for x in (tensors if isinstance(tensors, (list, tuple)) else (tensors,)) if isinstance(x, Tensor)]
    seen = set(left)
    while left:
        node = left.pop()
        for following, _ in node.next_functions if node is not None else ():
            leaf = getattr(following, "variable", None)
            if leaf is not None and id(leaf) in found:
                found[id(leaf)].add(node)
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
    return found


@contextmanager
def accumulating(mode: Session, tensors: Any) -> Iterator[None]:
    """Forgets the results of leaves' hooks after a backward pass of `tensors`: the gradients have them then.

    Raises:
        SpmdTypeError: a leaf gets averaged gradients from some functions, and others elsewhere.
    """
    try:
        yield
        leaves = mode.averaged_leaves
        uses = _uses(tensors, [leaf for leaf, _, _ in leaves.values()]) if leaves else {}
        for leaf, type_, nodes in leaves.values():
            if uses[id(leaf)] - nodes:
                raise accumulated_error(leaf, type_, type_, mode.gradient_type(type_))
        for leaf, _, _ in [*mode.incoming.values()]:
            if leaf.grad is not None:
                mode.adopt(leaf, leaf.grad)
    finally:
        mode.incoming.clear()
        mode.averaged_leaves.clear()


def incoming_origins(mode: Session, leaf: Tensor) -> dict[str, Origin] | None:
    """Origins of the type that backward adds to a leaf's gradient, if the leaf's hooks made it."""
    known = mode.incoming.get(id(leaf))
    return known[2] if known is not None else None


def gradient_type(mode: Session, leaf: Tensor, note: Note) -> TensorType:
    """The type that backward adds to a leaf's gradient."""
    known = mode.incoming.get(id(leaf))
    return (known[1] if known is not None else None) or mode.gradient_type(note.type)


def accumulated_error(leaf: Tensor, type_: TensorType, before: TensorType, added: TensorType) -> SpmdTypeError:
    """The error for a leaf's gradient whose type does not fit the type that backward adds."""
    return SpmdTypeError(
        f"the gradient of {shown(leaf, type_)}",
        f"it was {before} when backward added to it, which gives {added}: the sum is neither",
        repairs=["reduce gradients once, after the last backward", "zero_grad() before the next backward"],
        rule="accumulated",
    )


def adds_up(before: TensorType, added: TensorType) -> bool:
    """Returns whether a gradient of type `before`, with `added` added to it, has the type `added`.

    An averaged gradient is equal on all ranks, and so its own mean: it may go on with P("avg").
    """
    if before is added:
        return True
    axes = {*before.types, *added.types}
    pairs = [(before.get(axis), added.get(axis)) for axis in axes]
    return all(
        one is two
        or (one is not None and one.letter == "0")
        or (one is not None and two is not None and (one.letter, two.base, one.scale + 1) == ("R", P, two.scale))
        for one, two in pairs
    )


def fits(actual: SpmdType, expected: SpmdType) -> bool:
    """Returns whether a gradient of type `actual` may stand where one of type `expected` belongs."""
    if actual.letter == "0":
        return True
    if expected.letter == "P" and actual.letter == "R":  # a value that is equal on all ranks is their mean
        return actual.scale + 1 == expected.scale
    if actual.scale != expected.scale:
        return False
    if expected.letter in SAME:
        return actual.letter in SAME
    if expected.letter == "P":  # V is each rank's own part, where dims are not known
        return actual.base is P or actual.base is V
    if isinstance(expected, Shard) and isinstance(actual, Shard):
        return (expected.dim, expected.stride, expected.order) == (actual.dim, actual.stride, actual.order)
    return actual.letter in VARYING | SAME  # V; an equal value may stand for each rank's own
