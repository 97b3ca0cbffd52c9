"""What transformers says about sharding a model, its `tp_plan`: the facts that `swap` needs, or a refusal by name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..model_shape import ModelShape, padded_heads

__all__ = ["ATTENTION", "Plan", "UnsupportedModelError", "read_plan", "transformer_layer_class"]

_COLUMN, _ROW, _PARTIAL_GRADIENT = "colwise", "rowwise", "replicated_with_grad_allreduce"
_HEAD_STYLES = ("colwise", "colwise_rep", "colwise_gather_output")
# Sibling columns with one input; these names mean the same in every architecture that uses them.
_FUSABLE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class UnsupportedModelError(ValueError):
    """A model whose layers the swap cannot shard; the message names the model and the layers."""


@dataclass(frozen=True)
class Plan:
    """Qualified names of the modules to replace, and the head counts.

    Attributes:
        columns, rows: linear layers to shard by output and by input.
        partial: modules whose parameters are replicated but get only this rank's share of their gradients (norms of
        local heads).
        embedding, head: the vocabulary's input and output layers; `tied` if they share their weight.
        heads, kv_heads: query and key/value heads of an attention layer.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    partial: tuple[str, ...]
    embedding: str
    head: str
    tied: bool
    heads: int
    kv_heads: int

    @property
    def regions(self) -> tuple[str, ...]:
        """The modules between a column's input and a row's output: attentions and MLPs."""
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in (*self.columns, *self.rows)))

    def fused_groups(self, model: nn.Module) -> list[list[Any]]:
        """Column layers that get the same input and so can share one input gradient: q, k, v and gate, up."""
        groups = []
        for region in self.regions:
            for names in _FUSABLE:
                if not all(f"{region}.{name}" in self.columns for name in names):
                    continue
                layers: list[Any] = [model.get_submodule(f"{region}.{name}") for name in names]
                if len({layer.bias is None for layer in layers}) == 1:
                    groups.append(layers)
        return groups

    def padded_size(self, name: str, size: int, tp: int) -> int:
        """Sharded size of layer `name` once heads are padded for `tp`: attention projections grow, all else stays."""
        heads, kv_heads = padded_heads(self.heads, self.kv_heads, tp)
        last = name.rpartition(".")[2]
        if last in ATTENTION:
            old, new = (self.kv_heads, kv_heads) if last in ("k_proj", "v_proj") else (self.heads, heads)
            return size // old * new
        return size


def transformer_layer_class(model: Any) -> type[nn.Module]:
    """The class of a Hugging Face model's transformer layers, swapped or not: what a pipeline is cut between."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return type(module[0])
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {count} transformer layers")


def read_plan(model: nn.Module) -> Plan:
    """The plan of a Hugging Face causal LM.

    Raises:
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

    styles = {name: style for name in names.values() if name not in ends and (style := _style(model, name)) is not None}
    if not styles:
        raise UnsupportedModelError(
            f"{what} has no tensor-parallel plan in transformers (its config's base_model_tp_plan); "
            f"these layers would stay whole: {_listed(_uncovered(model, {}, ends))}"
        )
    problems = [f"{name} (not in the plan)" for name in _uncovered(model, styles, ends)]
    for name, style in styles.items():
        module = model.get_submodule(name)
        linear = style in (_COLUMN, _ROW)
        if not linear and style != _PARTIAL_GRADIENT:
            problems.append(f"{name} (style {style!r})")
        elif linear and type(module) is not nn.Linear:
            problems.append(f"{name} (a {type(module).__name__}, not a torch.nn.Linear)")
    if type(embedding) is not nn.Embedding:
        problems.append(f"{names[id(embedding)]} (a {type(embedding).__name__}, not a torch.nn.Embedding)")
    if type(head) is not nn.Linear or (_style(model, names[id(head)]) or _COLUMN) not in _HEAD_STYLES:
        problems.append(
            f"{names[id(head)]} (the head is to be a torch.nn.Linear with one of the styles {', '.join(_HEAD_STYLES)})"
        )
    if problems:
        raise UnsupportedModelError(f"{what} cannot be swapped, its plan does not cover: {_listed(problems)}")

    shape = ModelShape.of(config)
    if shape.heads is None or shape.kv_heads is None:
        raise UnsupportedModelError(f"{what}: its config has no num_attention_heads")
    return Plan(
        columns=tuple(name for name, style in styles.items() if style == _COLUMN),
        rows=tuple(name for name, style in styles.items() if style == _ROW),
        partial=tuple(name for name, style in styles.items() if style == _PARTIAL_GRADIENT),
        embedding=names[id(embedding)],
        head=names[id(head)],
        tied=embedding.weight is head.weight,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
    )


def _style(model: nn.Module, name: str) -> str | None:
    plan: dict[str, str] = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    return plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))


def _uncovered(model: nn.Module, styles: dict[str, str], ends: set[str]) -> list[str]:
    """Modules whose weights would stay whole, or be wrong: matrices, and any parameter next to sharded layers."""
    regions = {name.rpartition(".")[0] for name, style in styles.items() if style in (_COLUMN, _ROW)}
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
