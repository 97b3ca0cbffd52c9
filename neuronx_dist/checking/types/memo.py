"""The cache of judgements: the key of a call, and the cached judgement.

The key is the function, the types of its tensors and its other arguments, which decide about most calls. For others the
entry has an `ExtraKey`, and a second look-up adds these properties to the key:

    shapes     a tensor is sharded, or a constant: a dim of size 1 broadcasts, a view cuts dims here or there
    grads      a tensor is I, or a constant: whether it receives a gradient
    dtypes     of masks and integers; casts that round are not linear
    random     the stream that is drawn from, on the axes of the mesh
    parameters a part of a sharded dim is taken: of a parameter a rank may take its own
    mesh       an argument is a number that knows axes by name: which pieces of axes these are; or a plain one that
               multiplies a part of a sum, and equals the size of an axis of some mesh (2, 0.5)

Types are interned and entries hold no tensors, so that all modes share the entries. Functions come from the registry of
rules alone: a function that a program makes for each call is never a key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...rules import Rule
from ...rules.names import CATS
from ...spmd.tensor_type import TensorType
from ...torch_internals.fake_tensors import FakeTensor
from .axis_powers import NUMBER_CLASSES, AxisNumber
from .handlers.axis_numbers import takes_factor
from .handlers.random_numbers import drawing
from .judge import EXPANDS, PICKS, Judgement
from .session import Session

__all__ = [
    "BY_VALUE",
    "LONG",
    "NUMBERS",
    "SEQUENCES",
    "SIZE",
    "TENSORS",
    "CachedJudgement",
    "ExtraKey",
    "extra_key_of",
    "extra_values",
    "store",
]

# Classes of arguments, exactly: a subclass, such as a RankValue, means something of its own.
TENSORS = frozenset({Tensor, nn.Parameter, FakeTensor})  # in the key by their type
BY_VALUE = frozenset({int, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format})
NUMBERS = (
    NUMBER_CLASSES  # may be equal to an int, and another argument all the same: x[1], x[True], x / comm.size("dp")
)
SEQUENCES = frozenset({tuple, list, torch.Size})
LONG = 128  # longer sequences are data

SIZE = 20_000  # entries at most; then all are dropped


class ExtraKey(NamedTuple):
    """Further properties of a call's arguments that decide about it, so that the key must have them."""

    shapes: bool
    grads: bool
    dtypes: bool
    random: bool
    mesh: bool
    parameters: bool


class CachedJudgement:
    """The cached judgement of equal calls: the types of the results, and what to report each time.

    Attributes:
        result_types: one type for all tensors of the result; a tuple: of each of them, in order.
        name: of the function.
        note_extra: `Note.extra` of the results.
        born: axes on which a type begins in this call, and how; as in `Judgement`.
        assumed: assumptions; as in `Judgement`.
        written: the call writes operand 0 in place, which keeps its type.
        has_effects: one of `born`, `assumed`, `written` is set, so that writing the results' types is not enough.
        extra_key: if set, the key does not decide, and the other fields have no meaning: look up again with this.
    """

    __slots__ = ("assumed", "born", "extra_key", "has_effects", "name", "note_extra", "result_types", "written")

    def __init__(
        self,
        result_types: Any,
        name: str,
        *,
        note_extra: Any = None,
        born: dict[str, str] | None = None,
        assumed: tuple[str, ...] = (),
        written: bool = False,
        extra_key: ExtraKey | None = None,
    ) -> None:
        self.result_types, self.name, self.note_extra, self.extra_key = result_types, name, note_extra, extra_key
        self.born, self.assumed, self.written = born, assumed, written
        self.has_effects = bool(born or assumed or written)

    @classmethod
    def of(cls, judgement: Judgement, name: str, note_extra: Any = None, written: bool = False) -> CachedJudgement:
        """The entry for calls that are judged as this one was."""
        types = judgement.types if len(judgement.types) > 1 else judgement.types[0]
        return cls(types, name, note_extra=note_extra, born=judgement.born, assumed=judgement.assumed, written=written)

    @classmethod
    def undecided(cls, name: str, extra_key: ExtraKey) -> CachedJudgement:
        """Returns a placeholder entry: calls with this key must be looked up again with `extra_key`."""
        return cls(None, name, extra_key=extra_key)


def extra_key_of(rule: Rule, types: Sequence[TensorType], items: Sequence[Any]) -> ExtraKey | None:
    """The extra key of calls of a function on tensors of these types; None: their key decides.

    `items`: the arguments of the call.
    """
    packs = rule.name in CATS  # may make a packed buffer
    shapes = packs or rule.name in EXPANDS or any(type_.shaped for type_ in types)
    partial = any(spmd_type.letter == "P" for type_ in types for _, spmd_type in type_)
    extra_key = ExtraKey(
        shapes,
        packs or any(type_.graded for type_ in types),
        shapes or (partial and rule.affine is not None),
        bool(rule.random) or rule.kind in ("random", "decompose"),
        any(isinstance(x, AxisNumber) for x in items)
        or (takes_factor(rule.name) and any(map(_is_scaled, types)) and any(map(_may_be_size, items))),
        rule.name in PICKS and any(type_.sharded for type_ in types),
    )
    return extra_key if any(extra_key) else None


def _is_scaled(type_: TensorType) -> bool:
    """Returns whether a plain number may be meant for the size of an axis, as a factor."""
    return any(spmd_type.letter == "P" or spmd_type.scale for _, spmd_type in type_)


def _may_be_size(x: Any) -> bool:
    """Returns whether an argument is a number that equals the size of an axis of some mesh, or one over it."""
    if x.__class__ is not int and x.__class__ is not float or not 0 < x < math.inf or x == 1:
        return False
    return float(x).is_integer() or (x < 1 and x == 1 / round(1 / x))


def extra_values(extra_key: ExtraKey, items: Sequence[Any], mode: Session) -> tuple[Any, ...]:
    """The properties that `extra_key` names of a call's arguments, to be appended to its key."""
    shapes, grads, dtypes, random, mesh, parameters = extra_key
    # The class ends the arguments: True is 1, so that x.view(4) and two flags would be x.view(4, 1, 1).
    values: list[Any] = [ExtraKey]
    if grads:
        values.append(torch.is_grad_enabled())
    for x in items:
        if x.__class__ in TENSORS:
            if shapes:
                values.append(x.shape)
            if grads:
                values.append(x.requires_grad)
            if dtypes:
                values.append(x.dtype)
            if parameters:
                values.append(isinstance(x, nn.Parameter))
    if random:
        values.append(drawing(mode))
    if mesh:
        values.append(mode.mesh)
    return tuple(values)


def store(memo: dict[Any, CachedJudgement], key: tuple[Any, ...], entry: CachedJudgement) -> None:
    """Stores an entry; a full cache is emptied first."""
    if len(memo) >= SIZE:
        memo.clear()
    memo[key] = entry
