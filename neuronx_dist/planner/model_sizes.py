"""Sizes of a language model that the planner calculates with: its weights, by layer, and how tp divides each of them.

A model is an embedding, blocks of equal layers, a last norm and a head, maybe with other weights beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from ..model_shape import Heads, ModelShape, padded_heads
from .played_layers import PlayedLayers

__all__ = ["Block", "LocalSizes", "Weight", "Workload"]


class Weight(NamedTuple):
    """Equal parameters of a layer.

    Attributes:
        shape: `[rows, columns]`, of a vector `[rows]`, of experts `[experts, rows, columns]`.
        split: the dim that tp divides: "rows" or "columns", of vectors the one that they have; heads that may be
            padded, "query" (rows), "key_value" (rows), "heads" (columns); "vocab" (rows, padded); "": none, and under
            sequence parallelism its gradient is a part of a sum over tp; "partial": none, and it always is, as that of
            a norm of a rank's heads; "whole": none, and it never is.
        number: of these parameters in a layer.
        products: times that a token is multiplied by it: the experts of a token; 0: it is no matrix of a product.
    """

    shape: tuple[int, ...]
    split: str = ""
    number: int = 1
    products: int = 1

    @property
    def is_expert(self) -> bool:
        return len(self.shape) == 3

    def local(self, sizes: LocalSizes) -> tuple[int, ...]:
        """Returns the shape of a rank's shard."""
        return _local_shape(self, sizes)


class LocalSizes(NamedTuple):
    """Degrees that divide weights, and the heads after padding."""

    tp: int
    ep: int
    heads: Heads
    whole_heads: int
    whole_kv_heads: int


@lru_cache(maxsize=4096)
def _local_shape(weight: Weight, sizes: LocalSizes) -> tuple[int, ...]:
    shape = list(weight.shape)
    if weight.is_expert:
        shape[0] //= sizes.ep
    rows = 1 if weight.is_expert else 0
    if weight.split == "rows":
        shape[rows] //= sizes.tp
    elif weight.split == "columns":
        shape[-1] //= sizes.tp
    elif weight.split == "vocab":
        shape[rows] = -(-shape[rows] // sizes.tp)
    elif weight.split == "query":
        shape[0] = shape[0] // sizes.whole_heads * sizes.heads.heads // sizes.tp
    elif weight.split == "heads":
        shape[-1] = shape[-1] // sizes.whole_heads * sizes.heads.heads // sizes.tp
    elif weight.split == "key_value":
        shape[0] = shape[0] // sizes.whole_kv_heads * sizes.heads.kv_heads * sizes.heads.replicas // sizes.tp
    return tuple(shape)


@dataclass(frozen=True)
class Block:
    """Equal layers that follow one another.

    Attributes:
        layers: number of layers.
        weights: parameters of a layer.
        intermediate: width of the feed-forward layer, of all active experts together.
        gated: a feed-forward layer has a gate.
        norms: number of norms of `[tokens, hidden]`; `fused_norms`: each is one call, as torch's layer norm.
    """

    layers: int
    weights: tuple[Weight, ...]
    intermediate: int
    gated: bool = True
    norms: int = 2
    fused_norms: bool = False

    @property
    def num_parameters(self) -> int:
        """Number of parameters of a layer."""
        return sum(prod(weight.shape) * weight.number for weight in self.weights)

    @cached_property
    def experts(self) -> bool:
        return any(weight.is_expert for weight in self.weights)


@dataclass(frozen=True)
class Workload:
    """Sizes of a causal language model.

    Attributes:
        key_dim, value_dim: width of a head's queries and keys, and of its values.
        experts, experts_per_token: of a layer with experts; 0: none.
        shared_experts: a layer with experts has others too, which all tokens share.
        divides_attention: tp divides the heads; False: all tp ranks compute the same attention.
        tied: the head's weight is that of the embedding.
        fuses_loss: `hf.swap` can fuse the loss; False: the model scales its logits first.
        source: where the sizes stand.
        undivided: why tp is 1: weights whose outputs are gathered over tp, which is not counted, as those of Phi-3's
            qkv_proj; "": it need not be.
        pads_heads: heads are padded, and key/value heads replicated, where tp does not divide them.
        allows_sequence_parallel, allows_context_parallel: `hf.swap` accepts the model so.
        first, last: weights beside the embedding (learned positions), and of the norm before the head.
        head_bias: the head has one.
        is_cut_after_positions: weights beside the embedding see all tokens: under sequence parallelism the sequence is
            cut before the first layer, and gathered after the last one.
        bytes_of: bytes that its layers save, played; None: those of Llama's layers, in closed form.
    """

    name: str
    blocks: tuple[Block, ...]
    hidden: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    max_positions: int | None = None
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: bool = False
    divides_attention: bool = True
    source: str = ""
    fuses_loss: bool = True
    undivided: str = ""
    pads_heads: bool = True
    allows_sequence_parallel: bool = True
    allows_context_parallel: bool = True
    first: tuple[Weight, ...] = ()
    last: tuple[Weight, ...] | None = None
    head_bias: bool = False
    is_cut_after_positions: bool = False
    bytes_of: PlayedLayers | None = field(default=None, compare=False, repr=False)

    @property
    def layers(self) -> int:
        return sum(block.layers for block in self.blocks)

    @property
    def shape(self) -> ModelShape:
        """Returns the sizes that `Layout.check` reads."""
        sizes = (self.layers, self.hidden, self.heads, self.kv_heads, self.intermediate, self.vocab)
        return ModelShape(*sizes, self.max_positions, self.experts or None)

    @property
    def embedding(self) -> Weight:
        return Weight((self.vocab, self.hidden), "vocab", products=0)

    @property
    def head(self) -> Weight:
        return Weight((self.vocab, self.hidden), "vocab")

    @property
    def outside(self) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
        """Weights of the first stage before its layers, and of the last stage after its layers, without the head."""
        last = (Weight((self.hidden,), products=0),) if self.last is None else self.last
        return (self.embedding, *self.first), last

    @property
    def num_parameters(self) -> int:
        """Number of parameters; a tied weight counts once."""
        first, last = self.outside
        ends = sum(prod(weight.shape) * weight.number for weight in (*first, *last))
        ends += self.vocab * ((0 if self.tied else self.hidden) + self.head_bias)
        return ends + sum(block.layers * block.num_parameters for block in self.blocks)

    def divides(self, tp: int) -> bool:
        """Returns whether the layers can be divided over tp, heads and vocabulary padded where they may be."""
        if tp == 1:
            return True
        if self.undivided or self.intermediate % tp:
            return False
        if self.divides_attention and not self.pads_heads:
            heads = padded_heads(self.heads, self.kv_heads, tp)
            if heads.replicas > 1 or heads.pads(self.heads, self.kv_heads):
                return False
        return all(size % tp == 0 for size in self._divided)

    @cached_property
    def _divided(self) -> set[int]:
        """The sizes of weights that tp divides without padding."""
        dims = {"rows": -2, "columns": -1}
        return {
            weight.shape[max(-len(weight.shape), dims[weight.split])]
            for block in self.blocks
            for weight in block.weights
            if weight.split in dims
        }

    def local_sizes(self, tp: int, ep: int = 1) -> LocalSizes:
        heads = padded_heads(self.heads, self.kv_heads, tp if self.divides_attention else 1)
        return LocalSizes(tp, ep, heads, self.heads, self.kv_heads)

    def rank_heads(self, tp: int) -> tuple[int, int]:
        """Returns the query and key/value heads of a rank."""
        heads = self.local_sizes(tp).heads
        degree = tp if self.divides_attention else 1
        return heads.heads // degree, heads.kv_heads * heads.replicas // degree

    def inner_norms(self, block: Block, tp: int) -> tuple[int, int]:
        """Returns of the norms inside of attention the elements of a token on a rank, and the number of its rows.

        They normalise each head's queries and keys (Qwen 3), or the latent queries and keys (DeepSeek).
        """
        vectors = [weight for weight in block.weights if len(weight.shape) == 1]
        if any(weight.split == "partial" for weight in vectors):
            rows = sum(self.rank_heads(tp))
            return rows * self.key_dim, rows
        latent = [weight.shape[0] for weight in vectors if weight.split == "whole"]
        return sum(latent), len(latent)

    def layer_kinds(self) -> list[int]:
        """Returns the index of the block of each layer."""
        return [index for index, block in enumerate(self.blocks) for _ in range(block.layers)]

    def flops_per_token(self, seq_len: int) -> float:
        """Operations of the model per token, forward and backward: 6 per weight of a product, causal attention half."""
        weights = sum(
            block.layers * prod(weight.shape[-2:]) * weight.number * weight.products
            for block in self.blocks
            for weight in block.weights
        )
        attention = self.layers * self.heads * (self.key_dim + self.value_dim) * seq_len  # 2 products, half of s each
        return 6 * (weights + self.vocab * self.hidden) + 3 * attention
