"""The sharding of a Hugging Face model: transformers' `tp_plan`, or a row of ours, as a list of `LayerPlan`.

A new architecture is a row of `ARCHITECTURES`; a model that neither it nor transformers covers is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..model_shape import ModelShape, padded_heads
from ..nearest import nearest
from ..parallel_layers.replace import STYLES, LayerPlan
from ..sharded_functions.vocabulary import padded_vocabulary

__all__ = [
    "ARCHITECTURES",
    "ATTENTION",
    "ModelPlan",
    "UnsupportedModelError",
    "read_plan",
    "transformer_layer_class",
    "words_of",
]

# transformers' word -> ours.
_STYLES = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "partial_gradient"}
_HEAD_STYLES = ("colwise", "colwise_rep", "colwise_gather_output")
# Sibling columns with one input; these names mean the same in every architecture that uses them.
_FUSABLE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_KEY_VALUE = ("k_proj", "v_proj")

_LLAMA = {
    **{f"model.layers.*.self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
    **{f"model.layers.*.mlp.{name}": "colwise" for name in ("gate_proj", "up_proj")},
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
# Plans in the words of transformers, by model type, for architectures of which it has none.
ARCHITECTURES: dict[str, dict[str, str]] = {"stablelm": _LLAMA}


_OTHER_WAYS = (
    "Without swap, pipelines (NxDPPModel) and data parallelism take the model as it is, and neuronx_dist.parallelize "
    'shards any module; with swap, plan={"name.of.*.a.layer": "colwise", ...} gives the style of each torch.nn.Linear'
)


class UnsupportedModelError(ValueError):
    """A model whose layers the swap cannot shard; the message names the model and the layers."""


@dataclass(frozen=True)
class ModelPlan:
    """The sharding of a model's layers, before a layout is chosen.

    Attributes:
        styles: by qualified name: "column", "row" or "partial_gradient" (norms of local heads).
        embedding, head: the vocabulary's input and output layers.
        heads, kv_heads: query and key/value heads of an attention layer.
    """

    styles: dict[str, str]
    embedding: str
    head: str
    heads: int
    kv_heads: int

    @property
    def regions(self) -> tuple[str, ...]:
        """The modules between a column's input and a row's output: attentions and MLPs."""
        linear = [name for name, style in self.styles.items() if style in ("column", "row")]
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in linear))

    def layers(self, model: Any, tp: int, *, sequence_parallel: bool = False) -> list[LayerPlan]:
        """The plan of each layer at a layout: sizes padded for `tp`, siblings fused, options set."""
        gathered = {"sequence_parallel_enabled": sequence_parallel, "sequence_dimension": 1}
        column_options = {"input_is_replicated": sequence_parallel}
        table, head = model.get_submodule(self.embedding), model.get_submodule(self.head)
        rows, columns = (padded_vocabulary(size, tp) for size in (table.num_embeddings, head.out_features))
        layers = [LayerPlan(self.embedding, "embedding", rows, (), {"collect_output": not sequence_parallel})]
        replicas = padded_heads(self.heads, self.kv_heads, tp).replicas
        for name, style in self.styles.items():
            linear = model.get_submodule(name)
            if style == "column":
                siblings = self._siblings(model, name)
                padded, group = self._padding(name, linear.out_features, tp)
                copied = {"replicas": replicas} if _leaf(name) in _KEY_VALUE and replicas > 1 else {}
                layers.append(LayerPlan(name, style, padded, siblings, {**column_options, **copied}, group))
            elif style == "row":
                padded, group = self._padding(name, linear.in_features, tp)
                layers.append(LayerPlan(name, style, padded, (), gathered, group))
            else:
                layers.append(LayerPlan(name, style))
        return [*layers, LayerPlan(self.head, "column", columns, (), gathered)]

    def _siblings(self, model: nn.Module, name: str) -> tuple[str, ...]:
        """The other column layers on the same input, which can share one input gradient: q, k, v and gate, up."""
        region, _, leaf = name.rpartition(".")
        for leaves in _FUSABLE:
            group = [f"{region}.{sibling}" for sibling in leaves]
            if leaf in leaves and all(self.styles.get(sibling) == "column" for sibling in group):
                layers: list[Any] = [model.get_submodule(sibling) for sibling in group]
                if len({layer.bias is None for layer in layers}) == 1:
                    return tuple(sibling for sibling in group if sibling != name)
        return ()

    def _padding(self, name: str, size: int, tp: int) -> tuple[int, tuple[int, int] | None]:
        """Sharded size of layer `name` after heads are padded for `tp`, and the sizes of a group with padding inside.

        Attention projections grow, all else stays.
        """
        heads, kv_heads, _ = padded_heads(self.heads, self.kv_heads, tp)
        if _leaf(name) in _KEY_VALUE:
            return size // self.kv_heads * kv_heads, None
        if _leaf(name) in ATTENTION:
            padded = size // self.heads * heads
            group = (size // self.kv_heads, padded // kv_heads)
            return padded, group if group[0] != group[1] else None
        return size, None


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def transformer_layer_class(model: Any) -> type[nn.Module]:
    """The class of a Hugging Face model's transformer layers, swapped or not; pipelines are cut between these."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return type(module[0])
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {count} transformer layers")


def read_plan(model: nn.Module, words: Mapping[str, str] | None = None) -> ModelPlan:
    """The plan of a Hugging Face causal LM.

    Args:
        words: transformers' words by layer name, `*` for the number of a layer; None: those of transformers.

    Raises:
        ValueError: words for layers that the model has not, or that are no styles.
        UnsupportedModelError: it is none, transformers has no plan for it, or the plan leaves layers out or asks for a
            style that this swap has not; the layers are listed.
    """
    config: Any = getattr(model, "config", None)
    what = f"{type(model).__name__} (model type {getattr(config, 'model_type', 'unknown')!r})"
    get_input, get_output = (getattr(model, f"get_{side}_embeddings", None) for side in ("input", "output"))
    embedding, head = (get() if get is not None else None for get in (get_input, get_output))
    if config is None or embedding is None or head is None:
        raise UnsupportedModelError(
            f"{what} is not a Hugging Face causal LM: it needs a config, input embeddings and an output head"
        )
    names = {id(module): name for name, module in model.named_modules()}
    ends = {names[id(embedding)], names[id(head)]}
    if words is None:
        words = _words(model)
    else:
        _check_words(words, {_pattern(name) for name in names.values()} | set(names.values()), ends)

    styles = {name: style for name in names.values() if name not in ends and (style := _style(words, name)) is not None}
    if not styles:
        raise UnsupportedModelError(
            f"{what} has no tensor-parallel plan in transformers (its config's base_model_tp_plan); "
            f"these layers would stay unsharded: {_listed(_uncovered(model, {}, ends))}. {_OTHER_WAYS}"
        )
    problems = [f"{name} (not in the plan)" for name in _uncovered(model, styles, ends)]
    for name, style in styles.items():
        module = model.get_submodule(name)
        layer_type = STYLES[_STYLES[style]].layer_type if style in _STYLES else None
        if style not in _STYLES:
            problems.append(f"{name} (style {style!r})")
        elif layer_type is not None and type(module) is not layer_type:
            problems.append(f"{name} (a {type(module).__name__}, not a torch.nn.{layer_type.__name__})")
    if type(embedding) is not nn.Embedding:
        problems.append(f"{names[id(embedding)]} (a {type(embedding).__name__}, not a torch.nn.Embedding)")
    if type(head) is not nn.Linear or (_style(words, names[id(head)]) or "colwise") not in _HEAD_STYLES:
        problems.append(
            f"{names[id(head)]} (the head must be a torch.nn.Linear with one of the styles {', '.join(_HEAD_STYLES)})"
        )
    if problems:
        raise UnsupportedModelError(
            f"{what} cannot be swapped: its plan does not cover {_listed(problems)}. {_OTHER_WAYS}"
        )

    shape = ModelShape.of(config)
    if shape.heads is None or shape.kv_heads is None:
        raise UnsupportedModelError(f"{what}: its config has no num_attention_heads")
    return ModelPlan(
        styles={name: _STYLES[style] for name, style in styles.items()},
        embedding=names[id(embedding)],
        head=names[id(head)],
        heads=shape.heads,
        kv_heads=shape.kv_heads,
    )


def words_of(layers: Iterable[LayerPlan]) -> dict[str, str]:
    """The words that transformers uses for the styles of layers that are planned already."""
    words = {ours: theirs for theirs, ours in _STYLES.items()}
    return {layer.name: words[layer.style] for layer in layers if layer.style in words}


def _words(model: nn.Module) -> Mapping[str, str]:
    """Style of each layer, in transformers' words: from the model's `tp_plan`, or from a row of ours."""
    plan: dict[str, str] = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    config: Any = model.config
    return plan or ARCHITECTURES.get(config.model_type, {})


def _check_words(words: Mapping[str, str], known: Collection[str], ends: Collection[str]) -> None:
    for name, style in words.items():
        if name not in known:
            raise ValueError(
                f"the plan names {name}, but the model has no such layer; nearest: {nearest(name, sorted(known))}"
            )
        if name not in ends and style not in _STYLES:
            raise ValueError(f"the plan gives {name} the unknown style {style!r}; the styles are {', '.join(_STYLES)}")


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _style(words: Mapping[str, str], name: str) -> str | None:
    return words.get(name, words.get(_pattern(name)))


def _uncovered(model: nn.Module, styles: dict[str, str], ends: set[str]) -> list[str]:
    """Modules whose weights would stay unsharded, or be wrong: matrices, and any parameter next to sharded layers."""
    regions = {name.rpartition(".")[0] for name, style in styles.items() if style in ("colwise", "rowwise")}
    left_out = []
    for name, module in model.named_modules():
        if name in styles or name in ends:
            continue
        matrices = any(param is not None and param.ndim >= 2 for param in module._parameters.values())
        in_region = any(name == region or name.startswith(f"{region}.") for region in regions)
        if matrices or (in_region and any(param is not None for param in module._parameters.values())):
            left_out.append(name or type(module).__name__)
    return left_out


def _listed(names: list[str]) -> str:
    """Names with layer numbers folded, so that 32 equal layers are one entry."""
    return ", ".join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|\s|$)", "*", name) for name in names))
