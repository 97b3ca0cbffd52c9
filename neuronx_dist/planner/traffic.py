"""Collectives of a step, counted: verb, axis, bytes and number, of each part of a model and of each stage.

The counts are those of the table in docs/architecture.md, "What a step communicates"; tests compare them with
`comm.record`. Bytes are those of the larger side, as `comm.Call.bytes`. With T tokens of a microbatch on a rank, hidden
size h and e bytes of an element, a collective of tp moves T h e bytes; if it sums, e is at least that of float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from ..model_shape import stage_layers
from ..pipeline.schedule import Schedule
from .candidate import Candidate, RankSizes
from .model_sizes import Block, Weight, Workload

__all__ = [
    "Piece",
    "Sent",
    "attention_traffic",
    "chunk_tokens",
    "embedding_traffic",
    "head_traffic",
    "layer_traffic",
    "merged",
    "message_bytes",
    "pieces_of",
    "reduction_traffic",
    "stage_weights",
    "step_traffic",
]

_REDUCE_CAP = 100 * 2**20  # bytes of a bucket of `reduce_gradients`
_ZERO1_CAP = 65 * 2**20  # of ZeRO-1, half of its 130 MB: two are in flight
_FEWEST_TOKENS = 512  # of a chunk of the fused loss


class Sent(NamedTuple):
    """Equal collectives of a rank: in forward and backward of a microbatch; or, `forward` alone, of a step."""

    verb: str
    axis: str
    bytes: int
    forward: int
    backward: int = 0


class Piece(NamedTuple):
    """Piece of the model that a stage holds in a chunk.

    Attributes:
        layers: number of layers of each block.
        first, last: whether the piece has the embedding, and the head.
    """

    layers: tuple[int, ...]
    first: bool
    last: bool


def merged(pieces: Sequence[Piece]) -> Piece:
    """Returns the pieces of a stage as one."""
    layers = tuple(map(sum, zip(*(piece.layers for piece in pieces))))
    return Piece(layers, any(piece.first for piece in pieces), any(piece.last for piece in pieces))


def pieces_of(workload: Workload, schedule: Schedule) -> list[list[Piece]]:
    """Returns the pieces of the model on each stage, by chunk: `stage_layers` says which layers."""
    pieces: list[list[Piece]] = [[] for _ in range(schedule.num_stages)]
    kinds, total = workload.layer_kinds(), schedule.num_virtual_stages
    for position, layers in enumerate(stage_layers(len(kinds), total)):
        stage, _ = schedule.holder(position)
        counts = [0] * len(workload.blocks)
        for layer in layers:
            counts[kinds[layer]] += 1
        pieces[stage].append(Piece(tuple(counts), position == 0, position == total - 1))
    return pieces


# --- of a microbatch


def layer_traffic(workload: Workload, block: Block, sizes: RankSizes) -> list[Sent]:
    """Returns the collectives of one layer."""
    sent: list[Sent] = []
    if sizes.tp > 1:
        elements = sizes.tokens * workload.hidden
        divided = int(workload.divides_attention) + (not block.experts)  # whose sum is scattered, or reduced on all
        summed = (1 + workload.shared_experts) * block.experts  # experts see the tokens of all tp ranks
        if sizes.sequence_parallel:
            sent.append(Sent("all_gather", "tp", elements * sizes.item, 2, 2))
            sent.append(Sent("reduce_scatter", "tp", elements * sizes.summed_item, divided, divided))
        else:
            summed += divided
        sent.append(Sent("all_reduce", "tp", elements * sizes.summed_item, summed, summed))
        if block.experts:  # the gradients of a token's weights of its experts
            weights = sizes.tokens * workload.experts_per_token * 4
            sent.append(Sent("all_reduce", "tp", weights, 0, 1))
        sent += _key_value_traffic(workload, block, sizes)
    sent += attention_traffic(workload, sizes)
    if block.experts and sizes.ep > 1:
        rows = sizes.tokens * workload.experts_per_token * (sizes.ep - 1) // sizes.ep  # if experts get equally many
        sent.append(Sent("exchange", "ep", rows * workload.hidden * sizes.item, 2, 2))
        sent.append(Sent("all_to_all", "ep", workload.experts * 8, 1))
    return sent


def _key_value_traffic(workload: Workload, block: Block, sizes: RankSizes) -> Iterator[Sent]:
    """The sums of gradients of key and value weights over the ranks that hold one head."""
    local = workload.local_sizes(sizes.tp, sizes.ep)
    replicas = local.heads.replicas
    if replicas > 1 and workload.divides_attention:
        axis = f"tp%{replicas}"
        for weight in block.weights:
            if weight.split == "key_value":
                yield Sent("all_reduce", axis, prod(weight.local(local)) * sizes.summed_item, 0, weight.number)


def attention_traffic(workload: Workload, sizes: RankSizes) -> list[Sent]:
    """Returns the collectives of a layer over cp, by the method that sends least, as `context_parallel="auto"`."""
    if sizes.cp == 1:
        return []
    heads, kv_heads = workload.rank_heads(sizes.tp)
    dims = workload.key_dim + workload.value_dim
    tokens = sizes.tokens

    def row(degree: int) -> int:  # of a key and its value, over heads
        if kv_heads % degree == 0:
            repeats = 1
        else:
            repeats = degree // kv_heads if degree % kv_heads == 0 else heads // kv_heads
        return kv_heads * repeats * dims

    def sent_by(degree: int) -> tuple[int, int]:  # elements and messages
        hops = 3 * (sizes.cp // degree - 1)
        elements = tokens * (hops * row(degree) + 2 * (heads * dims + row(degree)) * (degree - 1) // degree)
        return elements, hops + (0 if degree == 1 else 4 if workload.key_dim == workload.value_dim else 8)

    degrees = [n for n in range(1, sizes.cp + 1) if sizes.cp % n == 0 and heads % n == 0]
    degree = min(degrees, key=sent_by)
    sent = []
    if degree > 1:
        axis = "cp" if degree == sizes.cp else f"cp%{degree}"
        of_queries, of_output = heads * workload.key_dim, heads * workload.value_dim
        of_keys = row(degree) // dims * workload.key_dim
        there = [of_queries + row(degree)]  # queries, keys and values together, if they are equally wide
        if workload.key_dim != workload.value_dim:
            there = [of_queries, of_keys, row(degree) - of_keys]
        sent += [Sent("all_to_all", axis, tokens * width * sizes.item, 1, 1) for width in (*there, of_output)]
    hops = sizes.cp // degree - 1
    if hops:
        axis = "cp" if degree == 1 else f"cp/{degree}"
        sent.append(Sent("exchange", axis, tokens * row(degree) * sizes.item, hops, 2 * hops))
    return sent


def embedding_traffic(workload: Workload, sizes: RankSizes) -> list[Sent]:
    """Returns the collectives of the embedding."""
    if sizes.tp == 1:
        return []
    elements = sizes.tokens * workload.hidden
    verb = "reduce_scatter" if sizes.sequence_parallel and not workload.is_cut_after_positions else "all_reduce"
    gathered = [Sent("all_gather", "tp", elements * sizes.item, 0, 1)] * sizes.sequence_parallel
    return [Sent(verb, "tp", elements * sizes.summed_item, 1), *gathered]


def head_traffic(workload: Workload, sizes: RankSizes, fused: bool) -> list[Sent]:
    """Returns the collectives of the head and the loss; the loss is computed in float32 or better."""
    if sizes.tp == 1:
        return []
    whole, wide = sizes.tokens * workload.hidden * sizes.item, max(4, sizes.item)
    summed = sizes.tokens * workload.hidden * sizes.summed_item
    sent: list[Sent] = []
    if sizes.sequence_parallel:
        again = not fused and not workload.is_cut_after_positions  # the head's input, for its weight's gradient
        sent.append(Sent("all_gather", "tp", whole, 1, int(again)))
    scatters = sizes.sequence_parallel and not workload.is_cut_after_positions
    sent.append(Sent("reduce_scatter" if scatters else "all_reduce", "tp", summed, 0, 1))
    for tokens, count in _chunks(workload, sizes) if fused else [(sizes.tokens, 1)]:
        sent.append(Sent("all_reduce", "tp", tokens * sizes.item, count))
        sent.append(Sent("all_reduce", "tp", 2 * tokens * wide, count))
    return sent


def chunk_tokens(workload: Workload, sizes: RankSizes) -> int:
    """Tokens whose logits the fused loss holds at a time."""
    columns = workload.head.local(workload.local_sizes(sizes.tp))[0]
    return min(sizes.tokens, max(_FEWEST_TOKENS, sizes.tokens * workload.hidden // columns))


def _chunks(workload: Workload, sizes: RankSizes) -> Iterator[tuple[int, int]]:
    size = chunk_tokens(workload, sizes)
    count, rest = divmod(sizes.tokens, size)
    yield size, count
    if rest:
        yield rest, 1


def message_bytes(workload: Workload, sizes: RankSizes) -> int:
    """Bytes of a message between stages."""
    return sizes.shard_tokens * workload.hidden * sizes.item


# --- of a step


def stage_weights(workload: Workload, stage: Piece) -> list[tuple[Weight, int]]:
    """Returns the parameters of a stage, `merged`, and the number of each, in the order of the model."""
    found: list[tuple[Weight, int]] = []
    first, last = workload.outside
    if stage.first:
        found += [(weight, 1) for weight in first]
    for block, layers in zip(workload.blocks, stage.layers):
        found += [(weight, weight.number) for _ in range(layers) for weight in block.weights]
    if stage.last:
        found += [(weight, 1) for weight in last]
        if not (workload.tied and stage.first):  # a tied weight, on the last stage alone, is this stage's copy
            found.append((workload.head, 1))
        if workload.head_bias:
            found.append((Weight((workload.vocab,), "vocab", products=0), 1))
    return found


def reduction_traffic(workload: Workload, candidate: Candidate, stage: Piece) -> list[Sent]:
    """Returns the collectives of a stage after the last backward: gradients, and the weights of ZeRO-1.

    A bucket has one more element for each parameter, which says whether any rank has a gradient.
    """
    layout, sizes = candidate.layout, candidate.sizes
    local, item = workload.local_sizes(sizes.tp, sizes.ep), sizes.item
    weights = stage_weights(workload, stage)
    sent: list[Sent] = []
    splits = ("partial", "") if sizes.sequence_parallel else ("partial",)
    if sizes.tp > 1:
        partial = [
            prod(weight.local(local)) for weight, count in weights if weight.split in splits for _ in range(count)
        ]
        sent += [
            Sent("all_reduce", "tp", (sum(bucket) + len(bucket)) * item, 1)
            for bucket in _cut(partial, [x * item for x in partial], _REDUCE_CAP)
        ]
    if workload.tied and stage.first != stage.last:
        sent.append(Sent("all_reduce", "pp_tied", (prod(workload.embedding.local(local)) + 1) * item, 1))
    groups = [("dp,cp", layout.dp * layout.cp, False)]
    if workload.experts:
        groups.append(("edp", layout.world_size // (layout.tp * layout.pp * layout.ep), True))
    for axis, degree, expert in groups:
        if degree == 1:
            continue
        shapes = [
            weight.local(local)
            for weight, count in weights
            if (weight.is_expert and layout.ep > 1) == expert
            for _ in range(count)
        ]
        if layout.zero1:
            sent += _zero1_traffic(axis, degree, shapes, item, is_divided=layout.dtype == "float16")
        else:
            numbers = [prod(shape) for shape in shapes]
            sent += [
                Sent("all_reduce", axis, (sum(bucket) + len(bucket)) * item, 1)
                for bucket in _cut(numbers, [x * item for x in numbers], _REDUCE_CAP)
            ]
    return sent


def _zero1_traffic(
    axis: str, degree: int, shapes: Sequence[tuple[int, ...]], item: int, *, is_divided: bool
) -> Iterator[Sent]:
    padded = [degree * -(-shape[0] // degree) * prod(shape[1:]) for shape in shapes]
    twice = [2 if whole != prod(shape) or is_divided else 1 for whole, shape in zip(padded, shapes)]
    for bucket in _cut(padded, [whole * item * factor for whole, factor in zip(padded, twice)], _ZERO1_CAP):
        yield Sent("reduce_scatter", axis, (sum(bucket) + degree * len(bucket)) * item, 1)
        yield Sent("all_gather", axis, sum(bucket) * item, 1)


def _cut(numbers: Sequence[int], nbytes: Sequence[int], cap: int) -> list[list[int]]:
    """Returns buckets of at most `cap` bytes, in order; a larger parameter is a bucket alone."""
    buckets: list[list[int]] = []
    filled = cap + 1
    for number, size in zip(numbers, nbytes):
        if filled + size > cap:
            buckets.append([])
            filled = 0
        buckets[-1].append(number)
        filled += size
    return buckets


# --- all of a step


def step_traffic(workload: Workload, candidate: Candidate, stage: int) -> Counter[tuple[str, str, int]]:
    """Returns the number of a stage's collectives and messages in a step, by verb, axis and bytes.

    Single numbers (of labels, the norm, the loss) are left out, and the positions that cp gathers of a new batch.
    """
    sizes, schedule = candidate.sizes, candidate.schedule
    microbatches = candidate.layout.num_microbatches
    found: Counter[tuple[str, str, int]] = Counter()
    pieces = pieces_of(workload, schedule)[stage]
    for chunk, piece in enumerate(pieces):
        for block, layers in zip(workload.blocks, piece.layers):
            for verb, axis, nbytes, forward, backward in layer_traffic(workload, block, sizes):
                again = forward if candidate.recompute == "full" else 0
                found[verb, axis, nbytes] += microbatches * layers * (forward + backward + again)
        ends = embedding_traffic(workload, sizes) if piece.first else []
        ends += head_traffic(workload, sizes, candidate.fused_loss) if piece.last else []
        for verb, axis, nbytes, forward, backward in ends:
            found[verb, axis, nbytes] += microbatches * (forward + backward)
        position = schedule.virtual_stage(stage, chunk)
        for other in (position - 1, position + 1):
            if 0 <= other < schedule.num_virtual_stages and schedule.holder(other)[0] != stage:
                for verb in ("send", "recv"):
                    found[verb, "pp", message_bytes(workload, sizes)] += microbatches
    for verb, axis, nbytes, number, _ in reduction_traffic(workload, candidate, merged(pieces)):
        found[verb, axis, nbytes] += number
    return Counter({key: number for key, number in found.items() if number})
