"""Shards that `all_gather(src=V)` stacked: the place of the dim of ranks for a global tensor.

The pieces of dim d are in the right order where the dim of ranks is merged with d, outside of it. Until then both dims
are followed, on the note of the tensor (`Stacked`), by the label specs of the calls. Merged with another dim the pieces
are in another order, which is refused; a merge without labels (a loop over the ranks) stays an assumption.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ....call_site import call_site
from ....rules import Rule
from ....rules.spec import Spec
from ....spmd.errors import SpmdTypeError
from ....spmd.tensor_type import Note, Stacked
from ..messages.explain import shown
from ..messages.provenance import name_operands

__all__ = ["stacked_note"]


def stacked_note(
    rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor], notes: Sequence[Note]
) -> Stacked | None:
    """`Note.extra` for stacked pieces, of a call's result.

    Raises:
        SpmdTypeError: the call merges the pieces in another order than that of the sharding.
    """
    for index, note in enumerate(notes):
        if isinstance(note.extra, Stacked) and rule.spec is not None:
            return _after(rule, rule.spec(*args, **kwargs), index, tensors[index], note, note.extra)
    return None


def _after(rule: Rule, spec: Spec, index: int, x: Tensor, note: Note, stacked: Stacked) -> Stacked | None:
    dims = spec.ins[index] if index < len(spec.ins) else None
    if dims is None or not spec.outs or len(dims[stacked.ranks]) != 1 or not dims[stacked.dim]:
        return None
    rank, piece = dims[stacked.ranks][0], dims[stacked.dim][0]
    out = spec.outs[0]
    ranks = next((d for d, factors in enumerate(out) if rank in factors), None)
    dim = next((d for d, factors in enumerate(out) if piece in factors), None)
    if ranks is None or dim is None:  # one of them ends here: picked, summed
        return None
    wide = [label for label in out[ranks] if spec.sizes[label] != 1 or label == piece]
    if wide == [rank]:
        return Stacked(stacked.axes, ranks, dim) if out[dim][0] == piece else None
    after = wide.index(rank) + 1
    if after < len(wide) and wide[after] == piece:  # the whole
        return None
    axes, before = stacked.axes, stacked.dim - (stacked.ranks < stacked.dim)
    name = name_operands([x])[0].code
    moved = f"{name}.movedim({stacked.ranks}, {before})" if stacked.ranks != before else name
    raise SpmdTypeError(
        f"{rule.name}({shown(x, note.type)}) at {call_site()}",
        f"dim {stacked.ranks} is the ranks of {axes}, whose pieces of dim {stacked.dim} are stacked; merging it with "
        "another dim puts the pieces in another order than the sharding: first move it directly before that dim",
        repairs=[
            f"{moved}.flatten({before}, {before + 1})",
            f'spmd.all_gather(piece, "{axes}", src=spmd.S({before}), dst=...), which puts them together in order',
        ],
        axis=axes.split(",")[0],
        rule="order",
    )
