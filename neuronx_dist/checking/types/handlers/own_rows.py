"""This rank's rows put among rows that were gathered without a gradient, as contrastive losses do.

The result is equal on all ranks, though it consists of varying parts, and its gradient reaches each rank's rows alone,
as that of `all_gather(S, I)` does. No type of parts says this, so that the operator is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....rules import Rule
from ....rules.names import CATS
from ....spmd.errors import Violation
from ....spmd.tensor_type import note_of
from ....spmd.types import SAME, Shard, V
from ....torch_internals.tensors import base_of_view
from ..judge import Operand

__all__ = ["check_own_rows"]


def check_own_rows(rule: Rule, tensors: Sequence[Tensor], operands: Sequence[Operand]) -> None:
    """Checks that no shard that receives a gradient is put among, or over, pieces of a tensor that all ranks have.

    Raises:
        Violation: one is.
    """
    if rule.name in CATS:
        others = [(operand.type, index) for index, operand in enumerate(operands) if not operand.differentiable]
    elif rule.name == "copy_" and (base := base_of_view(tensors[0])) is not None:
        note = note_of(base)
        others = [(note.type, 0)] if note is not None else []
    else:
        return
    for index, operand in enumerate(operands):
        for axis, spmd_type in operand.type if operand.differentiable else ():
            for type_, other in others if isinstance(spmd_type, Shard) else ():
                held = type_.get(axis)
                if held is not None and (held.base is V or (held.letter in SAME and rule.name == "copy_")):
                    why = (
                        "this rank's rows among rows of a tensor that all ranks have: every rank computes with all of "
                        "them, and its gradient reaches its own"
                    )
                    raise Violation("own_rows", axis, why, [index, other])
