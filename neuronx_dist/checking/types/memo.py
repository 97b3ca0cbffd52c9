"""What was judged once is looked up after that: the key of a call, and what is to be done about it.

The key is the function, the types of its tensors and its other arguments: that decides for most calls. Where it does
not, the entry says what else to look at (`Closer`), and a second look-up has that in its key:

    shapes     a tensor is sharded, or a constant: a dim of size 1 broadcasts, a view cuts dims here or there
    grads      a tensor is I, or a constant: whether it receives a gradient
    dtypes     of masks and integers; casts that round are not linear
    random     the stream that is drawn from, on the axes of the mesh

Types are interned and entries hold no tensors, so that all modes share them. Functions come from the registry of rules
alone: what a program makes anew for every call is never a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...spmd.tensor_type import TensorType
from .handlers.random_numbers import drawing
from .judge import EXPANDS, Judgement
from .rules import Rule
from .rules.names import CATS
from .session import Session

__all__ = ["LONG", "NUMBERS", "PLAIN", "SEQUENCES", "SIZE", "TENSORS", "Closer", "Plan", "closer", "details", "keep"]

# Classes of arguments, exactly: a subclass, such as a RankValue, means something of its own.
TENSORS = frozenset({Tensor, nn.Parameter, FakeTensor})
PLAIN = frozenset({int, str, type(None), type(...), torch.dtype, torch.device, torch.Size,
                   torch.layout, torch.memory_format})  # fmt: skip
NUMBERS = frozenset({bool, float, complex})  # equal to an int, and another argument all the same: x[1], x[True]
SEQUENCES = frozenset({tuple, list})
LONG = 128  # a sequence of more than that is data

SIZE = 20_000  # entries; then all are forgotten


class Closer(NamedTuple):
    """What else decides about a call."""

    shapes: bool
    grads: bool
    dtypes: bool
    random: bool


class Plan:
    """What is to be done about a call.

    Attributes:
        types: of the result; a tuple: of the tensors in it, in order.
        name: of the function.
        extra: of the results' notes.
        born, assumed: see `Judgement`.
        written: operand 0 is written, and keeps its type.
        more: any of the three.
        closer: there is no plan yet, look at this as well.
    """

    __slots__ = ("assumed", "born", "closer", "extra", "more", "name", "types", "written")

    def __init__(
        self,
        types: Any,
        name: str,
        *,
        extra: Any = None,
        born: dict[str, str] | None = None,
        assumed: tuple[str, ...] = (),
        written: bool = False,
        closer: Closer | None = None,
    ) -> None:
        self.types, self.name, self.extra, self.closer = types, name, extra, closer
        self.born, self.assumed, self.written = born, assumed, written
        self.more = bool(born or assumed or written)

    @classmethod
    def of(cls, judgement: Judgement, name: str, extra: Any = None, written: bool = False) -> Plan:
        types = judgement.types if len(judgement.types) > 1 else judgement.types[0]
        return cls(types, name, extra=extra, born=judgement.born, assumed=judgement.assumed, written=written)


def closer(rule: Rule, types: Sequence[TensorType]) -> Closer | None:
    """What decides about calls of a function on tensors of these types, besides its key."""
    several = rule.name in CATS  # may make a packed buffer
    shapes = several or rule.name in EXPANDS or any(found.shaped for found in types)
    partial = any(kind.letter == "P" for found in types for _, kind in found)
    found = Closer(
        shapes,
        several or any(found.graded for found in types),
        shapes or (partial and rule.affine is not None),
        bool(rule.random) or rule.kind in ("random", "decompose"),
    )
    return found if any(found) else None


def details(wanted: Closer, items: Sequence[Any], mode: Session) -> tuple[Any, ...]:
    """What is wanted of a call's arguments."""
    shapes, grads, dtypes, random = wanted
    found: list[Any] = [wanted.__class__]  # ends the arguments: True is 1, x.view(4) and two flags is x.view(4, 1, 1)
    if grads:
        found.append(torch.is_grad_enabled())
    for x in items:
        if x.__class__ in TENSORS:
            if shapes:
                found.append(x.shape)
            if grads:
                found.append(x.requires_grad)
            if dtypes:
                found.append(x.dtype)
    if random:
        found.append(drawing(mode))
    return tuple(found)


def keep(memo: dict[Any, Plan], key: tuple[Any, ...], plan: Plan) -> None:
    """Writes an entry, unless there are too many: then it is the first of new ones."""
    if len(memo) >= SIZE:
        memo.clear()
    memo[key] = plan
