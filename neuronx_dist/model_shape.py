"""Sizes of a transformer that a layout has to divide, and the two rules of division.

Pure Python: planning, the model swap and the pipeline share them before any process group or tensor exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

__all__ = ["Heads", "ModelShape", "padded_heads", "stage_layers"]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal LM that a layout has to divide. None: missing in the config, and not checked."""

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    vocab: int | None = None
    max_positions: int | None = None
    experts: int | None = None

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Reads a Hugging Face config, or any object with its attribute names (`num_attention_heads`, ...)."""
        if isinstance(config, cls):
            return config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config

        def read(name: str) -> int | None:
            try:
                value = getattr(text, name, None)
            except Exception:  # transformers' error for a size that differs between layers
                return None
            return value if isinstance(value, int) else None

        heads, hidden = read("num_attention_heads"), read("hidden_size")
        of_falcon = read("num_kv_heads") if getattr(text, "new_decoder_architecture", False) else None
        return cls(
            layers=read("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=read("num_key_value_heads") or of_falcon or heads,
            intermediate=read("intermediate_size"),
            vocab=read("vocab_size"),
            max_positions=read("max_position_embeddings"),
            experts=read("num_local_experts") or read("num_experts") or read("n_routed_experts"),
        )


class Heads(NamedTuple):
    """Heads of an attention layer, as distributed over tp ranks.

    Attributes:
        heads, kv_heads: query and key/value heads, padding included.
        replicas: number of adjacent ranks that hold each key/value head, at least 1.
    """

    heads: int
    kv_heads: int
    replicas: int

    def pads(self, heads: int, kv_heads: int) -> bool:
        """Returns whether there are more heads than the model has."""
        return (self.heads, self.kv_heads) != (heads, kv_heads)


# Typed: sizes that know their axes, which a type check counts with, are equal to plain ones, but not their results.
@lru_cache(maxsize=1024, typed=True)
def padded_heads(heads: int, kv_heads: int, tp: int) -> Heads:
    """Returns the heads after padding for `tp`: the smallest numbers that can be distributed.

    Key/value heads are padded to the next number that tp divides, or that divides tp: then tp / that number ranks hold
    each head, and its group of query heads is padded to a multiple of these ranks. Otherwise groups are not split. 9
    query heads over 3 key/value heads become 12 over 4 at tp=2, and 12 over 3, each on 2 ranks, at tp=6.
    """
    if not kv_heads:  # a config without a number of heads
        return Heads(heads, kv_heads, 1)
    padded_kv = next(number for number in count(kv_heads) if number % tp == 0 or tp % number == 0)
    replicas = max(1, tp // padded_kv)
    group = heads // kv_heads
    return Heads(padded_kv * -(-group // replicas) * replicas, padded_kv, replicas)


def stage_layers(num_layers: int, pp: int) -> list[range]:
    """Layers of each pipeline stage: `num_layers // pp`, one more for the last `num_layers % pp` (NxD's rule)."""
    base, extra = divmod(num_layers, pp)
    ends = [(stage + 1) * base + max(0, stage + 1 - (pp - extra)) for stage in range(pp)]
    return [range(start, end) for start, end in zip([0, *ends], ends)]
