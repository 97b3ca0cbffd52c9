"""Seconds of a step, by term.

    product of t tokens with [rows, columns]   2 t rows columns / flops + bytes read and written / bandwidth + launch
    its backward                               two of them
    causal attention                           b heads s^2 (key_dim + value_dim) / (flops * attention) + launch
                                               its backward 2.5 times that
    pointwise operations                       bytes read and written / bandwidth + calls * launch; backward twice that
    collective                                 `Cluster.collective`, of the bytes that `traffic.py` counts
    pipeline                                   the schedule, simulated with the seconds of each stage
    optimizer                                  bytes of weights, gradients and state / bandwidth

Communication and computation do not overlap, but with `Candidate.overlap`: gathers of ZeRO-1's weights, all but the
first bucket, pass beside the next step's first forward. Its reduce_scatters begin after `run_train`, which pauses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from operator import attrgetter

from ..planning.layout import Layout
from .candidate import RankSizes
from .cluster import Cluster
from .model_sizes import Block, Weight, Workload
from .traffic import Sent, embedding_traffic, head_traffic, layer_traffic, message_bytes

__all__ = [
    "PartSeconds",
    "PassSeconds",
    "StepSeconds",
    "ends_seconds",
    "layer_seconds",
    "message_seconds",
    "optimizer_seconds",
    "reduction_seconds",
]

AXES = ("tp", "cp", "ep")


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of a pass over a part of the model, of one microbatch.

    Attributes:
        products: matrix products; `weight_products`: those of them that compute gradients of weights.
        attention: products of queries, keys and values.
        pointwise: reading and writing memory outside of products, and empty calls.
        tp, cp, ep: collectives, by axis.
    """

    products: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    weight_products: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.attention + self.pointwise + self.tp + self.cp + self.ep

    def __add__(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(*(x + y for x, y in zip(_values(self), _values(other))))

    def __mul__(self, factor: float) -> PassSeconds:
        return PassSeconds(*(x * factor for x in _values(self)))


_values = attrgetter(*(field.name for field in fields(PassSeconds)))


@dataclass(frozen=True)
class PartSeconds:
    """Seconds of a part of the model, of one microbatch.

    Attributes:
        again: what backward computes again; `backward` is without it.
    """

    forward: PassSeconds = PassSeconds()
    backward: PassSeconds = PassSeconds()
    again: PassSeconds = PassSeconds()

    def __add__(self, other: PartSeconds) -> PartSeconds:
        pairs = zip(self.passes, other.passes)
        return PartSeconds(*(one + another for one, another in pairs))

    def __mul__(self, factor: float) -> PartSeconds:
        return PartSeconds(*(one * factor for one in self.passes))

    @property
    def passes(self) -> tuple[PassSeconds, PassSeconds, PassSeconds]:
        return self.forward, self.backward, self.again

    @property
    def tasks(self) -> tuple[float, float, float]:
        """Seconds of a forward, and of the two halves of the backward: of inputs, and of weights."""
        weights = self.backward.weight_products
        return self.forward.total, self.again.total + self.backward.total - weights, weights


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step, by term; those of microbatches are of the stage that computes longest.

    Attributes:
        products, attention, pointwise, tp, cp, ep: as in `PassSeconds`, of all microbatches.
        recomputation: forwards that backward computes again.
        bubble: waiting of that stage for others, and messages, by the simulated schedule.
        reduction: collectives of gradients, and of the weights of ZeRO-1, with packing of their buckets.
        optimizer: the optimizer's step, and the norm of the gradients.
    """

    products: float
    attention: float
    pointwise: float
    tp: float
    cp: float
    ep: float
    recomputation: float
    bubble: float
    reduction: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


# --- parts of the model, of one microbatch


def layer_seconds(
    workload: Workload, block: Block, sizes: RankSizes, cluster: Cluster, recompute: str, compiled: bool
) -> PartSeconds:
    """Returns the seconds of a layer."""
    local = workload.local_sizes(sizes.tp, sizes.ep)
    products, accumulated = 0.0, 0
    for weight in block.weights:
        shape = weight.local(local)
        accumulated += prod(shape) * weight.number
        if weight.products:
            products += weight.number * _product(weight, shape, sizes, cluster)
    calls, moved = _pointwise(workload, block, sizes, compiled)
    forward_pointwise = moved / cluster.bandwidth + calls * cluster.launch
    # Gradients of weights are added to those of earlier microbatches: read both, write one.
    added = 3 * accumulated * sizes.item / cluster.bandwidth
    attention = _attention(workload, sizes, cluster)
    there, back = _collectives(layer_traffic(workload, block, sizes), sizes, cluster)
    forward = PassSeconds(products, attention, forward_pointwise, *there)
    backward = PassSeconds(
        2 * products, 2.5 * attention, 2 * forward_pointwise + added, *back, weight_products=products + added
    )
    again = PassSeconds()
    if recompute == "full":
        again = forward
    elif recompute == "norms":
        inner, rows = workload.inner_norms(block, sizes.tp)
        is_one = compiled or block.fused_norms
        elements = block.norms * sizes.shard_tokens * workload.hidden + sizes.tokens * inner
        calls = (block.norms + (2 if rows else 0)) * _norm_calls(is_one)
        again = PassSeconds(
            pointwise=_norm_bytes(sizes, is_one) * elements / cluster.bandwidth + calls * cluster.launch
        )
    return PartSeconds(forward, backward, again)


def _product(weight: Weight, shape: Sequence[int], sizes: RankSizes, cluster: Cluster) -> float:
    rows, columns = shape[-2:]
    tokens = sizes.tokens * weight.products  # those of all ep ranks, spread evenly over their experts
    of_weight = prod(shape)
    flops = 2 * tokens * rows * columns
    moved = (tokens * (rows + columns) + of_weight) * sizes.item
    return flops / cluster.speed(sizes.dtype) + moved / cluster.bandwidth + cluster.launch


def _attention(workload: Workload, sizes: RankSizes, cluster: Cluster) -> float:
    heads, _ = workload.rank_heads(sizes.tp)
    area = sizes.micro_batch * sizes.seq_len**2 / sizes.cp / 2  # causal; zig-zag order shares it out
    flops = 2 * area * heads * (workload.key_dim + workload.value_dim)
    return flops / (cluster.speed(sizes.dtype) * cluster.attention) + cluster.launch


def _norm_bytes(sizes: RankSizes, compiled: bool) -> int:
    """Bytes that a norm reads and writes per element: in float32, with each operation by itself or all in one."""
    item = sizes.item
    if compiled:
        return 2 * item
    cast = item + 4 if item < 4 else 0
    return cast + 8 + 4 + 8 + (4 + item if item < 4 else 0) + 2 * item


def _norm_calls(compiled: bool) -> int:
    return 1 if compiled else 7


def _pointwise(workload: Workload, block: Block, sizes: RankSizes, compiled: bool) -> tuple[int, float]:
    """Returns the number of calls outside of products in a layer's forward, and the bytes that they read and write."""
    item, hidden = sizes.item, workload.hidden
    rotated = sum(workload.rank_heads(sizes.tp)) * workload.key_dim
    is_one = compiled or block.fused_norms
    # Per element of the residual stream: norms, additions.
    between = block.norms * _norm_bytes(sizes, is_one) + 2 * 3 * item
    inside = (3 if compiled else 5) if block.gated else 2  # gate and up are read, and a product is written
    of_rotation = 2 if compiled else 10
    moved: float = sizes.shard_tokens * hidden * between
    moved += sizes.tokens * (block.intermediate / sizes.tp * inside + rotated * of_rotation) * item
    calls = block.norms * _norm_calls(is_one) + (4 if compiled else 14)
    elements, rows = workload.inner_norms(block, sizes.tp)
    if rows:  # of queries and of keys
        moved += sizes.tokens * elements * _norm_bytes(sizes, compiled)
        calls += 2 * _norm_calls(compiled)
    if block.experts:  # rows are put in the order of their experts, and back
        moved += sizes.tokens * workload.experts_per_token * hidden * 6 * item
        calls += 12
    return calls, moved


def _collectives(
    sent: Iterable[Sent], sizes: RankSizes, cluster: Cluster
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Returns the seconds over tp, cp and ep, in forward and in backward."""
    there, back = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0)
    for verb, axis, nbytes, forward, backward in sent:
        name, size, stride = _group(axis, sizes)
        seconds = cluster.collective(verb, nbytes, size, stride)
        there[name] += forward * seconds
        back[name] += backward * seconds
    return (there["tp"], there["cp"], there["ep"]), (back["tp"], back["cp"], back["ep"])


def _group(axis: str, sizes: RankSizes) -> tuple[str, int, int]:
    """Returns the axis, the number of ranks and the distance between them, of an axis or a part of one."""
    name = axis[:2]
    size, stride = {"tp": (sizes.tp, 1), "cp": (sizes.cp, sizes.tp), "ep": (sizes.ep, sizes.tp)}[name]
    if "%" in axis:
        size = int(axis[3:])
    elif "/" in axis:
        part = int(axis[3:])
        size, stride = size // part, stride * part
    return name, size, stride


def ends_seconds(
    workload: Workload, sizes: RankSizes, cluster: Cluster, fused: bool, compiled: bool
) -> tuple[PartSeconds, PartSeconds]:
    """Returns the seconds of the embedding, and of the last norm, the head and the loss."""
    local = workload.local_sizes(sizes.tp)
    shape = workload.head.local(local)
    rows = sizes.tokens * workload.hidden * sizes.item
    added = 3 * prod(shape) * sizes.item / cluster.bandwidth
    there, back = _collectives(embedding_traffic(workload, sizes), sizes, cluster)
    first = PartSeconds(
        PassSeconds(0.0, 0.0, 2 * rows / cluster.bandwidth + 4 * cluster.launch, *there),
        PassSeconds(0.0, 0.0, 2 * rows / cluster.bandwidth + added + 2 * cluster.launch, *back),
    )
    there, back = _collectives(head_traffic(workload, sizes, fused), sizes, cluster)
    product = _product(workload.head, shape, sizes, cluster)
    norm = _norm_bytes(sizes, compiled) * sizes.shard_tokens * workload.hidden / cluster.bandwidth
    logits = sizes.tokens * shape[0]
    forward_logits = logits * 3 * sizes.item / cluster.bandwidth + 8 * cluster.launch
    backward_logits = logits * 3 * sizes.item / cluster.bandwidth + 4 * cluster.launch
    if fused:  # forward computes the gradients of its chunk of logits
        forward = PassSeconds(3 * product, 0.0, norm + forward_logits + backward_logits, *there)
        backward = PassSeconds(0.0, 0.0, 2 * norm + added + 2 * rows / cluster.bandwidth, *back)
    else:
        forward = PassSeconds(product, 0.0, norm + forward_logits, *there)
        backward = PassSeconds(
            2 * product, 0.0, 2 * norm + added + backward_logits, *back, weight_products=product + added
        )
    return first, PartSeconds(forward, backward)


# --- a step


def message_seconds(workload: Workload, layout: Layout, sizes: RankSizes, cluster: Cluster) -> float:
    """Returns the seconds of a message between stages, by the slowest link between any two that follow one another."""
    if layout.pp == 1:
        return 0.0
    stride = layout.tp * layout.cp * layout.dp
    return cluster.collective("send", message_bytes(workload, sizes), layout.pp, stride)


def reduction_seconds(
    sent: Iterable[Sent],
    numel: int,
    layout: Layout,
    sizes: RankSizes,
    cluster: Cluster,
    beside: Mapping[str, float] | None = None,
) -> float:
    """Returns the seconds of a stage's collectives after the last backward, and of packing their buckets.

    Args:
        beside: seconds of computing beside which all collectives of a verb but one pass, by verb; None: of none.
    """
    data = layout.dp * layout.cp
    groups = {
        "tp": (layout.tp, 1),
        "dp,cp": (data, layout.tp),
        "edp": (layout.world_size // (layout.tp * layout.pp * layout.ep), layout.tp * layout.ep),
        "pp_tied": (2, max(1, layout.world_size - layout.world_size // layout.pp)),
    }
    totals: dict[tuple[str, str], list[int]] = {}
    for verb, axis, nbytes, number, _ in sent:
        total = totals.setdefault((verb, axis), [0, 0])
        total[0] += number * nbytes
        total[1] += number
    seconds, left = 0.0, dict(beside or {})
    for (verb, axis), (nbytes, number) in totals.items():  # seconds are affine in the bytes
        size, stride = groups[axis]
        bucket = cluster.collective(verb, nbytes / number, size, stride)
        hidden = min((number - 1) * bucket, left.get(verb, 0.0))
        left[verb] = left.get(verb, 0.0) - hidden
        seconds += number * bucket - hidden
    if data > 1:
        seconds += 4 * numel * sizes.item / cluster.bandwidth  # into the buckets, and out of them
        seconds += cluster.collective("all_reduce", 8, data, sizes.tp)  # the number of labels
    return seconds


def optimizer_seconds(numel: int, sharded: float, layout: Layout, sizes: RankSizes, cluster: Cluster) -> float:
    """Returns the seconds of AdamW's step.

    It reads master, gradient and two moments, writes master and moments, and, of a low precision, the weights; the norm
    of the gradients reads them, and clipping reads and writes them.

    Args:
        numel: elements of the stage's weights; `sharded`: of which this rank updates so many.
    """
    item = sizes.item
    moved = sharded * (7 * max(4, item) + (item if item < 4 else 0)) + sharded * 3 * max(4, item)
    moved += numel * item if layout.zero1 else 0
    seconds = moved / cluster.bandwidth
    if layout.world_size > 1:
        seconds += cluster.collective("all_reduce", 4, layout.world_size, 1)
    return seconds
