"""The four types a tensor can have along a mesh axis, and the sharding refinement of the third.

| type | forward | its gradient |
| --- | --- | --- |
| `R` replicate | the same value on all ranks, each using it on its own | `P` |
| `I` invariant | the same value on all ranks, one computation | `I` |
| `V` varying | another value on every rank | `V` |
| `P` partial | the value is the sum over the ranks | `R` |

`S(i)` is `V` whose values are the pieces of one tensor along its dim i: a collective concatenates or splits along that
dim, where for plain `V` it stacks or unbinds on dim 0. `P("max")` is a value that is the maximum over the ranks.
Source: the spmd_types quick start.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

__all__ = ["DIFFERING", "SAME", "VARYING", "I", "P", "R", "S", "Shard", "SpmdType", "V", "dual"]


class LocalType:
    """One of R, I, V, P. There is one object of each: compare with `is` or `==`."""

    __slots__ = ("along", "letter", "meaning", "reduction", "_name")

    def __init__(
        self, letter: str, meaning: str, reduction: str = "", name: str = "", along: frozenset[int] = frozenset()
    ) -> None:
        self.letter = letter
        self.meaning = meaning
        self.reduction = reduction  # of P: how the ranks' values combine
        self._name = name or letter
        self.along = along  # of R: dims along which it is the same at every position

    def __call__(self, reduction: str) -> LocalType:
        """`P("sum")` is `P`, `P("max")` a partial maximum.

        Raises:
            ValueError: this is not P, or there is no such reduction.
        """
        if self.letter != "P" or reduction not in ("sum", "max"):
            raise ValueError(f'{self}({reduction!r}) is not a type; P("sum") and P("max") are')
        return P if reduction == "sum" else PARTIAL_MAX

    def __repr__(self) -> str:
        return 'P("max")' if self._name == "PARTIAL_MAX" else self.letter

    def __reduce__(self) -> Any:
        return (repeated, (self.along,)) if self.along else self._name


R = LocalType("R", "replicate")
I = LocalType("I", "invariant")  # noqa: E741 - the name of the type in its source
V = LocalType("V", "varying")
P = LocalType("P", "partial", "sum")
PARTIAL_MAX = LocalType("P", "partial maximum", "max", "PARTIAL_MAX")

# Of the checker only: values whose type is not decided by how they were made. Nobody declares them.
ZERO = LocalType("0", "zero", name="ZERO")  # zeros: whatever is added to them decides
UNIFORM = LocalType("R", "one constant", name="UNIFORM")  # R, and the same at every position: any shard of it is equal
_REPEATED: dict[frozenset[int], LocalType] = {}


def repeated(along: frozenset[int]) -> LocalType:
    """R, and the same at every position along these dims (an expanded mask): any shard along them is equal."""
    if not along:
        return R
    return _REPEATED.setdefault(along, LocalType("R", "replicate", along=along))


@dataclass(frozen=True)
class Shard:
    """Varying, and sharded on tensor dim `dim` (negative counts from the end). Written `S(dim)`.

    Attributes:
        dim: the dim of the tensor.
        stride: the dim is made of so many blocks, each sharded by itself (gate and up in one weight: 2).
        extent: how many of this rank's positions in a block the sharding counts; what lies inside of one is whole
            (heads, when heads and head dim were merged). None: all of the block.
        part: which part of the positions that a rank had was taken, from and to, as fractions: the ranks' parts are the
            pieces of a tensor, and not that part of the whole. None: all.
    """

    dim: int
    stride: int = 1
    extent: int | None = None
    part: tuple[Fraction, Fraction] | None = None

    letter: ClassVar[str] = "S"
    meaning: ClassVar[str] = "sharded"
    reduction: ClassVar[str] = ""

    def __repr__(self) -> str:
        return f"S({self.dim}, stride={self.stride})" if self.stride > 1 else f"S({self.dim})"


S = Shard
SpmdType = LocalType | Shard

# Types by their letters.
SAME = frozenset("RI")  # one value on all ranks
VARYING = frozenset("VS")  # another value on every rank
DIFFERING = frozenset("VSP")  # not one value on all ranks

_DUAL = {"R": P, "P": R, "I": I, "V": V, "0": V}


def dual(type_: SpmdType) -> SpmdType:
    """The type of the gradient of a tensor of `type_`."""
    return type_ if isinstance(type_, Shard) else _DUAL[type_.letter]
