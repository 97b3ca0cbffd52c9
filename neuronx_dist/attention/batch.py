"""Sequences that are cut over the context-parallel ranks: this rank's part of a batch, and the cut seen from it.

    batch = get_batch_on_this_context_parallel_rank(batch, balance="zigzag")     # [b, s] -> [b, s/cp]
    split, documents = split_of_positions(batch["position_ids"])                  # in a layer: how was it cut?

The positions of a part say where it stands: the second function gathers them, one small message, and refuses positions
that are no cut which it knows, on all ranks alike. All checks here have one result on all ranks: a rank that raised an
error alone would leave the others waiting.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch.utils.data import get_worker_info
from torch.utils.weak import WeakTensorKeyDictionary

from .. import comm, spmd
from ..comm.context import AxisLike
from ..comm.rank_selection import in_one_program
from ..torch_internals.fake_tensors import FakeTensor
from ..torch_internals.tensors import version_of
from .context_parallel import Split, split_of
from .positions import Runs, zigzag_order

__all__ = [
    "forget_split",
    "get_batch_on_this_context_parallel_rank",
    "is_part_for",
    "labels_are_shifted",
    "padding_was_left_out",
    "shift_labels",
    "split_batch",
    "split_of_positions",
]

_IGNORED = -100
_parts: Any = WeakTensorKeyDictionary()  # tensors of parts: one that is split again would lose tokens
_BALANCES, _PADDED = "context_parallel_balances", "context_parallel_padding"  # in the extras of a context
_MODES = "context_parallel_modes"  # there too: whether batches were split for causal models
_SEQUENCES = ("input_ids", "inputs_embeds", "labels", "position_ids")  # the first one has the length
Documents = tuple[Runs, ...] | None


def shift_labels(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the batch with `labels`, `[b, s]`, moved one place to the left: the last place is -100.

    Raises:
        ValueError: labels are not `[b, s]`.
    """
    labels = batch.get("labels")
    if labels is None:
        return dict(batch)
    if labels.dim() != 2:
        raise ValueError(f"labels {list(labels.shape)} must be [batch, sequence], a label for each token")
    return {**batch, "labels": torch.cat((labels[:, 1:], labels.new_full((labels.shape[0], 1), _IGNORED)), dim=1)}


def get_batch_on_this_context_parallel_rank(
    batch: dict[str, Any], balance: str | None = None, *, causal: bool = True, axis: AxisLike = "cp"
) -> dict[str, Any]:
    """Returns this rank's part of the sequences, `[b, s]` -> `[b, s/cp]`, with labels shifted and `position_ids`.

    Labels are shifted before the split, so that the last token of a part predicts the first one of the next: the model
    must not shift them again, as a swapped model of `hf.swap` does not, and `global_num_items` counts all of them. On
    one rank the batch is returned as it is, with labels that the model shifts.

    Args:
        batch: equal on all ranks of the axis, which is checked for the first one. Tensors `[b, s, ..]`, with the s of
            `input_ids` (else `inputs_embeds`, `labels`, `position_ids`), are split, others stay. `position_ids`,
            `[b, s]`, restart at packed documents; without them they count from 0. An `attention_mask` of ones, or of
            padding on the right, is left out: causal attention shows padding to nobody, whose labels are to be -100.
        balance: None: rank r gets the r-th of cp contiguous parts; "zigzag": chunks r and 2cp - 1 - r of 2cp, by which
            causal attention is as much work on every rank.
        causal: False for masked language models, whose labels are those of their places: they are not shifted, and
            padding on the right becomes a document of its own, which no other token sees.

    Raises:
        ValueError: cp, or 2cp, does not divide the sequence; a mask hides tokens before others, or with labels; ranks
            have different batches; the call is in a worker of a data loader; tensors that are not of one sequence.
    """
    size = comm.size(axis)
    if balance not in (None, "zigzag"):
        raise ValueError(f'balance={balance!r} is neither None (contiguous) nor "zigzag"')
    if size == 1:
        return batch
    if causal and not comm.current().extras.get(_BALANCES):
        _refuse_shifted_labels(batch)
    return split_batch(_without_mask(batch, size, causal), balance, axis, causal)


def _without_mask(batch: dict[str, Any], size: int, causal: bool) -> dict[str, Any]:
    """Returns the batch without its mask; positions of padding count on, or begin with 0 if it is to be hidden."""
    mask = batch.get("attention_mask")
    batch = {name: value for name, value in batch.items() if name != "attention_mask"}
    if mask is not None and mask.dim() == 4:
        raise ValueError(
            f"attention_mask {list(mask.shape)} is one of pairs of tokens, but attention over {size} context-parallel "
            "ranks reads no mask: pass [batch, sequence], padded on the right, or position_ids of packed documents"
        )
    if mask is None or not _has_values(mask) or bool((mask == 1).all()):
        return batch
    hidden = mask == 0
    padded = mask.dim() == 2 and bool((hidden | (mask == 1)).all() and (hidden[:, 1:] >= hidden[:, :-1]).all())
    if not padded:
        raise ValueError(
            f"attention_mask {list(mask.shape)} hides {int((mask != 1).sum())} tokens, some before others that it "
            f"shows, but attention over {size} context-parallel ranks reads no mask: pad on the right "
            '(tokenizer.padding_side = "right"), with labels of -100, or pack documents, with position_ids that restart'
        )
    labels, positions = batch.get("labels"), batch.get("position_ids")
    if labels is not None and labels.shape == mask.shape and bool((labels[hidden] != _IGNORED).any()):
        raise ValueError(
            f"attention_mask {list(mask.shape)} hides {int(hidden.sum())} tokens, of which "
            f"{int((labels[hidden] != _IGNORED).sum())} have labels: over {size} context-parallel ranks padding has no "
            "part in the loss: set labels[attention_mask == 0] = -100"
        )
    places = torch.arange(mask.shape[1], device=mask.device)
    positions = places.expand(mask.shape) if positions is None else positions
    if positions.shape == mask.shape:
        shown = (~hidden).sum(1, keepdim=True)
        last = (shown - 1).clamp(min=0)
        after = places - last + positions.gather(1, last) if causal else places - shown
        batch["position_ids"] = torch.where(hidden, after, positions)
    comm.current().extras[_PADDED] = True
    return batch


def is_part_for(causal: bool, x: torch.Tensor) -> bool | None:
    """Returns whether a tensor was split for models that are causal, or not; None: no batch of this mesh was split.

    A tensor that was copied since, to a device, counts as one of any batch of this mesh.
    """
    modes: set[bool] = comm.current().extras.get(_MODES, set())
    known: bool | None = _parts.get(x)
    return causal in (modes if known is None else {known}) if modes else None


def padding_was_left_out() -> bool:
    """Returns whether a batch of this mesh had padding, whose mask the model does not get."""
    return bool(comm.current().extras.get(_PADDED))


def _refuse_shifted_labels(batch: dict[str, Any]) -> None:
    """Refuses labels `[b, s]` of which each is the token after its place: the split shifts them."""
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if ids is None or labels is None or ids.shape != labels.shape or ids.dim() != 2 or not _has_values(labels):
        return
    valid = labels != _IGNORED
    ahead = valid[:, :-1]
    is_next = ahead.any() & (labels[:, :-1] == ids[:, 1:])[ahead].all()
    if bool(is_next & ~(labels == ids)[valid].all()):
        raise ValueError(
            "each label is the token after its place in input_ids: get_batch_on_this_context_parallel_rank shifts "
            "labels itself, so pass those of transformers, equal to input_ids where a token is to be predicted"
        )


def split_batch(batch: dict[str, Any], balance: str | None, axis: AxisLike, causal: bool = True) -> dict[str, Any]:
    """Returns this rank's part of a batch, masks included, as `get_batch_on_this_context_parallel_rank`."""
    if get_worker_info() is not None:
        raise ValueError(
            "get_batch_on_this_context_parallel_rank in a worker of a data loader cannot compare the batch with those "
            "of other ranks: call it in the training loop, or use DataLoader(num_workers=0)"
        )
    size, rank = comm.size(axis), comm.rank(axis)
    chunks = 2 * size if balance else size
    if again := [name for name, x in batch.items() if isinstance(x, torch.Tensor) and x in _parts]:
        raise ValueError(f"{', '.join(again)} of the batch are parts of sequences already: split each batch once")
    named = {name: batch[name] for name in _SEQUENCES if isinstance(batch.get(name), torch.Tensor)}
    if not named:
        raise ValueError(
            f"batch of {', '.join(batch)} has no tensor {' or '.join(_SEQUENCES)}, whose dim 1 is split: name one so"
        )
    first = next(iter(named.values()))
    for name, value in named.items():
        dims = 3 if name == "inputs_embeds" else 2
        if value.dim() != dims or value.shape[1] != first.shape[1]:
            raise ValueError(
                f"{name} {list(value.shape)} must have {dims} dims, and in dim 1 the sequence of {next(iter(named))} "
                f"{list(first.shape)}, to be split over {size} context-parallel ranks"
            )
    length = first.shape[1]
    if length % chunks:
        raise ValueError(
            f"{next(iter(named))} {list(first.shape)}: dim 1 does not divide by {chunks} for {size} context-parallel "
            f"ranks: pad it to {-(-length // chunks) * chunks}, with labels of -100"
        )
    _refuse_different_batches(batch, balance, axis)
    comm.current().extras.setdefault(_BALANCES, set()).add(balance)
    comm.current().extras.setdefault(_MODES, set()).add(causal)
    whole = shift_labels(batch) if causal else dict(batch)
    if whole.get("position_ids") is None:
        whole["position_ids"] = torch.arange(length, device=first.device).expand(first.shape[:2])
    for name, x in whole.items():
        if isinstance(x, torch.Tensor) and x.shape[1:2] == (length,):
            whole[name] = part = _part(x, chunks, rank, balance)
            _parts[part] = causal
    return whole


def _has_values(x: torch.Tensor) -> bool:
    return not (x.is_meta or isinstance(x, FakeTensor) or in_one_program(x))


def _texts_of_ranks(topic: str, statement: Any, axis: AxisLike) -> list[tuple[int, Any]] | None:
    """Returns the statement of each rank of the axis, without a collective; None: ranks are played one by one."""
    board, ranks = comm.current().backend.board, comm.communicator(axis).ranks
    if board is None:
        return None
    values = board.exchange_values(f"the {topic} of context-parallel ranks {ranks[0]}", statement, ranks)
    return [*values.items()]


@spmd.no_typecheck()  # each rank reads its own tensors
def _refuse_different_batches(batch: dict[str, Any], balance: str | None, axis: AxisLike) -> None:
    """Compares the first batch of this mesh over the ranks of the axis, which must all have the same."""
    context = comm.current()
    tensors = {name: x for name, x in batch.items() if isinstance(x, torch.Tensor) and _has_values(x)}
    if context.extras.get(_BALANCES) or context.backend.board is None or len(tensors) == 0:
        return
    statement: dict[str, Any] = {"balance": [balance, 0]}
    for name, x in tensors.items():  # float tensors, which ranks may round differently, by their shapes
        values = "" if x.is_floating_point() else str(x.cpu().tolist())
        statement[name] = [f"{list(x.shape)} {values[:30]}", zlib.crc32(values.encode())]
    said = _texts_of_ranks("first batch", statement, axis) or [(0, statement)]
    rank, mine = said[0]
    for other, of_other in said[1:]:
        for name in {**mine, **of_other}:
            one, two = mine.get(name, ["none", 0]), of_other.get(name, ["none", 0])
            if one != two:
                raise ValueError(
                    f"ranks {rank} and {other} have parts of the same sequences, but different {name} in the first "
                    f"batch: {one[0]}.. and {two[0]}... Divide the data by "
                    "neuronx_dist.parallel_state.get_data_parallel_rank(), as in DistributedSampler(data, "
                    "num_replicas=get_data_parallel_size(), rank=get_data_parallel_rank()), seed equally, and use one "
                    "balance; in spmd.check(numeric=True) pass a function that makes the inputs"
                )


@spmd.no_typecheck()
def labels_are_shifted(
    input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor, axis: AxisLike = "cp"
) -> bool | None:
    """Returns whether labels of a part are those of the next tokens, the same on all ranks; None: it does not show.

    All ranks call it. The host waits for the values.
    """
    if not (_has_values(labels) and _has_values(input_ids) and labels.shape == input_ids.shape):
        return None
    valid = labels != _IGNORED
    equal = bool((input_ids[valid] == labels[valid]).all())
    followed = (position_ids.diff(dim=1) == 1) & (input_ids.diff(dim=1) != 0)  # by another token of this rank's
    said = _texts_of_ranks("labels", [equal, bool((followed & valid[:, :-1]).any())], axis)
    if said is None or not all(of_rank[0] for _, of_rank in said):
        return None if said is None else True
    return False if any(of_rank[1] for _, of_rank in said) else None


def _part(x: torch.Tensor, chunks: int, rank: Any, balance: str | None) -> torch.Tensor:
    pieces = x.chunk(chunks, dim=1)
    return torch.cat((pieces[rank], pieces[chunks - 1 - rank]), 1) if balance else pieces[rank].contiguous()


# Splits by the positions from which they were derived: all layers of a forward share them. With the version of the
# tensor, which a write in place changes; tensors of inference mode have none.
_known: Any = WeakTensorKeyDictionary()


def forget_split(position_ids: torch.Tensor) -> None:
    """Makes `split_of_positions` read the values anew: memory may be written without a trace, by numpy or `.data`."""
    _known.pop(position_ids, None)


def split_of_positions(position_ids: torch.Tensor, axis: AxisLike = "cp") -> tuple[Split, Documents]:
    """Returns how the sequence is split, and its documents, from the positions of this rank's tokens.

    All ranks of the axis call it; the first time for a tensor one all-gather, and a wait of the host for its values.

    Args:
        position_ids: `[b, s/cp]`: they rise by one, and begin with 0 at each packed document.

    Returns:
        The split, and the documents of each row of the batch, or None: each row is one document.

    Raises:
        ValueError: the parts of all ranks are neither a contiguous nor a zig-zag split, or could be both, with
            different documents, and `get_batch_on_this_context_parallel_rank` was called for neither, or for both.
    """
    found, version = _known.get(position_ids), -1 if position_ids.is_inference() else version_of(position_ids)
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
    orders: dict[str | None, torch.Tensor] = {None: torch.arange(size * length)}  # the column of each token
    if length % 2 == 0:
        orders["zigzag"] = zigzag_order(size * length, size).argsort()
    readings: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}
    for balance, columns in orders.items():
        positions = gathered[:, columns]
        starts = positions == 0
        if bool(starts[:, 0].all()) and bool((starts[:, 1:] | (positions.diff(dim=1) == 1)).all()):
            before = torch.where(starts, -1, columns.roll(1))  # the column of the token before it in its document
            readings[balance] = starts, before[:, columns.argsort()]
    if len(readings) > 1 and not torch.equal(*(before for _, before in readings.values())):
        readings = {balance: readings[balance] for balance in _only_balance(gathered, length, size)}
    for balance, (starts, _) in readings.items():
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


def _only_balance(gathered: torch.Tensor, length: int, size: int) -> set[str | None]:
    balances: set[str | None] = comm.current().extras.get(_BALANCES, set())
    if len(balances) != 1:
        calls = f"called with balance={sorted(map(str, balances))}" if balances else "not called on this rank"
        raise ValueError(
            f"position_ids of {size} context-parallel ranks, {_shown(gathered[0], length)} in row 0, can be contiguous "
            'parts or "zigzag" order, of different documents, and get_batch_on_this_context_parallel_rank, which says '
            f"which, was {calls}: split all batches by it, with one balance"
        )
    return balances


def _shown(positions: torch.Tensor, length: int) -> str:
    return ", ".join(f"{int(part[0])}..{int(part[-1])}" for part in positions.split(length))
