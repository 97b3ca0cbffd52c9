"""FLOPs of training a token, and the FLOPs per second that devices reach at most.

A token takes 6 FLOPs for each parameter by which it is multiplied, 2 in forward and 4 in backward, and 12 · layers ·
(heads · head size) · sequence for attention (PaLM, arXiv:2204.02311, appendix B): scores and their products with values
over the whole sequence. By this convention neither causal masks, windows and borders of documents nor recomputation
change the number, so that MFUs of different programs can be compared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from .. import accelerator
from ..weights.shard_spec import spec_of

__all__ = ["PEAKS", "TrainingFlops", "peak_flops", "training_flops"]

#: Dense FLOPs per second in bfloat16 of one rank's device, from data sheets, by a part of the device's name.
PEAKS = {
    "A100": 312e12,
    "H100": 989e12,  # SXM; others by their longer names
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "trn1": 95e12,  # a NeuronCore-v2, of two in a chip
    "trn2": 83.4e12,  # a NeuronCore-v3, of eight in a chip; a logical core of two has twice as much
    "v4": 275e12,
    "v5e": 197e12,
    "v5p": 459e12,
}


class TrainingFlops(NamedTuple):
    """FLOPs of forward and backward of one token; `str()` shows the formula with its numbers.

    Attributes:
        parameters: number of parameters of the model; a tied weight counts once.
        active: those by which a token is multiplied: without tables of embeddings, which it reads, and of experts the
            share that a token takes.
        layers, width, seq_len: of attention; `width` is the heads times their size.
    """

    parameters: int
    active: int
    layers: int
    width: int
    seq_len: int

    @property
    def per_token(self) -> int:
        return 6 * self.active + 12 * self.layers * self.width * self.seq_len

    def __str__(self) -> str:
        attention = f"12 · {self.layers} layers · {self.width:,} · {self.seq_len:,} tokens"
        return (
            f"FLOPs per token: 6 · {self.active:,} of {self.parameters:,} parameters + {attention} = {self.per_token:,}"
        )


def training_flops(model: nn.Module, seq_len: int, *, config: Any = None) -> TrainingFlops:
    """Counts the FLOPs of training a token of a transformer, before its layers are sharded; on meta, too.

    Args:
        seq_len: tokens of a sequence.
        config: of the model, with the names of Hugging Face's configs; None: `model.config`.

    Raises:
        ValueError: the model is sharded already, or experts without the number that a token takes.
    """
    config = model.config if config is None else config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tables -= {id(getattr(head, "weight", None))}
    counts = {"all": 0, "tables": 0, "experts": 0}
    for name, param in model.named_parameters():
        if spec_of(param).is_sharded:
            raise ValueError(
                f"{name} {list(param.shape)} is a shard: call training_flops before hf.swap, or with the model on meta "
                "(`with torch.device('meta'): AutoModelForCausalLM.from_config(config)`)"
            )
        counts["all"] += param.numel()
        counts["tables"] += param.numel() * (id(param) in tables)
        counts["experts"] += param.numel() * (".experts." in name)
    active = counts["all"] - counts["tables"]
    if counts["experts"]:
        experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts")
        taken = _first(text, "num_experts_per_tok", "num_experts_per_token", "moe_topk")
        if not (experts and taken):
            raise ValueError(
                f"the config of {type(model).__name__} does not say how many of its experts a token takes "
                f"(num_experts_per_tok={taken} of num_experts={experts}): pass a config with both"
            )
        active -= counts["experts"] - counts["experts"] * taken // experts
    heads = _first(text, "num_attention_heads", "n_head") or 0
    head_size = _first(text, "head_dim") or (_first(text, "hidden_size", "n_embd") or 0) // max(1, heads)
    if value_size := _first(text, "v_head_dim"):  # latent attention: scores and values have sizes of their own
        scores = (_first(text, "qk_nope_head_dim") or 0) + (_first(text, "qk_rope_head_dim") or 0)
        head_size = (scores + value_size) // 2
    layers = _first(text, "num_hidden_layers", "n_layer") or 0
    return TrainingFlops(counts["all"], active, layers, heads * head_size, seq_len)


def peak_flops(name: str | None = None) -> float | None:
    """Returns the peak of a device in FLOPs per second, None where it is not known.

    Args:
        name: of the device, such as "H100" or "trn2"; None: this machine's accelerator.
    """
    if name is None:
        module = accelerator.module_of(accelerator.current_type() or "cpu")
        if not hasattr(module, "get_device_name"):
            return None
        name = str(module.get_device_name())
    names = [known for known in PEAKS if known.lower() in name.lower()]
    return PEAKS[max(names, key=len)] if names else None


def _first(config: Any, *names: str) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)
