"""Equal values that one rank alone adds to a partial sum: `if sharded or tp_rank == 0: total += norm(grad) ** 2`.

Added on one rank, an equal value is a summand, P; added on all ranks, it is counted once for each. A mode sees one
rank, so that it takes the value for a summand and records a `Claim`; `check` compares the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ....call_site import USER, call_site, nearest_line
from ....spmd.errors import SpmdTypeError, Violation
from ....spmd.types import PARTIAL_NORM, SAME, P
from ..judge import Operand
from ..partial_kinds import AMONG
from ..session import Session

__all__ = ["Claim", "as_share", "claim", "claim_stage"]

_RULES = {"partial_plus": P, "partial_norm": PARTIAL_NORM}


class Claim(NamedTuple):
    """The claim that no other rank of `axis` adds a value of its own at a line.

    Attributes:
        line: of the user's code.
        error: to report where the claim is wrong.
    """

    axis: str
    line: str
    error: Exception


def as_share(violation: Violation, operands: Sequence[Operand]) -> list[Operand] | None:
    """The operands, with equal ones that meet a partial sum as its summands; None for any other violation."""
    share, axis = _RULES.get(violation.rule), violation.axis
    if share is None:
        return None
    changed = list(operands)
    for index, operand in enumerate(operands):
        spmd_type: Any = operand.type.get(axis)
        if spmd_type is None or spmd_type.letter == "0" or spmd_type is share:
            continue
        if spmd_type.letter not in SAME or spmd_type.scale or operand.differentiable:
            return None
        changed[index] = operand._replace(type=operand.type.with_axis(axis, share))
    return changed if changed != list(operands) else None


def claim_stage(mode: Session, name: str, spmd_type: Any) -> None:
    """Records, at a sum over stages, that no other stage adds what several of them hold."""
    if spmd_type is AMONG and not mode.probing:
        claim(mode, "pp", lambda: SpmdTypeError(
            f"{name} at {call_site()}",
            "on pp values of each stage are added up, and among them on several stages is a value that these stages "
            "share, that of a tied weight: it is counted once for each",
            repairs=["nxd.clip_grad_norm(parameters, max_norm), which counts every element of the model once",
                     "count a tied weight on the first of its stages"],
            axis="pp",
            rule="stages_share",
        ))  # fmt: skip


def claim(mode: Session, axis: str, error: Callable[[], Exception]) -> None:
    """Records the claim of the call at the user's line, once for each line."""
    line = nearest_line(USER)
    if mode.claims is not None and not any((known.axis, known.line) == (axis, line) for known in mode.claims):
        mode.claims.append(Claim(axis, line, error()))
