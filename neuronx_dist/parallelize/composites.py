"""Functions that emitted programs call by name where a rank has a shard.

Functions that need an entire dim are those of `sharded_functions`, which take the axis over which the dim is sharded.
Dropout and attention draw their masks from this rank's local random stream.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from math import prod
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import comm, spmd
from ..attention import Keys, attention
from ..comm.context import AxisLike
from ..comm.rank_selection import in_one_program
from ..comm.ranks.rank_numbers import concrete
from ..mesh import Axis
from ..modules.moe.dispatch import Dispatch, exchange_rows
from ..parallel_layers.autograd_linear import ColumnLinear, call
from ..program import experts as _experts
from ..sharded_functions.cross_entropy import cross_entropy_of_shard
from ..sharded_functions.norms import batch_norm, batch_norm_of_channels, group_norm, layer_norm, rms_norm
from ..sharded_functions.softmax import log_softmax, softmax
from ..sharded_functions.vocabulary import check_ids, embedding
from ..spmd import P, R, S, V
from ..spmd.local_code import local_map, on_own_shard
from ..spmd.random import TENSOR_PARALLEL, streams
from ..spmd.watching import active
from ..torch_internals.tensors import version_of

__all__ = [
    "batch_norm",
    "batch_norm_of_channels",
    "cat_from_ranks",
    "causal_attention",
    "cross_entropy",
    "dropout",
    "embedding",
    "embedding_bag_on_rank",
    "embedding_on_rank",
    "expert_product",
    "group_norm",
    "layer_norm",
    "linears",
    "log_softmax",
    "ring_attention",
    "rms_norm",
    "scaled_dot_product_attention",
    "softmax",
    "stack_from_ranks",
    "to_experts",
    "to_tokens",
]


def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    axis: AxisLike,
    classes: int,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` of S(1) logits `[N, classes/n, ..]` (or `[classes/n]`) and R targets `[N, ..]`: I.

    Raises:
        IndexError: a target is no class (checked on CPU, where it costs no synchronisation).
    """
    if type(target) is Tensor and target.device.type == "cpu":
        check_ids(target, classes, ignore_index, "cross_entropy: target")
    logits = input.movedim(1, -1) if input.dim() > 1 else input
    smoothing = label_smoothing * (classes - 1) / classes  # NeMo's definition leaves the target out of the mean
    losses = cross_entropy_of_shard(logits, target, axis, smoothing, ignore_index)
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":
        losses = losses / (target != ignore_index).sum()
    return losses.to(input.dtype)


def linears(
    input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), *, axis: AxisLike
) -> tuple[Tensor, ...]:
    """`F.linear` of an I input with several weights, and their biases: shards of the outputs.

    The input's gradient is one tensor, whose sum over the axis goes on while the weights' gradients are computed.
    """
    outputs: tuple[Tensor, ...] = call(
        ColumnLinear, input, comm.communicator(axis), None, None, len(weights), *weights, *biases
    )
    return outputs


def _with_local_numbers(shared_axis: Axis | None, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Calls a function that draws from this rank's local stream; torch's generator, for whole values, is not advanced.

    If the stream is not seeded (`spmd.random.manual_seed`), it begins at the seed of torch's generator and this rank's
    number, so that units differ too.

    Args:
        shared_axis: part or parts of tp ("tp/2") along which the ranks draw the same numbers, from a stream of theirs.
    """
    random_streams, name, shared = streams(), TENSOR_PARALLEL, shared_axis or ()
    if shared:
        name += f" {shared if isinstance(shared, str) else ','.join(shared)}"
    if name not in random_streams.get_states():
        first = concrete(comm.communicator(shared).ranks[0] if shared else comm.rank("world"))
        # Streams of different numbers begin at different seeds.
        number = crc32(name.encode()) if shared else 1
        random_streams.add(name, torch.initial_seed() % 2**62 + 2718 * number + first)
    with random_streams.fork(name):
        return function(*args, **kwargs)


def dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, shared_axis: Axis | None = None
) -> Tensor:
    """Dropout of a shard, whose mask differs between ranks, except along `shared_axis`."""
    return _with_local_numbers(shared_axis, F.dropout, input, p, training, inplace)


def scaled_dot_product_attention(*args: Any, shared_axis: Axis | None = None, **kwargs: Any) -> Tensor:
    """Attention with dropout of a shard of the batch, the heads or the queries; masks as those of `dropout`."""
    return _with_local_numbers(shared_axis, F.scaled_dot_product_attention, *args, **kwargs)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    axis: AxisLike,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention of S(2) queries to S(2) keys and values, which go around the ranks: S(2).

    A checker follows torch's function on gathered keys in its place, which has the same types.

    Args:
        query, key, value: `[batch, heads, positions/n, width]`, in the order of the ranks.
        attn_mask: `[.., queries/n or 1, keys]`, for all keys.
    """
    if active() is not None:
        key, value = (spmd.all_gather(x, axis, src=S(2), dst=R) for x in (key, value))
        return _with_all_keys(query, key, value, attn_mask, axis, is_causal, scale)
    count, ranks = key.shape[2], comm.size(axis)
    runs = tuple(((rank * count, (rank + 1) * count),) for rank in range(ranks))
    queries = _positions(query, axis)
    keys = Keys((count,) * ranks, False, queries, runs) if is_causal else Keys((count,) * ranks)
    mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
    return attention(query, key, value, keys, axis, mask=mask, scale=_scale(query, scale))


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, axis: AxisLike, scale: float | None = None
) -> Tensor:
    """Causal attention of S(2) queries to all keys and values, which are R: S(2). Computes no masked block."""
    if active() is not None:
        return _with_all_keys(query, key, value, None, axis, True, scale)
    keys = Keys((key.shape[2],), False, _positions(query, axis), (((0, key.shape[2]),),))
    return attention(query, key, value, keys, scale=_scale(query, scale))


def _positions(query: Tensor, axis: AxisLike) -> tuple[tuple[int, int]]:
    """Returns the positions of this rank's queries."""
    first = int(comm.rank(axis)) * query.shape[2]
    return ((first, first + query.shape[2]),)


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _with_all_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    axis: AxisLike,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention of S(2) queries to R keys and values by torch's function, which a checker follows."""

    def visible() -> Tensor:
        ((first, end),) = _positions(query, axis)
        rows, columns = (torch.arange(*run, device=query.device) for run in ((first, end), (0, key.shape[2])))
        return rows[:, None] >= columns

    if is_causal:
        mask = on_own_shard(visible, {axis: S(0)})()
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)


# --- experts, of which a rank has some. A check, which has no values, counts with equally many rows on all ranks.


def to_experts(
    tokens: Tensor, index: Tensor, experts: int, *, axis: AxisLike, exchanged: bool = False
) -> tuple[Tensor, Tensor]:
    """`experts.to_experts` for this rank's experts: their rows and offsets, both S(0) of those of all experts.

    Args:
        tokens, index: R, those of all ranks; or, if `exchanged`, S(0): rows are sent to the ranks of their experts.
    """

    def of_this_rank(tokens: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        if in_one_program(tokens) and _experts.has_values(tokens):
            raise ValueError(
                f"to_experts: experts are divided over {axis}, and how many rows a rank has depends on values, which "
                f"no program of {tokens.device.type} knows: divide their columns and rows, by a policy that partitions "
                "expert_product along another dim than that of the experts"
            )
        if not exchanged:
            choices, counts = _once(_choices_here, index, experts, axis, is_first=True)
            rows = tokens.index_select(0, choices // index.shape[1])
        elif _experts.has_values(tokens):
            route = _once(Dispatch, index, experts, axis, is_first=True)
            rows, counts = route.to_experts(tokens), torch.tensor(route.sizes, device=index.device)
        else:
            rows = _exchanged_evenly(tokens.index_select(0, index.reshape(-1)), axis)
            counts = index.new_zeros(experts // comm.size(axis))
        return rows, counts.cumsum(0, dtype=torch.int32)

    result: tuple[Tensor, Tensor] = local_map(of_this_rank, out_types={axis: S(0)})(tokens, index)
    return result


def expert_product(
    rows: Tensor, matrices: Tensor, offsets: Tensor, bias: Tensor | None = None, *, axis: AxisLike
) -> Tensor:
    """`experts.expert_product` of this rank's experts: S(0), as all operands are."""
    result: Tensor = local_map(_experts.expert_product, out_types={axis: S(0)})(rows, matrices, offsets, bias)
    return result


def to_tokens(
    rows: Tensor, weights: Tensor, index: Tensor, experts: int, *, axis: AxisLike, exchanged: bool = False
) -> Tensor:
    """`experts.to_tokens` of the S(0) rows of this rank's experts: P, or S(0) if rows are `exchanged`.

    Args:
        weights, index: R, those of all ranks; or, if `exchanged`, S(0).
    """

    def of_this_rank(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        if exchanged and _experts.has_values(rows):
            route: Dispatch = _once(Dispatch, index, experts, axis)
            return route.to_tokens(rows, weights)
        if exchanged:
            chosen = _exchanged_evenly(rows, axis).unflatten(0, weights.shape)
            return (chosen * weights.unsqueeze(-1)).sum(1).to(rows.dtype)
        choices, _ = _once(_choices_here, index, experts, axis)
        weighted = rows * weights.reshape(-1).index_select(0, choices).unsqueeze(-1)
        result = weighted.new_zeros(len(index), rows.shape[1]).index_add(0, choices // index.shape[1], weighted)
        return result.to(rows.dtype)

    result: Tensor = local_map(of_this_rank, out_types={axis: S(0) if exchanged else P})(rows, weights, index)
    return result


def _exchanged_evenly(rows: Tensor, axis: AxisLike) -> Tensor:
    """Exchanges equally many rows with each rank."""
    sizes = [len(rows) // comm.size(axis)] * comm.size(axis)
    return exchange_rows(rows, sizes, sizes, axis)


_ROUTES: MutableMapping[Tensor, dict[Any, Any]] = WeakTensorKeyDictionary()


def _once(find: Callable[..., Any], index: Tensor, experts: int, axis: AxisLike, *, is_first: bool = False) -> Any:
    """Returns `find(index, experts)`: of `to_tokens` what `to_experts` found, unless the index was written since.

    Args:
        is_first: asked by `to_experts`, which always finds anew of a tensor of inference mode: it counts no writes.
    """
    version = None if index.is_inference() else version_of(index)
    key = find, experts, comm.communicator(axis), version  # a communicator is a rank's: threads may share a tensor
    found = _ROUTES.setdefault(index, {})
    if key not in found or (is_first and index.is_inference()):
        found[key] = find(index, experts, axis=axis)
    return found[key]


def _choices_here(index: Tensor, experts: int, axis: AxisLike) -> tuple[Tensor, Tensor]:
    """Returns the choices of this rank's experts, as numbers in `index.flatten()` in order of experts, and counts."""
    size = comm.size(axis)
    here = experts // size
    if not _experts.has_values(index):
        choices = index.new_zeros(index.numel() // size)  # not of the type of index, which may be I
        return spmd.trust(choices, axis, V), index.new_zeros(here)
    numbers = index.reshape(-1) - concrete(comm.rank(axis)) * here
    choices = ((numbers >= 0) & (numbers < here)).nonzero().squeeze(1)
    numbers, order = torch.sort(numbers[choices], stable=True)
    return choices[order], torch.bincount(numbers, minlength=here)


# --- embedding tables that are whole on one rank. Weight and rows are S(0), of which the other ranks have no positions.


def embedding_on_rank(input: Tensor, weight: Tensor, *, rank: int, axis: AxisLike, **options: Any) -> Tensor:
    """`F.embedding` of R ids on the rank that has the table: the rows of all ids there, none on other ranks: S(0)."""
    return _on_rank(F.embedding, input, weight, input.shape[1:], rank, axis, options)


def embedding_bag_on_rank(input: Tensor, weight: Tensor, *, rank: int, axis: AxisLike, **options: Any) -> Tensor:
    """`F.embedding_bag` of R ids on the rank that has the table, as `embedding_on_rank`."""
    return _on_rank(F.embedding_bag, input, weight, (), rank, axis, options)


def _on_rank(
    function: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    dims: Sequence[int],
    rank: int,
    axis: AxisLike,
    options: dict[str, Any],
) -> Tensor:
    """Calls a look-up on one rank; on others the rows are `[0, *dims, width]`, so that weights have gradients."""

    def of_this_rank(input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        if _number_of(input, axis) == rank:
            return function(input, weight, **options)
        return weight.reshape(0, *dims, weight.shape[-1])

    result: Tensor = local_map(of_this_rank, out_types={axis: S(0)})(input, weight, **options)
    return result


def cat_from_ranks(
    tensors: Sequence[Tensor], *, dim: int, ranks: Sequence[int | None], batch: int, axis: AxisLike
) -> Tensor:
    """`torch.cat` of rows that ranks looked up in their tables, and of S(0) tensors: S(0), by one exchange of all rows.

    Args:
        ranks: the rank that has each tensor, of all positions; None: each rank has its shard.
        batch: positions of a shard.
    """
    return _from_ranks(torch.cat, tensors, dim, ranks, batch, axis)


def stack_from_ranks(
    tensors: Sequence[Tensor], *, dim: int, ranks: Sequence[int | None], batch: int, axis: AxisLike
) -> Tensor:
    """`torch.stack`, as `cat_from_ranks`."""
    return _from_ranks(torch.stack, tensors, dim, ranks, batch, axis)


def _from_ranks(
    join: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    dim: int,
    ranks: Sequence[int | None],
    batch: int,
    axis: AxisLike,
) -> Tensor:
    of_rank = [[n for n, rank in enumerate(ranks) if rank == number] for number in range(comm.size(axis))]

    def of_this_rank(*tensors: Tensor) -> Tensor:
        here = _number_of(tensors[0], axis)
        sizes = [batch * prod(tensors[n].shape[1:]) for numbers in of_rank for n in numbers]
        received = [batch * sum(prod(tensors[n].shape[1:]) for n in numbers) for numbers in of_rank]
        pieces = [tensors[n].split(batch) for n in of_rank[here]]
        sent = [piece.flatten() for of_one_rank in zip(*pieces) for piece in of_one_rank]
        # Rows of other ranks' tables are empty here: with them each weight has a gradient on each rank.
        sent += [tensors[n].flatten() for numbers in of_rank for n in numbers if numbers is not of_rank[here]]
        rows = exchange_rows(torch.cat(sent), [received[here]] * len(of_rank), received, axis)
        parts = list(tensors)
        for n, block in zip((n for numbers in of_rank for n in numbers), rows.split(sizes), strict=True):
            parts[n] = block.view(batch, *tensors[n].shape[1:])
        return join(parts, dim)

    result: Tensor = local_map(of_this_rank, out_types={axis: S(0)})(*tensors)
    return result


def _number_of(x: Tensor, axis: AxisLike) -> int:
    """Returns this rank's number, by which a rank computes other shapes than the others."""
    if in_one_program(x):
        raise ValueError(
            f"embedding tables are whole on ranks of {axis}, so that ranks have other shapes, but all ranks run one "
            f"program of {x.device.type}: cut the tables, by a policy with graph.shard(module, weight=1)"
        )
    return int(concrete(comm.rank(axis)))
