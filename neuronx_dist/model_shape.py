"""The sizes of a transformer that a layout has to divide, and the two rules by which they are divided.

Pure Python: planning, the model swap and the pipeline agree on it before there is a process group or a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ModelShape", "padded_heads", "stage_layers"]


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a causal LM that a layout has to divide. None: the config does not say, and nothing is checked."""

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    vocab: int | None = None
    max_positions: int | None = None

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Read a Hugging Face config, or anything with its attribute names (`num_attention_heads`, ...)."""
        if isinstance(config, cls):
            return config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config

        def read(name: str) -> int | None:
            value = getattr(text, name, None)
            return value if isinstance(value, int) else None

        heads, hidden = read("num_attention_heads"), read("hidden_size")
        return cls(
            layers=read("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=read("num_key_value_heads") or heads,
            intermediate=read("intermediate_size"),
            vocab=read("vocab_size"),
            max_positions=read("max_position_embeddings"),
        )


def padded_heads(heads: int, kv_heads: int, tp: int) -> tuple[int, int]:
    """Query and key/value heads after padding for `tp`: key/value heads to a multiple of tp, query groups kept whole.

    9 query heads over 3 key/value heads become 12 over 4 at tp=2.
    """
    padded_kv = -(-kv_heads // tp) * tp
    return padded_kv * (heads // kv_heads), padded_kv


def stage_layers(num_layers: int, pp: int) -> list[range]:
    """Layers of each pipeline stage: `num_layers // pp`, one more for the last `num_layers % pp` (NxD's rule)."""
    base, extra = divmod(num_layers, pp)
    ends = [(stage + 1) * base + max(0, stage + 1 - (pp - extra)) for stage in range(pp)]
    return [range(start, end) for start, end in zip([0, *ends], ends)]
