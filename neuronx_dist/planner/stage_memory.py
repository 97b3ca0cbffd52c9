"""Bytes that a rank needs, by stage, in closed form; `planning.estimate_memory` plays them.

With T tokens of a microbatch on a rank, t of them between layers (T / tp under sequence parallelism), hidden size h,
feed-forward width f / tp, a and k elements of a token's query and key/value heads on this rank, and e bytes of an
element, a layer saves for backward

    norms, two          t (4 h + 4 + e h)       input in float32, its scale, the normalised input
    inputs of products  2 T e h
    attention           T e (2 a + 2 k), and 4 bytes for each head: queries, output, keys, values
    feed-forward        4 T e f / tp            gate, activation, up, product
    norms of heads      T (4 n + 4 r + e n)     of n elements in r rows: Qwen 3's queries and keys, DeepSeek's latents

With recomputation of a whole layer it saves its input, t e h. Layers of other models are played (`played_layers.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from .candidate import RankSizes
from .model_sizes import Block, Workload
from .traffic import chunk_tokens

__all__ = ["EndBytes", "LayerBytes", "StageBytes", "ends_bytes", "layer_bytes"]


class StageBytes(NamedTuple):
    """Bytes of a rank of one stage.

    Attributes:
        weights, gradients, optimizer: of the rank's shards; the optimizer's state has the master weights.
        activations: saved for backward, of all microbatches in flight.
        loss: logits, and gradients of the head that the fused loss computes in forward.
        temporary: of a layer's backward.
        messages: between stages.
        step: gradients of masters and temporary tensors of the optimizer.
        first_gradients: share of the gradients that exist when most activations do: 0 if no backward comes before.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    loss: float
    temporary: float
    messages: float
    step: float
    first_gradients: float = 1.0

    @property
    def peak(self) -> float:
        """Bytes at the peak: of forward and backward, or of the optimizer's step."""
        most = self.activations + self.messages + max(self.loss, self.temporary)
        return (
            self.weights
            + self.optimizer
            + max(self.first_gradients * self.gradients + most, self.gradients + self.step)
        )


class LayerBytes(NamedTuple):
    """Bytes of a layer for one microbatch.

    Attributes:
        saved: for backward.
        temporary: of its backward.
        halved: more in a backward's first half, which saves the gradients of the outputs of products for the second.
        between: held between the halves: those gradients, and the inputs of products and of norms' weights.
    """

    saved: float
    temporary: float
    halved: float
    between: float


def layer_bytes(workload: Workload, block: Block, sizes: RankSizes, recompute: str) -> LayerBytes:
    """Returns the bytes that a layer needs."""
    item, hidden = sizes.item, workload.hidden
    between, inside = sizes.shard_tokens, sizes.tokens
    local_heads, local_kv_heads = workload.rank_heads(sizes.tp)
    norms = 2 * between * (4 * hidden + 4 + item * hidden)
    inputs = 2 * inside * item * hidden
    of_head = workload.key_dim + workload.value_dim
    attention = inside * (item * of_head * (local_heads + local_kv_heads) + 4 * local_heads)
    width = block.intermediate // sizes.tp
    feed_forward = 4 * inside * item * width
    if block.experts:  # rows in the order of their experts, and their results
        feed_forward += 2 * inside * workload.experts_per_token * hidden * item
    elements, rows = workload.inner_norms(block, sizes.tp)
    inner = inside * ((4 + item) * elements + 4 * rows)
    if not workload.divides_attention:  # latent rows enter products; heads are joined of two parts each
        attention += inside * item * (elements + 2 * local_heads * workload.key_dim)
    saved = norms + inner + inputs + attention + feed_forward
    temporary = 2 * inside * width * item
    temporary += inside * hidden * (2 * item + sizes.summed_item) if sizes.tp > 1 else inside * hidden * item // 2
    of_inputs = of_head * local_kv_heads + workload.key_dim * local_heads + (1 + block.gated) * width
    halved = inside * item * (of_inputs + 4 * hidden)
    held = halved + inside * item * (2 * hidden + workload.value_dim * local_heads + width)
    held += block.norms * between * item * hidden
    if workload.bytes_of is not None:
        played = workload.bytes_of.bytes(sizes, "norms" if recompute == "norms" else "")
        if recompute == "full":
            return LayerBytes(between * item * hidden, played.saved + played.temporary, played.saved + halved, held)
        return LayerBytes(played.saved, played.temporary, halved, held)
    if recompute == "full":
        again = saved - (between * hidden * 4 if item >= 4 else 0)  # the first norm's input is the layer's
        return LayerBytes(between * item * hidden, again + temporary, again + halved, held)
    if recompute == "norms":
        kept = 2 * between * item * hidden + inside * item * elements
        return LayerBytes(saved - norms - inner + kept, temporary + norms / 2, halved + norms, held)
    return LayerBytes(saved, temporary, halved, held)


class EndBytes(NamedTuple):
    """Bytes of the last norm, the head and the loss.

    Attributes:
        saved: by the norm, for one microbatch.
        loss: most bytes of logits and gradients of the head.
        kept: those that a microbatch holds from its forward to its backward.
    """

    saved: float
    loss: float
    kept: float


def ends_bytes(workload: Workload, sizes: RankSizes, fused: bool) -> EndBytes:
    """Returns the bytes of the last norm, the head and the loss.

    The fused loss adds gradients of chunks of tokens in float32: of a low precision each is a product and a copy first.
    """
    item, hidden = sizes.item, workload.hidden
    columns = workload.head.local(workload.local_sizes(sizes.tp))[0]
    saved: float = sizes.shard_tokens * (4 * hidden + 4 + 2 * item * hidden)
    wide = max(4, item)
    played = None if workload.bytes_of is None else workload.bytes_of.bytes(sizes, "")
    if played is not None:
        saved = played.end
    if not fused and played is not None:
        return EndBytes(saved, played.loss, sizes.tokens * columns * item)
    if not fused:
        logits = sizes.tokens * columns
        return EndBytes(saved, logits * (item + wide) + sizes.tokens * hidden * item, logits * item)
    tokens = chunk_tokens(workload, sizes)
    of_inputs = sizes.tokens * hidden * item
    kept = columns * hidden * wide + of_inputs
    of_chunk = tokens * columns * item
    if item < 4:
        of_chunk += columns * hidden * (item + (wide if tokens < sizes.tokens else 0))
    gathered = of_inputs if sizes.sequence_parallel else 0
    return EndBytes(saved, kept + of_chunk + gathered, kept)
