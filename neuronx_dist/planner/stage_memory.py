"""Bytes that a rank needs, by stage, in closed form; `planning.estimate_memory` plays them.

With T tokens of a microbatch on a rank, t of them between layers (T / tp under sequence parallelism), hidden size h,
feed-forward width f / tp, a and k elements of a token's query and key/value heads on this rank, and e bytes of an
element, a layer saves for backward

    norms, two          t (4 h + 4 + e h)       input in float32, its scale, the normalised input
    inputs of products  2 T e h
    attention           T e (2 a + 2 k), and 4 bytes for each head: queries, output, keys, values
    feed-forward        4 T e f / tp            gate, activation, up, product

With recomputation of a whole layer it saves its input, t e h.
"""

from __future__ import annotations

from typing import NamedTuple

from .candidate import RankSizes
from .traffic import chunk_tokens
from .workload import Block, Workload

__all__ = ["StageBytes", "ends_bytes", "layer_bytes"]


class StageBytes(NamedTuple):
    """Bytes of a rank of one stage, at the peak of a step.

    Attributes:
        weights, gradients, optimizer: of all microbatches; the optimizer's state has the master weights.
        activations: saved for backward, of all microbatches in flight.
        loss: logits, and the gradient of the head that the fused loss keeps.
        temporary: of a layer's backward.
        buckets: of the reduction of gradients and of the optimizer's step.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    loss: float
    temporary: float
    buckets: float

    @property
    def peak(self) -> float:
        """Bytes at the peak: of forward and backward, or of the reduction and the optimizer's step."""
        held = self.weights + self.gradients + self.optimizer
        return held + max(self.activations + self.loss + self.temporary, self.buckets)


def layer_bytes(workload: Workload, block: Block, sizes: RankSizes, recompute: str) -> tuple[float, float]:
    """Returns the bytes that a layer saves for backward, and the temporary ones of its backward."""
    item, hidden = sizes.item, workload.hidden
    between, inside = sizes.shard_tokens, sizes.tokens
    heads = workload.local_sizes(sizes.tp).heads
    local_heads = heads.heads // sizes.tp
    local_kv_heads = heads.kv_heads * heads.replicas // sizes.tp
    norms = 2 * between * (4 * hidden + 4 + item * hidden)
    inputs = 2 * inside * item * hidden
    of_head = workload.key_dim + workload.value_dim
    attention = inside * (item * of_head * (local_heads + local_kv_heads) + 4 * local_heads)
    feed_forward = 4 * inside * item * block.intermediate // sizes.tp
    if block.experts:  # rows in the order of their experts, their results, and the weights of the router
        feed_forward += 2 * inside * workload.experts_per_token * hidden * item
    saved = norms + inputs + attention + feed_forward
    temporary = inside * item * (3 * block.intermediate // sizes.tp + 2 * hidden)
    if recompute == "full":
        return between * item * hidden, saved + temporary
    if recompute == "norms":
        return saved - norms + 2 * between * item * hidden, temporary + norms / 2
    return saved, temporary


def ends_bytes(workload: Workload, sizes: RankSizes, fused: bool) -> tuple[float, float]:
    """Returns the bytes saved by the last norm and the head, and those of logits and loss."""
    item, hidden = sizes.item, workload.hidden
    columns = workload.head.local(workload.local_sizes(sizes.tp))[0]
    saved = sizes.shard_tokens * (4 * hidden + 4 + 2 * item * hidden)
    wide = max(4, item)
    if fused:
        tokens = chunk_tokens(workload, sizes)
        return saved, columns * hidden * wide + sizes.tokens * hidden * wide + tokens * columns * 2 * item
    return saved, sizes.tokens * (columns * (item + wide) + hidden * item)
