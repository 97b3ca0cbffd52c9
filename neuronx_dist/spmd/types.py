"""The four types a tensor can have along a mesh axis, and the sharding refinement of the third.

| type | forward | its gradient |
| --- | --- | --- |
| `R` replicate | the same value on all ranks, each using it on its own | `P` |
| `I` invariant | the same value on all ranks, one computation | `I` |
| `V` varying | another value on every rank | `V` |
| `P` partial | the value is the sum over the ranks | `R` |

`S(i)` is `V` whose values are the pieces of one tensor along its dim i: a collective concatenates or splits along that
dim, where for plain `V` it stacks or unbinds on dim 0. Source: the spmd_types quick start.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["I", "P", "R", "S", "Shard", "SpmdType", "V", "dual"]


@dataclass(frozen=True)
class LocalType:
    """One of R, I, V, P. Compare with `is` or `==`; there is one object of each."""

    letter: str
    meaning: str

    def __repr__(self) -> str:
        return self.letter

    def __reduce__(self) -> str:
        return self.letter


R = LocalType("R", "replicate")
I = LocalType("I", "invariant")  # noqa: E741 - the name of the type in its source
V = LocalType("V", "varying")
P = LocalType("P", "partial")


@dataclass(frozen=True)
class Shard:
    """Varying, and sharded on tensor dim `dim` (negative counts from the end). Written `S(dim)`."""

    dim: int

    @property
    def letter(self) -> str:
        return "S"

    def __repr__(self) -> str:
        return f"S({self.dim})"


S = Shard
SpmdType = LocalType | Shard

_DUAL = {"R": P, "P": R, "I": I, "V": V}


def dual(type_: SpmdType) -> SpmdType:
    """The type of the gradient of a tensor of `type_`."""
    return type_ if isinstance(type_, Shard) else _DUAL[type_.letter]
