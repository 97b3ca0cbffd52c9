"""`Workload`: the sizes of a language model that the planner calculates with, from a name, a config or a module.

workload_of("llama-70b").num_parameters      # 70553706496
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..model_shape import ModelShape
from ..nearest import nearest
from .counted import counted, fuses_loss, has_experts_or_latents
from .model_sizes import Block, Weight, Workload

__all__ = ["MODELS", "Block", "Weight", "Workload", "config_of", "workload_of"]

#: Share of the parameters of a model with experts or latent attention that its config may miss: a router's biases.
UNCOUNTED = 1e-3


def _vectors(hidden: int, number: int = 2) -> Weight:
    return Weight((hidden,), number=number, products=0)


def _dense(hidden: int, intermediate: int, *, gated: bool = True) -> tuple[Weight, ...]:
    return (
        Weight((intermediate, hidden), "rows", number=2 if gated else 1),
        Weight((hidden, intermediate), "columns"),
    )


def _experts(hidden: int, intermediate: int, experts: int, per_token: int) -> tuple[Weight, ...]:
    """The weights of transformers' experts: gate and up are one parameter."""
    return (
        Weight((experts, hidden), "whole"),
        Weight((experts, 2 * intermediate, hidden), "rows", products=per_token),
        Weight((experts, hidden, intermediate), "columns", products=per_token),
    )


def _attention(
    hidden: int, heads: int, kv_heads: int, dim: int, *, bias: bool = False, norms: bool = False, out_bias: bool = False
) -> tuple[Weight, ...]:
    weights = [
        Weight((heads * dim, hidden), "query"),
        Weight((kv_heads * dim, hidden), "key_value", number=2),
        Weight((hidden, heads * dim), "heads"),
    ]
    if bias:
        weights.append(Weight((heads * dim,), "query", products=0))
        weights.append(Weight((kv_heads * dim,), "key_value", number=2, products=0))
    if out_bias:
        weights.append(Weight((hidden,), products=0))
    if norms:
        weights.append(Weight((dim,), "partial", number=2, products=0))
    return tuple(weights)


def _latent_attention(
    hidden: int, heads: int, query_rank: int | None, kv_rank: int, nope: int, rope: int, value: int
) -> tuple[Weight, ...]:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), which transformers' plans do not divide over tp."""
    shapes: list[tuple[int, ...]] = [(heads * (nope + rope), hidden)]
    if query_rank:
        shapes = [(query_rank, hidden), (query_rank,), (heads * (nope + rope), query_rank)]
    shapes += [(kv_rank + rope, hidden), (kv_rank,), (heads * (nope + value), kv_rank), (hidden, heads * value)]
    return tuple(Weight(shape, "whole", products=len(shape) - 1) for shape in shapes)


def _llama(
    name: str, hidden: int, intermediate: int, layers: int, heads: int, dim: int, tied: bool, source: str
) -> Workload:
    block = Block(
        layers, (*_attention(hidden, heads, 8, dim), *_dense(hidden, intermediate), _vectors(hidden)), intermediate
    )
    return Workload(name, (block,), hidden, heads, 8, dim, dim, intermediate, 128256, tied, 131072, source=source)


def _qwen3(
    name: str, hidden: int, intermediate: int, layers: int, heads: int, tied: bool, experts: int = 0, kv_heads: int = 8
) -> Workload:
    attention = _attention(hidden, heads, kv_heads, 128, norms=True)
    if experts:
        feed_forward, width = _experts(hidden, intermediate, experts, 8), 8 * intermediate
    else:
        feed_forward, width = _dense(hidden, intermediate), intermediate
    block = Block(layers, (*attention, *feed_forward, _vectors(hidden)), width)
    return Workload(
        name,
        (block,),
        hidden,
        heads,
        kv_heads,
        128,
        128,
        intermediate,
        151936,
        tied,
        40960,
        experts,
        8 if experts else 0,
        source="arXiv:2505.09388; config.json of Qwen/Qwen3",
    )


def _mixtral(name: str) -> Workload:
    weights = (*_attention(4096, 32, 8, 128), *_experts(4096, 14336, 8, 2), _vectors(4096))
    block = Block(32, weights, 2 * 14336)
    source = "arXiv:2401.04088"
    return Workload(name, (block,), 4096, 32, 8, 128, 128, 14336, 32000, False, 32768, 8, 2, source=source)


def _deepseek_v3(name: str) -> Workload:
    attention = (*_latent_attention(7168, 128, 1536, 512, 128, 64, 128), _vectors(7168))
    experts = (*_experts(7168, 2048, 256, 8), *_dense(7168, 2048))  # and one that all tokens share
    blocks = (Block(3, (*attention, *_dense(7168, 18432)), 18432), Block(58, (*attention, *experts), 9 * 2048))
    source = "arXiv:2412.19437; without the layer that predicts a second token"
    return Workload(name, blocks, 7168, 128, 128, 192, 128, 18432, 129280, False, 163840, 256, 8, True, False, source)


_LLAMA3, _LLAMA32 = "arXiv:2407.21783, table 3", "config.json of meta-llama/Llama-3.2"

#: Models by name; a function makes the sizes.
MODELS: dict[str, Callable[[str], Workload]] = {
    "llama-1b": lambda name: _llama(name, 2048, 8192, 16, 32, 64, True, _LLAMA32),
    "llama-3b": lambda name: _llama(name, 3072, 8192, 28, 24, 128, True, _LLAMA32),
    "llama-8b": lambda name: _llama(name, 4096, 14336, 32, 32, 128, False, _LLAMA3),
    "llama-70b": lambda name: _llama(name, 8192, 28672, 80, 64, 128, False, _LLAMA3),
    "llama-405b": lambda name: _llama(name, 16384, 53248, 126, 128, 128, False, _LLAMA3),
    "qwen3-0.6b": lambda name: _qwen3(name, 1024, 3072, 28, 16, True),
    "qwen3-1.7b": lambda name: _qwen3(name, 2048, 6144, 28, 16, True),
    "qwen3-4b": lambda name: _qwen3(name, 2560, 9728, 36, 32, True),
    "qwen3-8b": lambda name: _qwen3(name, 4096, 12288, 36, 32, False),
    "qwen3-14b": lambda name: _qwen3(name, 5120, 17408, 40, 40, False),
    "qwen3-32b": lambda name: _qwen3(name, 5120, 25600, 64, 64, False),
    "qwen3-30b-a3b": lambda name: _qwen3(name, 2048, 768, 48, 32, False, 128, 4),
    "qwen3-235b-a22b": lambda name: _qwen3(name, 4096, 1536, 94, 64, False, 128, 4),
    "mixtral-8x7b": _mixtral,
    "deepseek-v3": _deepseek_v3,
}


def workload_of(model: Any) -> Workload:
    """Returns the sizes of a model.

    Args:
        model: a `Workload`; a name of `MODELS`; a Hugging Face config, the path of one or of its folder; or a module
            with a `config`, on meta too. The weights of a config are those of its module, made on meta.

    Raises:
        ValueError: there is no such model; `hf.swap` refuses it; or the planner cannot describe it. The message names
            what the planner does not know.
    """
    if isinstance(model, Workload):
        return model
    if isinstance(model, str) and model in MODELS:
        return MODELS[model](model)
    if isinstance(model, (str, Path)):
        return _of_path(Path(model))
    module = _module_of(model) if getattr(model, "config", None) is None else model
    if not has_experts_or_latents(module.config):
        return counted(module)
    workload, count = _of_config(module.config), sum(param.numel() for param in module.parameters())
    if abs(count - workload.num_parameters) > UNCOUNTED * count:
        raise ValueError(
            f"plan: {type(module).__name__} has {count:,} parameters, and the sizes of its config give "
            f"{workload.num_parameters:,}: the planner knows experts as Mixtral's, Qwen 3's and DeepSeek's; pass a "
            "`Workload` with the weights of its layers"
        )
    return workload


def _of_path(path: Path) -> Workload:
    if not path.is_dir() and path.suffix != ".json":
        close = nearest(str(path), MODELS)
        raise ValueError(
            f"there is no model {str(path)!r}: pass one of {', '.join(MODELS)}, or a folder with a config.json; "
            f"nearest: {close}"
        )
    folder = path.absolute() if path.is_dir() else path.absolute().parent
    return replace(workload_of(config_of(path)), name=folder.name)


def config_of(path: str | PathLike[str]) -> Any:
    """Returns the Hugging Face config of a folder or a file, with transformers' defaults for what it leaves out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: transformers cannot read it.
    """
    from transformers import AutoConfig

    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"there is no config {file}: pass the folder or config.json of a Hugging Face model")
    try:
        return AutoConfig.from_pretrained(file)
    except Exception as error:  # of any type, by what the file lacks
        text = " ".join(str(error).split())[:300]
        raise ValueError(f"{file} is no config that transformers reads: {text}") from error


def _module_of(config: Any) -> Any:
    """Returns the module of a config, on meta.

    Raises:
        ValueError: transformers builds no causal language model of it.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        name = type(config).__name__
        raise ValueError(f"plan: no causal language model can be built of {name}: {text}") from error


def _of_config(config: Any) -> Workload:
    """Returns the sizes of a model with experts or latent attention."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    shape = ModelShape.of(config)
    names = ("layers", "hidden", "heads", "intermediate", "vocab")
    missing = [name for name in names if getattr(shape, name) is None]
    if missing:
        raise ValueError(
            f"plan: the config {type(config).__name__} has no {missing[0]} (num_hidden_layers, hidden_size, "
            "num_attention_heads, intermediate_size, vocab_size are needed): pass the config of a causal language model"
        )

    def read(name: str, default: Any = None) -> Any:
        value = getattr(text, name, None)
        return default if value is None else value

    layers, hidden, heads, intermediate, vocab = (int(getattr(shape, name)) for name in names)
    kv_heads = int(shape.kv_heads or heads)
    key_dim = value_dim = int(read("head_dim") or hidden // heads)
    bias = bool(read("attention_bias", False))
    if read("kv_lora_rank"):
        nope, rope, value_dim = int(read("qk_nope_head_dim")), int(read("qk_rope_head_dim")), int(read("v_head_dim"))
        key_dim, kv_heads = nope + rope, heads
        attention = _latent_attention(
            hidden, heads, read("q_lora_rank"), int(read("kv_lora_rank")), nope, rope, value_dim
        )
    else:
        norms = str(read("model_type", "")).startswith("qwen3")
        attention = _attention(hidden, heads, kv_heads, key_dim, bias=bias, norms=norms, out_bias=bias)
    experts, per_token = int(shape.experts or 0), int(read("num_experts_per_tok", 0) or 0)
    norms_weight = _vectors(hidden)
    dense = Block(layers, (*attention, *_dense(hidden, intermediate), norms_weight), intermediate)
    blocks: tuple[Block, ...] = (dense,)
    if experts:
        width = int(read("moe_intermediate_size", intermediate))
        weights = [*attention, *_experts(hidden, width, experts, per_token), norms_weight]
        shared = int(read("n_shared_experts", 0) or 0)
        if shared:
            weights += _dense(hidden, shared * width)
        first = min(int(read("first_k_dense_replace", 0) or 0), layers)
        of_experts = Block(layers - first, tuple(weights), width * (per_token + shared))
        blocks = (replace(dense, layers=first), of_experts) if first else (of_experts,)
    return Workload(
        name=str(read("model_type", type(config).__name__)),
        blocks=tuple(block for block in blocks if block.layers),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        intermediate=intermediate,
        vocab=vocab,
        tied=bool(read("tie_word_embeddings", False)),
        max_positions=shape.max_positions,
        experts=experts,
        experts_per_token=per_token,
        shared_experts=bool(experts and read("n_shared_experts")),
        divides_attention=not read("kv_lora_rank"),
        source="config",
        fuses_loss=fuses_loss(config),
    )
