"""`attention` of a rank's queries to the keys of all ranks of an axis.

Ring: queries and keys are sharded along the sequence. Blocks of keys and values go around, and each rank merges its
queries' attention to each. The next block travels while one is computed. Backward sends keys and values around again,
and their gradients after them, which arrive at home with the last pass.

Merged: queries are whole on every rank, keys are sharded. Each rank attends to its own keys. Every rank gets all ranks'
log-sum-exps, one number a row (with an added mask two), and the outputs, weighted by them, are summed. Backward
communicates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .. import comm
from ..comm import Communicator
from ..comm.context import AxisLike
from . import blocks
from .blocks import Block
from .positions import BlockPiece, Runs, visible

__all__ = ["Keys", "attention", "ring_elements", "ring_steps"]


class Keys(NamedTuple):
    """The numbers of keys on each rank, and their positions.

    Attributes:
        sizes: how many keys each rank of the axis has; one size, if this rank has all of them.
        merged: True: the queries are the same on all ranks; False: they are sharded too, and keys go around the ring.
        queries, positions: under a causal mask or with documents the positions of this rank's queries, and of all keys
            in the order of the ranks; None: every query sees every key.
        causal: with positions: a query sees keys at or before its position; False: all.
        window: of them the last `window` keys; None: all. Together with `causal`.
        documents: positions `[start, stop)` of documents, for all rows of the batch or for each: a query sees keys of
            its document only; None: one document.
    """

    sizes: tuple[int, ...]
    merged: bool = False
    queries: Runs | None = None
    positions: tuple[Runs, ...] | None = None
    causal: bool = True
    window: int | None = None
    documents: tuple[Runs, ...] | None = None


def ring_elements(sizes: Sequence[int], rank: int, row: int, *, backward: bool = False) -> int:
    """Counts the elements that `comm.record` notes for a rank in one forward, or backward, pass around the ring.

    Args:
        sizes: keys of each rank.
        row: elements of a key and a value, over batch and heads.
    """
    count = len(sizes)
    passes = [row * max(sizes[rank - step], sizes[rank - step - 1]) for step in range(count)]
    return sum(passes[:-1]) + (sum(passes[1:]) if backward else 0)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: Keys,
    axis: AxisLike | None = None,
    *,
    mask: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    scale: float,
) -> torch.Tensor:
    """Computes softmax attention, `[b, heads, rows, ev]`, exact. Differentiable once, in q, k, v, mask and sinks.

    Under autocast it is computed in autocast's type, as torch's function is.

    Args:
        q: `[b, heads, rows, e]`, of this rank; empty ones too. Every rank of the axis calls this.
        k, v: `[b, kv heads, keys, e or ev]`, of this rank; `heads` is a multiple of `kv heads`.
        axis: over which the keys are sharded; None: this rank has all of them.
        mask: `[b or 1, heads or 1, rows, all keys]` (with `keys.merged`: own keys), boolean (True: seen) or added.
        noise: of dropout, of the mask's shape for all b and heads: 0, or 1 / (1 - p).
        sinks: `[heads]`, a score of each head for a key without a value, which every row sees (gpt-oss).

    Raises:
        ValueError: `k` has another number of keys than `keys` says.
        NotImplementedError: backward is to be differentiated again.
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
        with torch.autocast(device, enabled=False):
            return attention(q, k, v, keys, axis, mask=mask, noise=noise, sinks=sinks, scale=scale)
    group = None if axis is None else comm.communicator(axis)
    num_local_keys = keys.sizes[0 if group is None else int(group.rank)]
    if (
        k.shape[2] != num_local_keys
        or v.shape[2] != num_local_keys
        or len(keys.sizes) != (1 if group is None else group.size)
    ):
        raise ValueError(
            f"attention: k has {k.shape[2]} keys and v {v.shape[2]}, but this rank's part of {list(keys.sizes)} "
            f"over {(None if group is None else group.axis)} is {num_local_keys} keys"
        )
    result: torch.Tensor = _Attention.apply(q, k, v, mask, noise, sinks, _Options(keys, group, scale))
    return result


class _Options(NamedTuple):
    """The arguments of a call that are no tensors."""

    keys: Keys
    group: Communicator | None
    scale: float

    @property
    def rank(self) -> int:
        return 0 if self.group is None else int(self.group.rank)

    @property
    def steps(self) -> int:
        """Number of blocks that each rank gets, its block included: those that nobody sees need not go around."""
        keys = self.keys
        if self.group is None or keys.merged:
            return 1
        if keys.positions is not None and keys.queries != keys.positions[self.rank]:
            return self.group.size
        return ring_steps(keys)

    def pieces(self, q: torch.Tensor, owner: int) -> list[BlockPiece]:
        """Returns the pieces of the attention of this rank's queries to the keys of one rank."""
        keys = self.keys
        if keys.queries is None or keys.positions is None:
            return [BlockPiece((0, q.shape[2]), (0, keys.sizes[owner]), False)]
        return _visible(keys, keys.queries, owner)

    def blocks(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        largest: torch.Tensor | None,
        noise: torch.Tensor | None,
        owner: int,
    ) -> Iterator[tuple[BlockPiece, Block]]:
        """Returns the blocks of this rank's queries and the keys of a rank."""
        offset = 0 if self.keys.merged else sum(self.keys.sizes[:owner])
        for piece in self.pieces(q, owner):
            columns = offset + piece.keys[0], offset + piece.keys[1]
            of_piece = _band(piece, self.keys.window, q.device)
            if of_piece is None and mask is not None:
                of_piece = _cut(mask, piece.rows, columns)
            block = Block(
                _cut(_of_batch(q, piece), piece.rows),
                _cut(_of_batch(k, piece), piece.keys),
                _cut(_of_batch(v, piece), piece.keys),
                of_piece,
                None if noise is None else _cut(noise, piece.rows, columns),
                piece.diagonal,
                self.scale,
                None if largest is None else _cut(largest, piece.rows),
            )
            if not block.empty:
                yield piece, block


def ring_steps(keys: Keys) -> int:
    """Counts the blocks that each rank gets, its block included, of queries and keys that are split in one way."""
    if keys.positions is None or not (keys.window or keys.documents):
        return len(keys.sizes)
    return _steps(keys._replace(sizes=(), queries=None))


def _visible(keys: Keys, queries: Runs, owner: int) -> list[BlockPiece]:
    assert keys.positions is not None
    documents = keys.documents or (None,)
    return [
        piece
        for index, of_row in enumerate(documents)
        for piece in visible(
            queries,
            keys.positions[owner],
            causal=keys.causal,
            window=keys.window,
            documents=of_row,
            batch=index if len(documents) > 1 else None,
        )
    ]


@lru_cache(maxsize=64)
def _steps(keys: Keys) -> int:
    """Returns one more than the distance to the farthest block that a rank sees, for keys without sizes and queries."""
    assert keys.positions is not None
    ranks = range(len(keys.positions))
    seen = (step for step in reversed(ranks) for rank in ranks if _visible(keys, keys.positions[rank], rank - step))
    return 1 + next(seen, 0)


def _of_batch(x: torch.Tensor, piece: BlockPiece) -> torch.Tensor:
    return x if piece.batch is None else x[piece.batch : piece.batch + 1]


def _band(piece: BlockPiece, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Returns the boolean mask of a piece that a window cuts, `[1, 1, rows, keys]`."""
    if piece.band is None or window is None:
        return None
    rows = torch.arange(piece.band, piece.band + piece.rows[1] - piece.rows[0], device=device)
    distance = rows.unsqueeze(1) - torch.arange(piece.keys[1] - piece.keys[0], device=device)
    return ((distance >= 0) & (distance < window))[None, None]


def _cut(x: torch.Tensor, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> torch.Tensor:
    if rows != (0, x.shape[2]):
        x = x[:, :, rows[0] : rows[1]]
    return x if columns is None or columns == (0, x.shape[3]) else x[..., columns[0] : columns[1]]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        noise: torch.Tensor | None,
        sinks: torch.Tensor | None,
        options: _Options,
    ) -> torch.Tensor:
        whole = torch.promote_types(q.dtype, torch.float32)
        out = lse = None
        largest = _largest(mask)
        for owner, keys, values in _turn(k, v, options):
            for piece, block in options.blocks(q, keys, values, mask, largest, noise, owner):
                new, new_lse = blocks.forward(block)
                if lse is None and piece.batch is None and piece.rows == (0, q.shape[2]):
                    out, lse = new.to(whole), new_lse
                    continue
                if out is None or lse is None:
                    out, lse = _nothing(q, v, whole)
                rows = slice(*piece.rows)
                blocks.merge(
                    _of_batch(out, piece)[:, :, rows], _of_batch(lse, piece)[..., rows], new, new_lse.to(lse.dtype)
                )
        if out is None or lse is None:
            out, lse = _nothing(q, v, whole)
        if options.keys.merged and options.group is not None and options.group.size > 1:
            out, lse, largest = _merged(out, lse, largest, options.group)
        if sinks is not None:
            total = torch.logaddexp(lse, _of_rows(sinks, lse, largest))
            out, lse = out * (lse - total).exp_().unsqueeze(-1), total
        result = out.to(q.dtype)
        ctx.options = options
        ctx.save_for_backward(q, k, v, mask, largest, noise, sinks, result, blocks.without_infinity(lse))
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "attention over several ranks supports first derivatives only: leave out create_graph=True, or use "
                "scaled_dot_product_attention on tensors that are sharded by batch or heads"
            )
        q, k, v, mask, largest, noise, sinks, out, lse = ctx.saved_tensors
        options: _Options = ctx.options
        of_mask = mask is not None and ctx.needs_input_grad[3]
        dq, dmask = None, torch.zeros_like(mask, dtype=_wide(mask)) if of_mask else None
        home = travelling = None
        steps, passed = options.steps, 0
        for owner, keys, values in _turn(k, v, options):
            dk = dv = None
            for piece, block in options.blocks(q, keys, values, mask, largest, noise, owner):
                rows = piece.rows
                upstream, result, total = (_of_batch(x, piece)[:, :, rows[0] : rows[1]] for x in (grad, out, lse))
                grads = blocks.backward(block, upstream, result, total, of_mask)
                dq = _added(dq, q, piece, rows, grads[0])
                dk, dv = _added(dk, keys, piece, piece.keys, grads[1]), _added(dv, values, piece, piece.keys, grads[2])
                if dmask is not None and grads[3] is not None:
                    offset = 0 if options.keys.merged else sum(options.keys.sizes[:owner])
                    part = _cut(dmask, rows, (offset + piece.keys[0], offset + piece.keys[1]))
                    part.add_(grads[3].sum_to_size(part.shape))
            dk, dv = _zeros(keys) if dk is None else dk, _zeros(values) if dv is None else dv
            if home is None:
                home = dk, dv
                continue
            if travelling is not None:
                dk, dv = _sum((dk, dv), travelling.wait())
            passed += 1
            hop = 1 if passed < steps - 1 or options.group is None else options.group.size - passed  # the last: home
            travelling = _Passing(_packed(dk, dv), dk, dv, owner, options, hop)
        assert home is not None
        if travelling is not None:
            home = _sum(home, travelling.wait())
        return (
            (_zeros(q) if dq is None else dq).to(q.dtype),
            home[0].to(k.dtype),
            home[1].to(v.dtype),
            None if dmask is None else dmask.to(mask.dtype),
            None,
            _of_sinks(sinks, lse, largest, grad, out) if ctx.needs_input_grad[5] else None,
            None,
        )


def _largest(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the largest number of each row of an added mask, 0 for infinite ones."""
    if mask is None or mask.dtype == torch.bool:
        return None
    if not mask.shape[-1]:
        return mask.new_zeros((*mask.shape[:-1], 1))
    largest = mask.amax(-1, keepdim=True)
    return largest.masked_fill_(largest.isinf(), 0.0)


def _of_rows(sinks: torch.Tensor, lse: torch.Tensor, largest: torch.Tensor | None) -> torch.Tensor:
    """Returns the sinks' scores beside the log-sum-exps of rows: `[heads, 1]`, or minus the largest of the mask."""
    scores = sinks.to(lse.dtype)[:, None]
    return scores if largest is None else scores - largest.squeeze(-1)


def _of_sinks(
    sinks: torch.Tensor, lse: torch.Tensor, largest: torch.Tensor | None, grad: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Returns the gradient of the sinks: their weights times that of a value of 0."""
    weights = (_of_rows(sinks, lse, largest) - lse).exp_()
    return (weights * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 2)).neg_().to(sinks.dtype)


def _wide(x: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which gradients of several blocks are added."""
    return torch.promote_types(x.dtype, torch.float32)


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, dtype=_wide(x), memory_format=torch.contiguous_format)


def _added(
    total: torch.Tensor | None, like: torch.Tensor, piece: BlockPiece, rows: tuple[int, int], part: torch.Tensor
) -> torch.Tensor:
    """Adds the gradient of some rows to `total`, a gradient of `like` (None: 0)."""
    if total is None:
        if piece.batch is None and rows == (0, like.shape[2]):
            return part.to(_wide(like))
        total = _zeros(like)
    _cut(_of_batch(total, piece), rows).add_(part)
    return total


def _nothing(q: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and log-sum-exp of rows that have seen no key.

    In memory heads follow rows, as in the output of torch's kernels: models join them without a copy.
    """
    batch, heads, rows, _ = q.shape
    out = q.new_zeros((batch, rows, heads, v.shape[3]), dtype=dtype).transpose(1, 2)
    return out, q.new_full(q.shape[:3], -float("inf"), dtype=dtype)


def _merged(
    out: torch.Tensor, lse: torch.Tensor, largest: torch.Tensor | None, group: Communicator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Computes the attention to the keys of all ranks; the largest of the mask becomes that of their keys."""
    if largest is None:
        total = comm.all_gather(lse.unsqueeze(0), group).logsumexp(0)
    else:
        of_rows = largest.squeeze(-1).to(lse.dtype).expand_as(lse).masked_fill(lse == -float("inf"), -float("inf"))
        sums, of_ranks = comm.all_gather(torch.stack((lse, of_rows)).unsqueeze(0), group).unbind(1)
        base = blocks.without_infinity(of_ranks.amax(0))
        total, lse, largest = (sums + (of_ranks - base)).logsumexp(0), lse + (of_rows - base), base.unsqueeze(-1)
    weight = (lse - blocks.without_infinity(total)).exp_()
    return comm.all_reduce(out * weight.unsqueeze(-1), group), total, largest


# --- around the ring --------------------------------------------------------------------------------------------------


def _turn(k: torch.Tensor, v: torch.Tensor, options: _Options) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yields the keys and values of each rank, this rank's first. The next block is on its way meanwhile."""
    group, steps = options.group, options.steps
    if group is None or steps == 1:
        yield options.rank, k, v
        return
    packed = _packed(k, v)
    for step in range(steps):
        owner = (options.rank - step) % group.size
        passing = _Passing(packed, k, v, owner, options) if step < steps - 1 else None
        yield owner, k, v
        if passing is not None:
            packed = passing.received
            k, v = passing.wait()


def _packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Joins k and v in one message: all of k, then all of v, so that each is contiguous where it arrives."""
    packed = k.new_empty(k.numel() + v.numel())
    for x, part in zip((k, v), _unpacked(packed, k, v, k.shape[2])):
        part.copy_(x)
    return packed


def _unpacked(packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the `keys` keys and values of a message, in the shapes of k and v but for their number."""
    shapes = [torch.Size((*x.shape[:2], keys, x.shape[3])) for x in (k, v)]
    first, second = packed.split([shape.numel() for shape in shapes])
    return first.view(shapes[0]), second.view(shapes[1])


class _Passing:
    """Keys and values of a block on their way `hop` ranks further, in one message, while those of another arrive."""

    def __init__(
        self, packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor, owner: int, options: _Options, hop: int = 1
    ) -> None:
        group = options.group
        assert group is not None
        size, rank = group.size, int(group.rank)
        keys = options.keys.sizes[(owner - hop) % size]
        self.received = k.new_empty(k.shape[0] * k.shape[1] * keys * (k.shape[3] + v.shape[3]))
        self._parts = _unpacked(self.received, k, v, keys)
        nothing = k.new_empty(0)
        sends, recvs = [nothing] * size, [nothing] * size
        sends[(rank + hop) % size], recvs[(rank - hop) % size] = packed, self.received
        self._handle: Any = comm.exchange(sends, recvs, group, async_op=True)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._handle.wait()
        return self._parts


def _sum(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    return a[0].add_(b[0]), a[1].add_(b[1])
