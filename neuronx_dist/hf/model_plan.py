"""The sharding of a Hugging Face model, before a layout is chosen, and as a list of `LayerPlan` at a layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..model_shape import padded_heads
from ..parallel_layers.replace import LayerPlan
from ..sharded_functions.vocabulary import padded_vocabulary
from .words import LAYER_STYLES

__all__ = [
    "ATTENTION",
    "FUSABLE",
    "LOCAL_OUTPUT",
    "Derived",
    "ModelPlan",
    "UnsupportedModelError",
    "attentions_of",
    "is_layer",
    "islands_of",
    "leaf_of",
    "parent_of",
    "stack_of",
    "stacks_of",
    "surroundings",
    "transformer_layer_class",
]

# Sibling columns with one input; these names mean the same in every architecture that uses them.
FUSABLE: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"), ("q", "k", "v"),
    ("wi_0", "wi_1"), ("q_lin", "k_lin", "v_lin"),
)  # fmt: skip
_CROSS = ("cross", "encoder_attn", "EncDec")  # attention whose keys and values have another input
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_KEY_VALUE = ("k_proj", "v_proj")
_OF_HEADS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "query",
    "q",
    "q_lin",
    "query_key_value",
    "qkv_proj",
    "c_attn",
    "q_b_proj",
    "kv_b_proj",
)


class UnsupportedModelError(ValueError):
    """A model whose layers the swap cannot shard; the message names the model and the layers."""


@dataclass(frozen=True)
class Derived:
    """Layers, attributes and random numbers as a module's own forward uses them, at one tp degree (`derived.py`).

    Attributes:
        words: by the qualified name of a module or of a bare parameter.
        attributes: by module, numbers in attributes that a rank changes (numbers of heads), with its own.
        siblings: by column layer the others that are called on the same tensors.
        random: modules that draw random numbers for shards only; `random_between`: those that do so between their
            columns and row layers, and elsewhere for whole values; `draws_for_whole`: some are for whole values.
        local_logits: forward takes logits `[.., vocab/tp]`.
    """

    words: dict[str, str]
    attributes: dict[str, dict[str, int]]
    siblings: dict[str, tuple[str, ...]]
    random: tuple[str, ...]
    random_between: tuple[str, ...]
    draws_for_whole: bool
    local_logits: bool


@dataclass(frozen=True)
class ModelPlan:
    """The sharding of a model's layers, before a layout is chosen.

    Attributes:
        styles: by the qualified name of a module: a style of `words.py`.
        embedding, head: the vocabulary's input and output layers; "": the model has none that is sharded.
        heads, kv_heads: query and key/value heads of an attention layer.
        parameters: styles by the qualified name of a bare parameter.
        tied: other embeddings with the weight of the embedding.
        local_logits: the head's logits stay `[batch, seq, vocab/tp]`, for the loss on vocabulary-parallel ones.
        derived: what was derived from the model's forward; None: the plan is one of words.
    """

    styles: dict[str, str]
    embedding: str
    head: str
    heads: int
    kv_heads: int
    parameters: dict[str, str] = field(default_factory=dict)
    tied: tuple[str, ...] = ()
    local_logits: bool = True
    derived: Derived | None = None

    @property
    def regions(self) -> tuple[str, ...]:
        """The modules between a column's input and a row's output: attentions and MLPs."""
        local = [name for name, style in self.styles.items() if style in LOCAL_OUTPUT]
        return tuple(dict.fromkeys(parent for parent in map(parent_of, local) if not is_layer(parent)))

    def layers(self, model: Any, tp: int, *, sequence_parallel: bool = False) -> list[LayerPlan]:
        """The plan of each layer at a layout: sizes padded for `tp`, siblings fused, options set."""
        layers = []
        islands = islands_of(model, self) if sequence_parallel else ()
        is_partial = sequence_parallel and not surroundings(model, self)
        gathered = {"sequence_parallel_enabled": sequence_parallel, "sequence_dimension": 1}
        if self.embedding:
            rows = padded_vocabulary(model.get_submodule(self.embedding).num_embeddings, tp)
            collected = {"collect_output": not is_partial}
            layers += [LayerPlan(name, "embedding", rows, (), collected) for name in (self.embedding, *self.tied)]
        for name, style in self.styles.items():
            if style in LAYER_STYLES:
                in_sequence = sequence_parallel and not any(f"{name}.".startswith(f"{root}.") for root in islands)
                layers.append(self._layer(model, name, style, tp, in_sequence))
            elif style == "partial_gradient":
                layers.append(LayerPlan(name, style))
        if self.head:
            columns = padded_vocabulary(model.get_submodule(self.head).out_features, tp)
            options = gathered if is_partial else {**gathered, "sequence_parallel_enabled": False}
            options = options if self.local_logits else {"gather_output": True}
            layers.append(LayerPlan(self.head, "column", columns, (), options))
        return layers

    def _layer(self, model: nn.Module, name: str, style: str, tp: int, in_sequence: bool) -> LayerPlan:
        layer: Any = model.get_submodule(name)
        base, options = LAYER_STYLES[style]
        if base.startswith("embedding"):
            return LayerPlan(name, base, None, (), options)
        # A layer's own projections (OPT's `fc1`) may get `[batch * seq, hidden]`: each token is computed by itself.
        dim = 0 if is_layer(parent_of(name)) else 1
        gathered = {"sequence_parallel_enabled": in_sequence, "sequence_dimension": dim}
        is_conv = type(layer).__name__ == "Conv1D"
        if base == "row":
            padded, group = self._padding(name, style, layer.nx if is_conv else layer.in_features, tp)
            chosen = options if style == "split_row" else {**gathered, **options}
            return LayerPlan(name, "transposed_row" if is_conv else base, padded, (), chosen, group)
        if style == "gathered_column":
            return LayerPlan(name, base, layer.out_features, (), options)
        padded, group = self._padding(name, style, layer.nf if is_conv else layer.out_features, tp)
        heads = padded_heads(self.heads, self.kv_heads, tp)
        copied = {"replicas": heads.replicas} if leaf_of(name) in _KEY_VALUE and heads.replicas > 1 else {}
        where = gathered if in_sequence and dim == 0 else {"input_is_replicated": in_sequence}
        siblings = () if is_conv else self._siblings(model, name)
        kind = "transposed_column" if is_conv else base
        return LayerPlan(name, kind, padded, siblings, {**where, **options, **copied}, group)

    def _siblings(self, model: nn.Module, name: str) -> tuple[str, ...]:
        """The other column layers on the same input, which can share one input gradient: q, k, v and gate, up."""
        if self.derived is not None:
            return self.derived.siblings.get(name, ())
        region, _, leaf = name.rpartition(".")
        for leaves in FUSABLE if not any(word in region for word in _CROSS) else ():
            group = [f"{region}.{sibling}" for sibling in leaves]
            if leaf in leaves and all(self.styles.get(sibling) == "column" for sibling in group):
                layers: list[Any] = [model.get_submodule(sibling) for sibling in group]
                if len({layer.bias is None for layer in layers}) == 1:
                    return tuple(sibling for sibling in group if sibling != name)
        return ()

    def _padding(self, name: str, style: str, size: int, tp: int) -> tuple[int, tuple[int, int] | None]:
        """Sharded size of layer `name` after heads are padded for `tp`, and the sizes of a group with padding inside.

        Attention projections grow, all else stays.
        """
        heads, kv_heads, _ = padded = padded_heads(self.heads, self.kv_heads, tp)
        if style not in ("column", "row") or not padded.pads(self.heads, self.kv_heads):
            return size, None
        if leaf_of(name) in _KEY_VALUE:
            return size // self.kv_heads * kv_heads, None
        if parent_of(name) in self.attentions:  # queries and the output
            padded_size = size // self.heads * heads
            group = (size // self.kv_heads, padded_size // kv_heads)
            return padded_size, group if group[0] != group[1] else None
        return size, None

    @property
    def attentions(self) -> tuple[str, ...]:
        """The regions that are attentions, of whose heads each rank has a part."""
        queries = attentions_of(self.styles)
        return tuple(region for region in self.regions if region in queries)

    def has_plain_attention(self, region: str) -> bool:
        """Returns whether an attention has one projection each for queries, keys, values and the output."""
        inside = {name: style for name, style in self.styles.items() if parent_of(name) == region}
        columns = {leaf_of(name) for name, style in inside.items() if style == "column"}
        return columns == set(ATTENTION[:3]) and list(inside.values()).count("row") == 1


def attentions_of(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the modules that are attentions, by the names of their projections among `names`."""
    return tuple(dict.fromkeys(parent_of(name) for name in names if leaf_of(name) in _OF_HEADS))


LOCAL_OUTPUT = ("column", "packed_column", "packed_column_3")


def leaf_of(name: str) -> str:
    return name.rpartition(".")[2]


def parent_of(name: str) -> str:
    return name.rpartition(".")[0]


def stack_of(name: str) -> str:
    """The name of the `nn.ModuleList` of layers that a module is in: what is before the first number; "": none."""
    parts = name.split(".")
    depth = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[:depth])


def stacks_of(plan: ModelPlan) -> list[str]:
    """The names of the lists of layers with something sharded inside."""
    return [stack for stack in dict.fromkeys(map(stack_of, (*plan.styles, *plan.parameters))) if stack]


def is_layer(name: str) -> bool:
    """Returns whether this is the name of a complete layer, such as `model.layers.3`."""
    return bool(stack_of(name)) and parent_of(name) == stack_of(name)


def islands_of(model: nn.Module, plan: ModelPlan) -> tuple[str, ...]:
    """Parts of layers that need the complete sequence, whose result is equal on all ranks, by qualified name.

    They are those whose layers gather their output, the experts with their router, and those with unsharded matrices.
    """
    planned = {**plan.styles, **plan.parameters}
    islands = []
    for stack in stacks_of(plan):
        for number, layer in model.get_submodule(stack).named_children():
            for name, child in layer.named_children():
                root = f"{stack}.{number}.{name}"
                inside = {key: planned[key] for key in planned if f"{key}.".startswith(f"{root}.")}
                strange = any(style not in _IN_SEQUENCE for style in inside.values())
                whole = any(
                    param.ndim > 1 and f"{root}.{key}" not in inside and parent_of(f"{root}.{key}") not in inside
                    for key, param in child.named_parameters()
                )
                if strange or whole:
                    islands.append(root)
    return tuple(islands)


_IN_SEQUENCE = (*LOCAL_OUTPUT, "row", "packed_row", "partial_gradient", "local_heads", "whole")


def surroundings(model: Any, plan: ModelPlan) -> list[str]:
    """Parts of the model that do not fit "an embedding, layers, a final norm and a head", of sequence parallelism.

    The names of layers before the first layer with weights, which would see partial sums, and of unknown ones after
    the last. Before it dropout and scaling are fine: the same for all ranks, and the same for a sum as for its parts.
    """
    stacks = stacks_of(plan)
    if not (plan.embedding and plan.head and plan.local_logits and len(stacks) == 1):
        return ["no sharded embedding and head around one list of layers"]
    layers, base = model.get_submodule(stacks[0]), parent_of(plan.embedding)
    strange, before = [], True
    for name, child in model.get_submodule(base).named_children():
        if child is layers:
            before = False
        elif name != leaf_of(plan.embedding) and (before or "norm" not in name.lower()):
            strange += [name] if any(True for _ in child.parameters()) else []
    return [*strange, "other layers"] if before else strange


def transformer_layer_class(model: Any) -> type[nn.Module]:
    """The class of a Hugging Face model's transformer layers, swapped or not; pipelines are cut between these."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return type(module[0])
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {count} transformer layers")
