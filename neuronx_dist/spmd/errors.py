"""Errors of types: one family for all that types forbid, and the exception of rules before a message exists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .types import Shard

__all__ = ["SpmdTypeError", "Violation", "dim_of"]


class SpmdTypeError(ValueError):
    """A pair of types that no operator takes, or a tensor of another type than an operator needs.

    Attributes:
        what: the operator and its tensors.
        why: the rule that they break.
        where_from: where the types in question began.
        repairs: calls to write instead, the likeliest first.
        axis: the mesh axis on which they break the rule.
        rule: name of the rule, for tools.
    """

    def __init__(
        self,
        what: str,
        why: str = "",
        *,
        where_from: Sequence[str] = (),
        repairs: Sequence[str] = (),
        axis: str | None = None,
        rule: str = "",
        **details: Any,
    ) -> None:
        self.what, self.why = what, why
        self.where_from, self.repairs = list(where_from), list(repairs)
        self.axis, self.rule, self.details = axis, rule, details
        lines = [f"{what}: {why}" if why else what]
        lines += [f"  {line}" for line in self.where_from]
        if self.repairs:
            lines.append("  repair: " + "\n      or: ".join(self.repairs))
        super().__init__("\n".join(lines))


class Violation(Exception):
    """A reason that forbids a call, of which `explain` makes an `SpmdTypeError`.

    Attributes:
        rule: short name of the rule.
        axis: the axis on which it holds.
        why: the rule in words, with the numbers of this call.
        operands: indices of the operands concerned, the culprit first.
    """

    def __init__(self, rule: str, axis: str, why: str, operands: Sequence[int] = ()) -> None:
        super().__init__(why)
        self.rule, self.axis, self.why, self.operands = rule, axis, why, tuple(operands)


def dim_of(shard: Shard, shape: Sequence[int]) -> int:
    """Returns the dim of S(dim) of a tensor of `shape`, counted from the front.

    Raises:
        SpmdTypeError: there is no such dim.
    """
    ndim = len(shape)
    if not -ndim <= shard.dim < ndim:
        raise SpmdTypeError(
            f"{shard} of a tensor {list(shape)}",
            f"dim {shard.dim} is out of range: it has {ndim} dim{'' if ndim == 1 else 's'}",
            repairs=[f"S(dim) with a dim from {-ndim} to {ndim - 1}"] if ndim else ["R: it has no dim to shard"],
            rule="dim",
        )
    return shard.dim % ndim
