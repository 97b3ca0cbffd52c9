"""Parts of a value that are no summands: maxima, norms and positions of shards; and V among which are shared summands.

P("max")        the value is the maximum over the ranks: what does not decrease may follow before that is taken
P("norm")       the ranks' norms, whose squares are summands (judging.py)
P("position")   positions in a shard, which `max(dim)` returns beside the maximum: of no use by themselves
AMONG           V on pp, among which are summands that several stages hold: a tied table's share of a norm, which one
                stage alone may count (handlers/one_rank.py)
"""

from __future__ import annotations

from collections.abc import Sequence

from ...rules.reduce import SQUARES
from ...rules.spec import Rule, Spec
from ...spmd.errors import Violation
from ...spmd.types import PARTIAL_NORM, SAME, UNIFORM, ZERO, LocalType, P, R, SpmdType, V

__all__ = ["AMONG", "POSITION", "adds_what_stages_share", "other_partial", "part_of_whole"]

POSITION = LocalType("P", "position in a shard", "position", "POSITION")
AMONG = LocalType("V", "varying", "", "AMONG", base=V)

_CATS = "stack cat concat concatenate hstack vstack view reshape flatten"
_MAXIMA = frozenset(
    f"{_CATS} amax max maximum fmax clamp_min relu sqrt exp log log2 log10 log1p tanh sigmoid floor ceil round "
    "trunc".split()
)
_NORMS = frozenset(f"{_CATS} norm linalg_vector_norm".split())
_MOVES = ("clone", "contiguous", "detach", "to", "float", "double")


def other_partial(
    rule: Rule, spec: Spec | None, results: int, axis: str, spmd_types: Sequence[SpmdType], partial: Sequence[int]
) -> SpmdType:
    """The type of a result of which some operands are P, but no sums, and none varies.

    Args:
        results: how many the call has.
        partial: indices of these operands, all of one type.

    Raises:
        Violation: the function needs all of the value.
    """
    spmd_type, name = spmd_types[partial[0]], rule.name
    if (rule.aliases or name in _MOVES) and len(spmd_types) == 1:
        return spmd_type
    rest = [spmd_type for index, spmd_type in enumerate(spmd_types) if index not in partial]
    if spmd_type is POSITION:
        why = (
            f"{name} of positions in each rank's shard, which are not positions in the whole: gather the shards first, "
            "or use the maximum alone"
        )
        raise Violation("partial_position", axis, why, partial)
    if spmd_type is PARTIAL_NORM:
        of_squares = "norm" not in name or (spec is not None and SQUARES in spec.fixed.values())
        if name in _NORMS and of_squares and all(other is ZERO for other in rest):
            return spmd_type
        why = f"{name} of a rank's own norm, that of its part: sum the squares, all_reduce, then take the root"
        raise Violation("partial_norm", axis, why, partial)
    if name in _MAXIMA and results == 1 and all(other.letter in SAME or other is ZERO for other in rest):
        return spmd_type  # the maximum of maxima; of equal values it is the value itself
    raise Violation("partial_max", axis, f"{name} of a partial maximum: reduce it first", partial)


def part_of_whole(rule: Rule, why: str, results: int) -> list[SpmdType] | None:
    """The types of the results of a function of all of a sharded dim, if the ranks' results can be put together."""
    if why == SQUARES:
        return [PARTIAL_NORM]
    return [P("max"), POSITION] if rule.name == "max" and results == 2 else None


def adds_what_stages_share(groups: Sequence[frozenset[int]], known: Sequence[SpmdType]) -> bool:
    """Returns whether a result on pp is a sum, or a list, of values of this stage and of ones that several hold."""
    if AMONG in known:
        return True
    sums = [[known[index] for index in group] for group in groups]
    return any(V in terms and any(k.base is R and k is not UNIFORM for k in terms) for terms in sums)
