"""Sequences that are cut over the context-parallel ranks: this rank's part of a batch, and the cut seen from it.

    batch = get_batch_on_this_context_parallel_rank(batch, balance="zigzag")     # [b, s] -> [b, s/cp]
    split, documents = split_of_positions(batch["position_ids"])                  # in a layer: how was it cut?

The positions of a part say where it stands: the second function gathers them, one small message, and refuses positions
that are no cut which it knows, on all ranks alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .. import comm
from ..comm.context import AxisLike
from ..comm.rank_selection import in_one_program
from ..torch_internals.fake_tensors import FakeTensor
from ..torch_internals.tensors import version_of
from .context_parallel import Split, split_of
from .positions import Runs, zigzag_order

__all__ = ["get_batch_on_this_context_parallel_rank", "shift_labels", "split_of_positions"]

_IGNORED = -100
Documents = tuple[Runs, ...] | None


def shift_labels(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the batch with `labels`, `[b, s]`, moved one place to the left: the last place is -100."""
    labels = batch.get("labels")
    if labels is None:
        return dict(batch)
    return {**batch, "labels": torch.cat((labels[:, 1:], labels.new_full((labels.shape[0], 1), _IGNORED)), dim=1)}


def get_batch_on_this_context_parallel_rank(
    batch: dict[str, Any], balance: str | None = None, *, axis: AxisLike = "cp"
) -> dict[str, Any]:
    """Returns this rank's part of the sequences, `[b, s]` -> `[b, s/cp]`, with labels shifted and `position_ids`.

    Labels are shifted before the split, so that the last token of a part predicts the first one of the next: the model
    must not shift them again, as a swapped model of `hf.swap` does not, and `global_num_items` counts all of them. On
    one rank the batch is returned as it is, with labels that the model shifts.

    Args:
        batch: tensors `[b, s, ..]`, and others, which stay. `position_ids`, which restart at packed documents, are
            split; without them they count from 0.
        balance: None: rank r gets the r-th of cp contiguous parts; "zigzag": chunks r and 2cp - 1 - r of 2cp, by which
            causal attention is as much work on every rank.

    Raises:
        ValueError: cp, or 2cp, does not divide the sequence.
    """
    size = comm.size(axis)
    if balance not in (None, "zigzag"):
        raise ValueError(f'balance={balance!r} is neither None (contiguous) nor "zigzag"')
    if size == 1:
        return batch
    chunks = 2 * size if balance else size
    rank = comm.rank(axis)
    part, first = {}, None
    for name, value in shift_labels(batch).items():
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] > 1:
            if value.shape[1] % chunks:
                raise ValueError(
                    f"{name} {list(value.shape)}: dim 1 does not divide by {chunks} for {size} context-parallel ranks: "
                    f"pad it to {-(-value.shape[1] // chunks) * chunks}, with labels of -100"
                )
            first = value if first is None else first
            value = _part(value, chunks, rank, balance)
        part[name] = value
    if "position_ids" not in part and first is not None:
        positions = torch.arange(first.shape[1], device=first.device).expand(first.shape[:2])
        part["position_ids"] = _part(positions, chunks, rank, balance)
    return part


def _part(x: torch.Tensor, chunks: int, rank: Any, balance: str | None) -> torch.Tensor:
    pieces = x.chunk(chunks, dim=1)
    return torch.cat((pieces[rank], pieces[chunks - 1 - rank]), 1) if balance else pieces[rank]


# Splits by the positions from which they were derived: all layers of a forward share them. With the version of the
# tensor, which a write in place changes.
_known: Any = WeakTensorKeyDictionary()


def split_of_positions(position_ids: torch.Tensor, axis: AxisLike = "cp") -> tuple[Split, Documents]:
    """Returns how the sequence is split, and its documents, from the positions of this rank's tokens.

    All ranks of the axis call it; the first time for a tensor one all-gather, and a wait of the host for its values.

    Args:
        position_ids: `[b, s/cp]`: they rise by one, and begin with 0 at each packed document.

    Returns:
        The split, and the documents of each row of the batch, or None: each row is one document.

    Raises:
        ValueError: the parts of all ranks are neither a contiguous nor a zig-zag split.
    """
    found, version = _known.get(position_ids), version_of(position_ids)
    if found is None or found[0] != version:
        _known[position_ids] = found = version, _gathered_split(position_ids, axis)
    result: tuple[Split, Documents] = found[1]
    return result


def _gathered_split(position_ids: torch.Tensor, axis: AxisLike) -> tuple[Split, Documents]:
    if in_one_program(position_ids):
        raise ValueError(
            "attention over context-parallel ranks reads position_ids, which have no values in a program of XLA: use "
            "cp=1"
        )
    size, length = comm.size(axis), position_ids.shape[1]
    gathered = comm.all_gather(position_ids.contiguous(), axis, dim=1)
    if gathered.is_meta or isinstance(gathered, FakeTensor):
        return split_of((length,) * size), None
    gathered = gathered.cpu()
    orders: dict[str | None, torch.Tensor] = {None: gathered}
    if length % 2 == 0:
        orders["zigzag"] = torch.empty_like(gathered)
        orders["zigzag"][:, zigzag_order(size * length, size)] = gathered
    for balance, positions in orders.items():
        starts = positions == 0
        if bool(starts[:, 0].all()) and bool((starts[:, 1:] | (positions.diff(dim=1) == 1)).all()):
            bounds = [[*row.nonzero().flatten().tolist(), size * length] for row in starts]
            documents = tuple(tuple(zip(row, row[1:])) for row in bounds)
            several = any(len(row) > 1 for row in documents)
            same = len({*documents}) == 1
            return split_of((length,) * size, balance), (documents[:1] if same else documents) if several else None
    raise ValueError(
        f"position_ids of {size} context-parallel ranks, {_shown(gathered[0], length)} in row 0, are no split of a "
        'sequence: they must rise by one from 0, or from 0 at each packed document, in contiguous parts or in "zigzag" '
        "order: split the batch by get_batch_on_this_context_parallel_rank"
    )


def _shown(positions: torch.Tensor, length: int) -> str:
    return ", ".join(f"{int(part[0])}..{int(part[-1])}" for part in positions.split(length))
