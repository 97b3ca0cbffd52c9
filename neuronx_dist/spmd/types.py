"""The four types of a tensor along a mesh axis, the sharded form of the third, and the scale of each.

| type | forward | its gradient |
| --- | --- | --- |
| `R` replicate | the same value on all ranks, each using it separately | `P` |
| `I` invariant | the same value on all ranks, one computation | `I` |
| `V` varying | another value on every rank | `V` |
| `P` partial | the value is the sum over the ranks | `R` |

`S(i)` is `V` whose values are the pieces of one tensor along its dim i: a collective concatenates or splits along that
dim, where for plain `V` it stacks or unbinds on dim 0. `P("max")` is a value that is the maximum over the ranks.
Source: the spmd_types quick start.

Every type has a *scale* k, 0 unless it is shown: the ranks hold N^k times the value of the type, N being the size of
the axis. `P("avg")` is P at scale 1, `N*P`: the value is the mean over the ranks. Its sum is `N*R`, which is R again
when it is divided by N. The scale of a gradient is that of the loss minus that of its tensor. Where only the sum over
the ranks counts, R at scale k is P at scale k + 1: a value that is the same everywhere is its own mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

__all__ = ["DIFFERING", "SAME", "VARYING", "I", "P", "R", "S", "Shard", "SpmdType", "V", "dual", "scaled"]


class LocalType:
    """A type R, I, V or P at some scale. There is one object of each: compare with `is` or `==`."""

    __slots__ = ("along", "base", "letter", "meaning", "reduction", "scale", "_name")

    def __init__(
        self,
        letter: str,
        meaning: str,
        reduction: str = "",
        name: str = "",
        along: frozenset[int] = frozenset(),
        base: LocalType | None = None,
        scale: int = 0,
    ) -> None:
        self.letter = letter
        self.meaning = meaning
        self.reduction = reduction  # of P: the reduction that combines the ranks' values
        self._name = name or letter
        self.along = along  # of R: dims along which all positions are equal
        self.base = base or self  # the type at scale 0
        self.scale = scale

    def __call__(self, reduction: str) -> LocalType:
        """`P("sum")` is `P`, `P("avg")` a mean over the ranks, `P("max")` a partial maximum.

        Raises:
            ValueError: this is not P, or there is no such reduction.
        """
        if self is not P or reduction not in ("sum", "avg", "max"):
            raise ValueError(f'{self}({reduction!r}) is not a type; P("sum"), P("avg") and P("max") are')
        return {"sum": P, "avg": PARTIAL_AVG, "max": PARTIAL_MAX}[reduction]

    def __repr__(self) -> str:
        text = f'P("{self.reduction}")' if self.reduction not in ("", "sum") else self.letter
        return 'P("avg")' if self is PARTIAL_AVG else _with_scale(text, self.scale)

    def __reduce__(self) -> Any:
        if self.scale:
            return scaled, (self.base, self.scale)
        return (repeated, (self.along,)) if self.along else self._name


def _with_scale(text: str, scale: int) -> str:
    """Returns a type at a scale: `N*R`, `R/N`, `N^2*R`."""
    if not scale:
        return text
    factor = "N" if abs(scale) == 1 else f"N^{abs(scale)}"
    return f"{factor}*{text}" if scale > 0 else f"{text}/{factor}"


R = LocalType("R", "replicate")
I = LocalType("I", "invariant")  # noqa: E741 - the name of the type in its source
V = LocalType("V", "varying")
P = LocalType("P", "partial", "sum")
PARTIAL_MAX = LocalType("P", "partial maximum", "max", "PARTIAL_MAX")
PARTIAL_NORM = LocalType("P", "partial norm", "norm", "PARTIAL_NORM")  # of shards, whose squares are summands
PARTIAL_AVG = LocalType("P", "partial mean", "sum", "PARTIAL_AVG", base=P, scale=1)

# Internal to the checker: values whose construction does not determine their type. Nobody declares them.
ZERO = LocalType("0", "zero", name="ZERO")  # zeros: the other summand determines the type
UNIFORM = LocalType("R", "one constant", name="UNIFORM")  # R, and equal at every position: all shards are equal
_REPEATED: dict[frozenset[int], LocalType] = {}
_SCALED: dict[tuple[LocalType, int], LocalType] = {(P, 1): PARTIAL_AVG}


def repeated(along: frozenset[int]) -> LocalType:
    """Returns R with equal positions along these dims (an expanded mask): all shards along them are equal."""
    if not along:
        return R
    return _REPEATED.setdefault(along, LocalType("R", "replicate", along=along))


class Dealt(NamedTuple):
    """The pieces of a dim, cut into `total` equal ones, that each rank holds: ((0, 3), (1, 2)) of 4 is zigzag."""

    total: int
    held: tuple[tuple[int, ...], ...]

    def __repr__(self) -> str:
        text = " | ".join(" ".join(map(str, pieces)) for pieces in self.held[:4])
        return f"pieces {text}{' | ...' if len(self.held) > 4 else ''} of {self.total}"

    @property
    def in_order(self) -> bool:
        """Returns whether the ranks' pieces, one rank after another, follow each other."""
        pieces = [piece for held in self.held for piece in held]
        return pieces == [*range(pieces[0], pieces[0] + len(pieces))]

    def cut(self, start: int, stop: int, length: int) -> Dealt | None:
        """The pieces from position `start` to `stop` of each rank's `length`; None where that cuts through one."""
        many = len(self.held[0])
        if start * many % length or stop * many % length:
            return None
        return Dealt(self.total, tuple(held[start * many // length : stop * many // length] for held in self.held))


@dataclass(frozen=True)
class Shard:
    """Varying, and sharded on tensor dim `dim` (negative counts from the end). Written `S(dim)`.

    Attributes:
        dim: the dim of the tensor.
        stride: number of blocks of the dim, each sharded separately (gate and up in one weight: 2).
        extent: number of this rank's positions in a block that the sharding counts; the inside of a position is not
            sharded (heads, when heads and head dim were merged). None: all of the block.
        scale: the ranks hold N^scale times the pieces.
        part: the part of a rank's positions that was selected, from and to, as fractions: the ranks' parts are the
            pieces of a tensor, not that part of the whole tensor. None: all.
        order: the pieces that each rank holds, if they are others than those of its number.
    """

    dim: int
    stride: int = 1
    extent: int | None = None
    part: tuple[Fraction, Fraction] | None = None
    scale: int = 0
    order: Dealt | None = None

    letter: ClassVar[str] = "S"
    meaning: ClassVar[str] = "sharded"
    reduction: ClassVar[str] = ""

    @property
    def base(self) -> Shard:
        """The type at scale 0."""
        return replace(self, scale=0) if self.scale else self

    def __repr__(self) -> str:
        text = f"S({self.dim}, stride={self.stride})" if self.stride > 1 else f"S({self.dim})"
        text = f"{text[:-1]}, {self.order})" if self.order is not None else text
        return _with_scale(text, self.scale)


S = Shard
SpmdType = LocalType | Shard

# Types by their letters.
SAME = frozenset("RI")  # one value on all ranks
VARYING = frozenset("VS")  # a different value on every rank
DIFFERING = frozenset("VSP")  # not one value on all ranks

_DUAL = {"R": P, "P": R, "I": I, "V": V, "0": V}


def scaled(spmd_type: SpmdType, factor: int) -> SpmdType:
    """Returns the type of N^factor times a value of `spmd_type`, N being the size of the axis."""
    if not factor or spmd_type is ZERO:
        return spmd_type
    scale = spmd_type.scale + factor
    if isinstance(spmd_type, Shard):
        return replace(spmd_type, scale=scale)
    base = spmd_type.base
    if not scale:
        return base
    key = (base, scale)
    if key not in _SCALED:
        name = f"{base._name}*N^{scale}"
        _SCALED.setdefault(
            key, LocalType(base.letter, base.meaning, base.reduction, name, base.along, base=base, scale=scale)
        )
    return _SCALED[key]


def dual(type_: SpmdType) -> SpmdType:
    """Returns the type of the gradient of a tensor of `type_`, for a loss of scale 0."""
    if isinstance(type_, Shard):
        return replace(type_, scale=-type_.scale) if type_.scale else type_
    return scaled(_DUAL[type_.letter], -type_.scale)
