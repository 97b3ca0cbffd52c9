"""A vocabulary of which each rank has a shard: embedding rows, checks of ids, padded columns of logits.

A vocabulary of 5 ids over tp=2 is padded to 6: rank 1 has the columns 3, 4 and one of no id, at the end.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function_unary

from .. import comm, spmd
from ..comm.context import AxisLike
from ..comm.ranks.rank_numbers import concrete
from ..comm.verbs.compiled import ordered_operator
from ..comm.verbs.transformed_tensors import transforming, whole_batch
from ..spmd import P, V
from ..spmd.watching import see_through

__all__ = ["check_ids", "embedding", "hide_padding", "local_positions", "padded_vocabulary"]


def padded_vocabulary(size: int, tp: int) -> int:
    """The next multiple of tp."""
    return -(-size // tp) * tp


def hide_padding(logits: torch.Tensor, vocabulary: int, axis: AxisLike = "tp") -> torch.Tensor:
    """Writes -inf into the columns of `[.., padded/tp]` that are no ids, in place. Returns the logits.

    Such a logit never wins, and adds nothing to a softmax. Autograd does not see it, and need not: whatever is finite
    with them has no gradient there.

    Raises:
        ValueError: these logits are no shard of a padded vocabulary.
    """
    size = comm.communicator(axis).size
    if vocabulary % size == 0:
        return logits
    columns = padded_vocabulary(vocabulary, size) // size
    if logits.shape[-1] != columns:
        raise ValueError(
            f"logits {list(logits.shape)} must have {columns} columns: the shard of a vocabulary of {vocabulary} "
            f"over {size} ranks, padding included"
        )
    if has_torch_function_unary(logits):
        result: torch.Tensor = handle_torch_function(hide_padding, (logits,), logits, vocabulary, axis)
        return result
    return _hide_padding(logits, vocabulary, axis)


def _hide_padding(logits: torch.Tensor, vocabulary: int, axis: AxisLike) -> torch.Tensor:
    communicator, columns = comm.communicator(axis), logits.shape[-1]
    padding = padded_vocabulary(vocabulary, communicator.size) - vocabulary
    width = min(padding, columns)  # the others are no padding on any rank

    def hide(logits: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(columns - width, columns, device=logits.device) + communicator.coordinate(logits) * columns
        logits.narrow(-1, columns - width, width).masked_fill_(ids >= vocabulary, -math.inf)
        return logits

    with torch.no_grad():
        spmd.local_map(hide, out_types={communicator: spmd.S(logits.dim() - 1)})(logits)
    return logits


see_through(hide_padding, _hide_padding)


def check_ids(ids: torch.Tensor, vocabulary: int, ignore_index: int | None, name: str) -> None:
    """Checks that ids are in `0..vocabulary - 1`, or are `ignore_index`. It reads values: for tensors on the CPU.

    Raises:
        IndexError: one is not; the message begins with `name`.
    """
    if is_dynamo_compiling():
        _operator(ids, vocabulary, ignore_index, name)
    else:
        _check(ids, vocabulary, ignore_index, name)


@spmd.no_typecheck()  # each rank looks at its own
def _check(ids: torch.Tensor, vocabulary: int, ignore_index: int | None, name: str) -> None:
    if transforming():
        ids = whole_batch(ids)
    wrong = (ids < 0) | (ids >= vocabulary)
    if ignore_index is not None:
        wrong &= ids != ignore_index
    if wrong.any():
        ignored = f" and is not ignore_index={ignore_index}" if ignore_index is not None else ""
        raise IndexError(f"{name} {ids[wrong][0].item()} is outside the vocabulary of {vocabulary}{ignored}")


_operator = ordered_operator(
    "check_ids(Tensor ids, int vocabulary, int? ignore_index, str name) -> ()", _check, lambda *arguments: None
)


def local_positions(
    ids: torch.Tensor, size: int, axis: AxisLike, first: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns positions of ids in this rank's shard, 0 for ids elsewhere, and the mask of ids elsewhere: V.

    Args:
        size: of this rank's shard.
        first: the id at which it begins; None: shards have equal sizes.
    """
    start = comm.communicator(axis).coordinate(ids) * size if first is None else first
    local = spmd.trust(ids - start, axis, V)
    elsewhere = (local < 0) | (local >= size)
    return local.masked_fill(elsewhere, 0), elsewhere


def embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    *,
    axis: AxisLike,
    sparse: bool = False,
) -> torch.Tensor:
    """Returns the rows of the ids that this rank holds, zeros for other ids: P.

    Args:
        input: R, ids in the whole table.
        weight: S(0), `[rows/n, width]`.
        padding_idx: from 0; this row gets no gradient.
    """
    count = weight.shape[0]
    local, elsewhere = local_positions(input, count, axis)
    padding, rank = None, comm.communicator(axis).coordinate(input) if padding_idx is not None else None
    if padding_idx is not None and isinstance(rank, int):
        padding = padding_idx - concrete(rank) * count
        padding = padding if 0 <= padding < count else None
    rows = F.embedding(local, weight, padding, sparse=sparse)
    if padding_idx is not None and not isinstance(rank, int):  # which rank has the row is no constant here
        rows = torch.where((input == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return spmd.trust(rows.masked_fill_(elsewhere.unsqueeze(-1), 0.0), axis, P)
