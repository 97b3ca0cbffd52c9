"""`ring_attention` and `ulysses_attention`: attention of sequences that are cut over the context-parallel ranks.

    ring        keys and values go around, forward once and backward twice; any number of heads (arXiv:2310.01889)
    ulysses     each rank gets heads/cp of the complete sequence by an all-to-all, and back (arXiv:2309.14509)
    both        u adjacent ranks divide their heads, and keys go around the cp/u groups (arXiv:2405.07719)

Per rank, of `row` elements of a key and its value over batch and heads, and s tokens in all:

    | | forward | backward |
    | --- | --- | --- |
    | ring | cp - 1 messages of `row * s/cp` | 2 (cp - 1) messages of `row * s/cp` |
    | ring, blocks that a window or documents hide | fewer messages | twice as many |
    | ulysses | 1 all-to-all of q, k, v, 1 of the output | the same |
    | both | 1 all-to-all of q, k, v, cp/u - 1 messages of `row * s/cp`, 1 all-to-all | the same, twice the messages |

A degree u stands for all three in this file: 1 is the ring, cp is Ulysses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import comm, spmd
from ..comm.context import AxisLike
from ..mesh import part_of
from ..spmd.local_code import axes_along
from ..spmd.tensor_type import TensorType
from ..spmd.types import Shard, V
from ..spmd.watching import active
from .positions import Runs, joined, zigzag_runs
from .ring import Keys, attention, ring_steps

__all__ = ["Split", "attend", "parts_of_axis", "ring_attention", "split_of", "traffic", "ulysses_attention"]


class Split(NamedTuple):
    """The positions of the rows of each rank in the sequence, by rank."""

    positions: tuple[Runs, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in runs) for runs in self.positions)


def split_of(lengths: Sequence[int], balance: str | None = None) -> Split:
    """Returns the positions of each rank's rows.

    Args:
        lengths: rows of each rank.
        balance: None: each rank has one run of the sequence; "zigzag": rank r of n has chunks r and 2n - 1 - r of 2n,
            so that all ranks compute as many scores under a causal mask.

    Raises:
        ValueError: the lengths are not those of zig-zag chunks, or there is no such balance.
    """
    ranks = len(lengths)
    if balance == "zigzag":
        runs = zigzag_runs(sum(lengths), ranks)
        split = Split(tuple(runs[2 * rank : 2 * rank + 2] for rank in range(ranks)))
        if split.lengths != tuple(lengths):
            raise ValueError(
                f'balance="zigzag" of {sum(lengths)} tokens over {ranks} ranks has {list(split.lengths)} tokens a '
                f"rank, not {list(lengths)}: split by get_batch_on_this_context_parallel_rank, or pad to a multiple of "
                f"{2 * ranks}"
            )
        return split
    if balance is not None:
        raise ValueError(f'balance={balance!r} is neither None (contiguous) nor "zigzag"')
    bounds = [sum(lengths[:rank]) for rank in range(ranks + 1)]
    return Split(tuple(((start, stop),) for start, stop in zip(bounds, bounds[1:])))


def _documents_of(cu_seqlens: Any, length: int) -> tuple[Runs, ...]:
    """Returns the documents of packed sequences from their bounds, as `[0, 120, 512]`: one list, or one a batch row.

    Raises:
        ValueError: the bounds do not rise from 0 to the length of the sequence.
    """
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else list(cu_seqlens)
    rows = bounds if bounds and isinstance(bounds[0], (list, tuple)) else [bounds]
    for row in rows:
        if len(row) < 2 or row[0] != 0 or row[-1] != length or any(a > b for a, b in zip(row, row[1:])):
            raise ValueError(
                f"cu_seqlens {list(row)} must rise from 0 to {length}, the tokens of all ranks: pass the bounds of the "
                "documents in the complete sequence, equal on all ranks"
            )
    return tuple(tuple((int(a), int(b)) for a, b in zip(row, row[1:]) if a < b) for row in rows)


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    cu_seqlens: Any = None,
    balance: str | None = None,
    lengths: Sequence[int] | None = None,
    axis: AxisLike = "cp",
) -> torch.Tensor:
    """Computes attention of this rank's tokens to those of all ranks, `[b, heads, s/cp, ev]`, exact.

    Keys and values go around the ranks; the next block travels while one is computed.

    Args:
        q: `[b, heads, s/cp, e]`, of this rank.
        k, v: `[b, kv heads, s/cp, e or ev]`; `heads` is a multiple of `kv heads`.
        causal: a token sees those before it and itself; False: all.
        scale: of the scores; None: `e ** -0.5`.
        window: a token sees the last `window` tokens, itself included; None: all. Needs `causal`.
        sinks: `[heads]`, a learned score for each head of a key without a value (gpt-oss); None: none.
        cu_seqlens: bounds of packed documents in the complete sequence, `[0, 120, 512]`, equal on all ranks, or such a
            list for each row of the batch: a token sees its document only. None: one document. The ranks are compared
            at the first call; later different ones give wrong results, or ranks that wait forever.
        balance: how the sequence was split: None: contiguous parts, in the order of ranks; "zigzag", as by
            `get_batch_on_this_context_parallel_rank(batch, balance="zigzag")`.
        lengths: tokens of each rank; None: as many as this rank has.
        axis: over which the sequence is split; of one rank: attention in this process.

    Raises:
        ValueError: sizes that do not go together; the message has them.
    """
    split, documents = _split(q, cu_seqlens, balance, lengths, axis)
    options: dict[str, Any] = dict(causal=causal, scale=scale, window=window, sinks=sinks, axis=axis)
    return attend(1, q, k, v, split, documents, **options)


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    cu_seqlens: Any = None,
    balance: str | None = None,
    lengths: Sequence[int] | None = None,
    degree: int | None = None,
    axis: AxisLike = "cp",
) -> torch.Tensor:
    """Computes `ring_attention` by heads: each rank attends with heads/cp of them to the complete sequence.

    Key/value heads that the ranks do not divide are repeated before they are sent.

    Args:
        degree: adjacent ranks that divide the heads among them, a divisor of the axis: keys of their heads go around
            the groups of so many ranks, as in `ring_attention`. None: all ranks of the axis, without a ring.

    Raises:
        ValueError: the degree does not divide the heads of q, or the ranks; or as `ring_attention`.
    """
    split, documents = _split(q, cu_seqlens, balance, lengths, axis)
    options: dict[str, Any] = dict(causal=causal, scale=scale, window=window, sinks=sinks, axis=axis)
    return attend(comm.size(axis) if degree is None else degree, q, k, v, split, documents, **options)


def parts_of_axis(degree: int, axis: AxisLike = "cp") -> tuple[AxisLike | None, AxisLike | None]:
    """Returns the axes over which heads are divided, and keys go around; None: one rank.

    Creates the communicators, for which all ranks of the job call it the first time.

    Raises:
        ValueError: the degree does not divide the ranks, or divides those of an axis that has no named parts.
    """
    size = comm.size(axis)
    if degree < 1 or size % degree:
        raise ValueError(
            f"attention over {axis}: ulysses degree {degree} does not divide {size} ranks: choose one of "
            f"{[n for n in range(1, size + 1) if size % n == 0]}"
        )
    if degree in (1, size):
        return (axis, None) if degree > 1 else (None, axis if size > 1 else None)
    if not isinstance(axis, str) or not part_of(axis).is_whole:
        raise ValueError(
            f"attention over {axis!r}: ulysses degree {degree} of {size} ranks needs an axis of the mesh by its name, "
            'as "cp", whose parts have names too: pass such an axis, or degree=None'
        )
    parts = f"{axis}%{degree}", f"{axis}/{degree}"
    for part in parts:
        comm.communicator(part)
    return parts


def attend(
    degree: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    split: Split,
    documents: tuple[Runs, ...] | None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    axis: AxisLike = "cp",
) -> torch.Tensor:
    """Computes attention of a sequence that is split in a known way, with known documents.

    Args:
        degree: adjacent ranks that divide the heads; 1: ring attention; all of the axis: Ulysses.

    Raises:
        ValueError: as `ring_attention`, `ulysses_attention`.
    """
    if (
        not q.dim() == k.dim() == v.dim() == 4
        or k.shape[:3] != v.shape[:3]
        or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:])
        or q.shape[1] % max(k.shape[1], 1)
    ):
        raise ValueError(
            f"attention over {axis}: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} must be [batch, heads, "
            "tokens, features] of this rank, with equal batch and tokens, k with the features of q and the heads of v, "
            "and heads of q a multiple of those of k"
        )
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(
            f"attention over {axis}: sinks {list(sinks.shape)} must be [{q.shape[1]}], one score for each head of q "
            f"{list(q.shape)}"
        )
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window={window} must be at least 1, with causal=True: leave it out to see all tokens")
    if documents is not None and len(documents) not in (1, q.shape[0]):
        raise ValueError(f"cu_seqlens has {len(documents)} lists for a batch of {q.shape[0]}: pass one, or one a row")
    of_heads, of_keys = parts_of_axis(degree, axis)
    if q.shape[1] % degree:
        raise ValueError(
            f"ulysses_attention: {q.shape[1]} heads of q {list(q.shape)} cannot be divided among {degree} ranks of "
            f"{axis}: use ring_attention, or choose the ranks from "
            f"{[n for n in range(1, q.shape[1] + 1) if q.shape[1] % n == 0]}"
        )
    first = int(comm.rank(axis)) // degree * degree
    rows = split.lengths[first : first + degree]
    keys = _keys_of_groups(split, degree, first // degree, causal, window, documents)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    function = partial(attention, keys=keys, axis=of_keys, sinks=sinks, scale=scale)
    if of_heads is not None:
        function = partial(_by_heads, keys=keys, axis=of_heads, rows=rows, ring=of_keys, sinks=sinks, scale=scale)
    return _declared(axis, function)(q, k, v)


def _keys_of_groups(
    split: Split, degree: int, group: int, causal: bool, window: int | None, documents: tuple[Runs, ...] | None
) -> Keys:
    """Returns the keys of groups of `degree` ranks, as the ranks of one group see them."""
    starts = range(0, len(split.positions), degree)
    sizes = tuple(sum(split.lengths[start : start + degree]) for start in starts)
    if not causal and documents is None:
        return Keys(sizes)
    positions = tuple(joined(split.positions[start : start + degree]) for start in starts)
    return Keys(sizes, False, positions[group], positions, causal, window, documents)


def traffic(
    degree: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    split: Split,
    documents: tuple[Runs, ...] | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
) -> tuple[int, int]:
    """Counts the elements that the first rank sends in `attend`, forward and backward, and its messages.

    An all-to-all counts as one message. Equal on all ranks, whose parts may be of different lengths.
    """
    keys = _keys_of_groups(split, degree, 0, causal, window, documents)
    hops = 3 * (ring_steps(keys) - 1)  # once in forward, twice in backward
    row = k.shape[1] * _repeats(q.shape[1], k.shape[1], degree) * (k.shape[3] + v.shape[3])
    heads = q.shape[1] * (q.shape[3] + v.shape[3])
    exchanged = 2 * (heads + row) * (degree - 1) // degree
    messages = 0 if degree == 1 else 4 if q.shape[3] == v.shape[3] else 8
    return q.shape[0] * split.lengths[0] * (hops * row + exchanged), hops + messages


def _repeats(heads: int, kv_heads: int, degree: int) -> int:
    """Returns how often each key/value head is repeated, for the ranks to divide them."""
    if kv_heads % degree == 0:
        return 1
    return degree // kv_heads if degree % kv_heads == 0 else heads // kv_heads


def _by_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: Keys,
    axis: AxisLike,
    rows: tuple[int, ...],
    ring: AxisLike | None,
    sinks: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Computes attention by the heads of each rank of `axis`, whose ranks have `rows` tokens; keys go around `ring`."""
    size = len(rows)
    if (repeats := _repeats(q.shape[1], k.shape[1], size)) > 1:
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    longest, rank = max(rows), int(comm.rank(axis))
    by_rank = [x.unflatten(1, (size, -1)) for x in (q, k, v)]  # [b, size, heads/size, s/cp, e]
    parts = [x.shape[2] for x in by_rank]
    if q.shape[3] == v.shape[3]:  # one message
        by_rank = [torch.cat(by_rank, 2)]
    of_heads = None if sinks is None else sinks.chunk(size)[rank]

    messages = [_padded(x.flatten(1, 2), longest) for x in by_rank]
    moved = [spmd.all_to_all(x, axis, src=spmd.S(2), dst=spmd.S(1)) for x in messages]
    complete = [_complete(x, rows) for x in moved]
    q_, k_, v_ = complete if len(complete) > 1 else complete[0].split(parts, 1)
    out = attention(q_, k_, v_, keys, ring, sinks=of_heads, scale=scale)
    if len({*rows}) > 1:
        out = torch.cat([_padded(part, longest) for part in out.split(rows, 2)], 2)
    return spmd.all_to_all(out, axis, src=spmd.S(1), dst=spmd.S(2)).narrow(2, 0, q.shape[2])


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x if x.shape[2] == rows else torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[2]))


def _complete(x: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    """Drops the padding between the parts of the sequence."""
    if len({*rows}) == 1:
        return x
    longest = max(rows)
    return torch.cat([x.narrow(2, rank * longest, count) for rank, count in enumerate(rows)], 2)


def _split(
    q: torch.Tensor, cu_seqlens: Any, balance: str | None, lengths: Sequence[int] | None, axis: AxisLike
) -> tuple[Split, tuple[Runs, ...] | None]:
    """Returns the split and the documents that a user describes."""
    size = comm.size(axis)
    rows = (q.shape[2],) * size if lengths is None else tuple(lengths)
    if len(rows) != size or rows[int(comm.rank(axis))] != q.shape[2]:
        raise ValueError(
            f"lengths={list(rows)} must have the tokens of each of {size} ranks of {axis}, and this one, "
            f"{int(comm.rank(axis))}, has {q.shape[2]}"
        )
    documents = None if cu_seqlens is None else _documents_of(cu_seqlens, sum(rows))
    _compare_first(comm.communicator(axis), {"lengths": rows, "balance": balance, "cu_seqlens": documents})
    return split_of(rows, balance), documents


def _compare_first(group: comm.Communicator, described: dict[str, Any]) -> None:
    """Compares how the ranks describe their sequence, at the first call over them, through the job's store.

    Raises:
        ValueError: they describe different ones, of which some ranks would wait for messages that others do not send.
    """
    context = comm.current()
    if group.size == 1 or context.backend.board is None or torch.compiler.is_compiling():
        return
    compared: set[tuple[int, ...]] = context.extras.setdefault("described_sequences", set())
    ranks = tuple(group.ranks)
    if ranks in compared:
        return
    compared.add(ranks)
    topic = f"the sequence of attention over ranks {list(ranks)}"
    first, *others = context.backend.board.exchange_values(topic, described, ranks).values()
    for rank, other in zip(ranks[1:], others):
        if different := [name for name in described if first[name] != other[name]]:
            raise ValueError(
                f"attention over {group.axis}: rank {ranks[0]} has {_shown(first, different)}, and rank {rank} "
                f"{_shown(other, different)}: pass equal ones on all ranks, of the complete sequence (later calls are "
                "not compared)"
            )


def _shown(described: dict[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name} {json.dumps(described[name])[:80]}" for name in names)


def _declared(axis: AxisLike, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Declares to a checker that q, k, v are parts of a sequence, in any order, and so is the result; inside it trusts.

    Raises:
        SpmdTypeError: (by a call) an operand is equal on all ranks, or sharded along another dim.
    """
    watcher = active()
    if watcher is None or comm.size(axis) == 1:
        return function
    atoms = axes_along(comm.communicator(axis), watcher)

    def declared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        types = [note.type.types if (note := watcher.note(x, "attention")) is not None else None for x in (q, k, v)]
        for x, of_x in zip((q, k, v), types):
            for spmd_type in map(of_x.get, atoms) if of_x is not None else ():
                if spmd_type != V and not (isinstance(spmd_type, Shard) and spmd_type.dim == 2):
                    spmd.assert_type(x, {axis: spmd.S(2)})
        with watcher.pause():
            result = function(q, k, v)
        note = watcher.note(q, "attention")
        if note is not None and types[2] is not None:  # rotary embeddings may make q and k varying
            of_values = {atom: types[2][atom] for atom in atoms if atom in types[2]}
            watcher.stamp(
                result, TensorType.of({**note.type.types, **of_values}, note.type.rest), dict(note.origins or {})
            )
        return result

    return declared
