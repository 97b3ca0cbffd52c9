"""The plan of a Hugging Face model, read from transformers' `tp_plan`, a row of ours, or a user's words.

A new architecture is a row of `PLANS` in `words.py`; a model without a plan is refused by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from ..model_shape import ModelShape
from ..nearest import nearest
from ..parallel_layers.replace import STYLES, LayerPlan
from .model_plan import Derived, ModelPlan, UnsupportedModelError, is_layer, leaf_of, parent_of, stack_of
from .plan_consistency import LATENT, PER_HEAD, inconsistencies, regions_of
from .words import CORRECTIONS, LAYER_STYLES, WORDS, alternatives, plan_of_ours, refusal_of

__all__ = ["SAME_AS_LINEAR", "SCALED", "end_of", "read_plan", "words_of", "words_of_config"]

_HEAD_STYLES = ("column", "gathered_column", "whole")
# Subclasses of torch's layers with the same forward; `ScaledWordEmbedding`s multiply by a number afterwards.
SAME_AS_LINEAR = ("FalconLinear", "NonDynamicallyQuantizableLinear")
SCALED = "ScaledWordEmbedding"


_OTHER_WAYS = (
    "Without swap, pipelines (NxDPPModel) and data parallelism take the model as it is, and neuronx_dist.parallelize "
    'shards any module; with swap, plan={"name.of.*.a.layer": "colwise", ...} gives the style of each torch.nn.Linear, '
    '"replicate" of one that stays whole'
)

_PROOF = 'spmd.check(lambda: hf.swap(model, plan=plan), inputs, {"tp": 2}) proves a plan'


def read_plan(
    model: nn.Module,
    words: Mapping[str, str] | None = None,
    *,
    complete: bool = True,
    derived: Derived | None = None,
) -> ModelPlan:
    """The plan of a Hugging Face model.

    Args:
        words: transformers' words by layer name, `*` for the number of a layer; None: ours, or those of transformers.
        complete: words that are passed are to cover every matrix of the model.
        derived: what the model's forward says, whose words these are: they go together, and heads are not counted.

    Raises:
        ValueError: words for layers that the model has not, or that are no styles.
        UnsupportedModelError: it is none, there is no plan for it, or the plan leaves layers out between sharded ones,
            or has words that do not go together; the layers are listed.
    """
    config: Any = getattr(model, "config", None)
    what = f"{type(model).__name__} (model type {getattr(config, 'model_type', 'unknown')!r})"
    if config is None and derived is None:
        raise UnsupportedModelError(
            f"{what} is not a Hugging Face model, whose config a plan of words needs: "
            'hf.swap(model, plan="derived", inputs={...}) finds a plan in its forward, '
            "parallel_layers.replace.apply(model, layer_plans) replaces layers by name, and neuronx_dist.parallelize "
            "divides any module"
        )
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = (end_of(model, side) for side in ("input", "output"))
    weights = [end.weight for end in (embedding, head) if isinstance(getattr(end, "weight", None), nn.Parameter)]
    ends = {names[id(end)] for end in (embedding, head) if end is not None and id(end) in names}
    ends |= {names[id(m)] for m in model.modules() if any(m._parameters.get("weight") is weight for weight in weights)}
    modules, parameters = set(names.values()), {name for name, _ in model.named_parameters(remove_duplicate=False)}
    is_given = words is not None and complete
    if words is None:
        words = _words(model)
    elif complete:
        known = modules | parameters
        _check_words(words, known | {_pattern(name) for name in known}, ends)

    if head is not None and WORDS.get(_style(words, names.get(id(head), "")) or "") == "split_row":
        head = None  # a layer like others
        ends = {names[id(embedding)]} & ends if embedding is not None else set()
    styles = {name: word for name in names.values() if name not in ends and (word := _style(words, name)) is not None}
    if not is_given:
        styles |= dict.fromkeys(_norms_of_local_heads(model, styles), "replicated_with_grad_allreduce")
    bare = {
        name: word
        for name in parameters - modules
        if (word := words.get(name, words.get(_pattern(name)))) is not None and parent_of(name) not in ends
    }
    if not styles:
        raise UnsupportedModelError(
            f"{what} has no tensor-parallel plan in transformers (its config's base_model_tp_plan); "
            f"these layers would stay unsharded: {_listed(_uncovered(model, {}, ends, True))}. {_OTHER_WAYS}"
        )
    problems = [f"{name} (not in the plan)" for name in _uncovered(model, styles, ends, is_given, bare)]
    for name, word in (*styles.items(), *bare.items()):
        if refusal_of(word):
            problems.append(f"{name} (style {word!r})")
        elif name in styles and (misfit := _misfit(model.get_submodule(name), word)):
            problems.append(f"{name} ({misfit})")
    end_plan = _plan_of_ends(model, words, names, embedding, head, problems)
    if problems:
        raise UnsupportedModelError(
            f"{what} cannot be swapped: its plan does not cover {_listed(problems)}. {_OTHER_WAYS}"
        )
    if derived is None and (wrong := list(inconsistencies(model, styles, bare))):
        raise UnsupportedModelError(f"{what}: its plan would train it wrongly: {_listed(wrong, '; ')}. {_PROOF}")

    shape = ModelShape.of(config) if derived is None else ModelShape()
    if derived is not None:
        end_plan["local_logits"] = end_plan["local_logits"] and derived.local_logits
    plan = ModelPlan(
        styles={name: WORDS[word] for name, word in styles.items()},
        heads=shape.heads or 0,
        kv_heads=shape.kv_heads or 0,
        parameters={name: WORDS[word] for name, word in bare.items()},
        derived=derived,
        **end_plan,
    )
    if derived is None and plan.attentions and not (plan.heads and plan.kv_heads):
        raise UnsupportedModelError(f"{what}: its config has no num_attention_heads")
    return plan


def _norms_of_local_heads(model: nn.Module, styles: Mapping[str, str]) -> list[str]:
    """Norms of each head, and activations with numbers of their own, that a plan of transformers leaves out."""
    local = {parent_of(name) for name, word in styles.items() if word == "colwise" and not is_layer(parent_of(name))}
    found = []
    for name, module in model.named_modules():
        if parent_of(name) in local and leaf_of(name) in PER_HEAD and name not in styles:
            head_dim = getattr(model.get_submodule(parent_of(name)), "head_dim", 1)
            params = list(module.parameters())
            if params and all(param.ndim <= 1 and param.numel() in (1, head_dim) for param in params):
                found.append(name)
    return found


def end_of(model: Any, side: str) -> Any:
    """The vocabulary's layer at one end of a model; None: the model has none."""
    get = getattr(model, f"get_{side}_embeddings", None)
    try:
        return get() if get is not None else None
    except (NotImplementedError, AttributeError):  # models of images
        return None


def _plan_of_ends(
    model: Any, words: Mapping[str, str], names: Mapping[int, str], embedding: Any, head: Any, problems: list[str]
) -> dict[str, Any]:
    """Returns the fields of the plan for embedding and head, and adds what cannot be sharded to the problems."""
    chosen: dict[str, Any] = {"embedding": "", "head": "", "local_logits": _is_causal(model)}
    tied = head is not None and getattr(embedding, "weight", None) is getattr(head, "weight", 0)
    is_table = type(embedding) is nn.Embedding or type(embedding).__name__.endswith(SCALED)
    if is_table and id(embedding) in names:
        name = names[id(embedding)]
        if (_style(words, name) or "embedding_rowwise") == "embedding_rowwise":
            others = [other for other in model.modules() if other is not embedding and isinstance(other, nn.Embedding)]
            chosen["embedding"] = name
            chosen["tied"] = tuple(names[id(other)] for other in others if other.weight is embedding.weight)
    if type(head) is nn.Linear and id(head) in names:
        word = _style(words, names[id(head)]) or "colwise"
        if WORDS.get(word) not in _HEAD_STYLES:
            of_heads = ", ".join(word for word, style in WORDS.items() if style in _HEAD_STYLES)
            problems.append(f"{names[id(head)]} (style {word!r}: that of the head is one of {of_heads})")
        if WORDS.get(word) != "whole":
            chosen["head"] = names[id(head)]
    if tied and not (chosen["embedding"] and chosen["head"]):
        chosen |= {"embedding": "", "tied": (), "head": ""}
    return chosen


def _is_causal(model: Any) -> bool:
    """Returns whether the loss of the model is that of a causal LM, by the function that a swap replaces."""
    if not hasattr(model, "loss_type"):
        return True
    names = inspect.unwrap(type(model).forward).__code__.co_names
    return "loss_function" in names and model.loss_type in (None, "ForCausalLM")


def _misfit(module: nn.Module, word: str) -> str | None:
    """Returns why a word does not fit a module; None: it fits."""
    base = LAYER_STYLES[WORDS[word]][0] if WORDS[word] in LAYER_STYLES else None
    name = type(module).__name__
    if base is None or type(module) is STYLES[base].layer_type:
        return None
    if not base.startswith("embedding") and (name in SAME_AS_LINEAR or name == "Conv1D" and WORDS[word] in _OF_CONV1D):
        return None
    layer_type: Any = STYLES[base].layer_type
    return f"a {name}, not a torch.nn.{layer_type.__name__}"


_OF_CONV1D = ("column", "row", "packed_column", "packed_column_3")


def words_of(layers: Iterable[LayerPlan]) -> dict[str, str]:
    """The words that transformers uses for the styles of layers that are planned already."""
    words = {}
    for layer in layers:
        of_style = {style: word for word, style in reversed(WORDS.items())}
        if layer.style in ("column", "row", "partial_gradient"):
            gathers, splits = layer.options.get("gather_output"), layer.options.get("input_is_parallel") is False
            style = "gathered_column" if gathers else "split_row" if splits else layer.style
            style = {2: f"packed_{style}", 3: "packed_column_3"}.get(layer.options.get("stride", 1), style)
            words[layer.name] = of_style[style]
    return words


def words_of_config(model: nn.Module, config: Any, sizes: Mapping[str, int]) -> dict[str, str]:
    """The words of transformers' `DistributedConfig`: those of the model's plan, and what `tp_plan` changes of them.

    Raises:
        ValueError: its sizes are not those of the mesh, or it asks for experts over an axis of theirs, or its words
            are for layers that the model has not.
    """
    for axis, size in sizes.items():
        asked = getattr(config, f"{axis}_size", None)
        if asked is not None and asked != size:
            raise ValueError(f"swap: {axis}_size={asked} of the DistributedConfig, but the mesh has {axis}={size}")
    if (getattr(config, "ep_size", None) or 1) > 1:
        raise ValueError(
            f"swap: ep_size={config.ep_size} of the DistributedConfig distributes whole experts; swap shards each "
            "expert over tp: leave ep_size at 1"
        )
    words = dict(_words(model))
    changed = config.tp_plan if isinstance(config.tp_plan, Mapping) else {}
    names = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    _check_words(changed, names | set(map(_pattern, names)), ())
    return {**words, **changed}


def _words(model: nn.Module) -> Mapping[str, str]:
    """Style of each layer, in transformers' words: from a row of ours, or from the model's `tp_plan`."""
    plan: dict[str, str] = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    config: Any = model.config
    ours = plan_of_ours(config)
    if not ours:
        return {**plan, **CORRECTIONS.get(config.model_type, {})} if plan else plan
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    words = {}
    for pattern in dict.fromkeys(map(_pattern, names)):
        for name, word in ours.items():
            if pattern == name or (name.startswith("*") and f".{pattern}".endswith("." + name.lstrip("*."))):
                words[pattern] = word
    return {**{name: word for name, word in plan.items() if stack_of(name.replace("*", "0")) == ""}, **words}


def _check_words(words: Mapping[str, str], known: Collection[str], ends: Collection[str]) -> None:
    for name, word in words.items():
        if not isinstance(name, str) or not isinstance(word, str):
            raise ValueError(
                f"the plan has the entry {name!r}: {word!r}; it takes names of layers and words, as strings"
            )
        if name not in known and len(names := alternatives(name)) > 1:
            raise ValueError(
                f"the plan names {name}: transformers' plans have no alternatives, only `*` for the number of a layer; "
                f"write an entry for each: {', '.join(map(repr, names))}"
            )
        if name not in known:
            raise ValueError(
                f"the plan names {name}, but the model has no such layer; nearest: {nearest(name, sorted(known))}"
            )
        if refusal := refusal_of(word):
            raise ValueError(f"the plan gives {name} {refusal}")


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _style(words: Mapping[str, str], name: str) -> str | None:
    return words.get(name, words.get(_pattern(name)))


def _uncovered(
    model: nn.Module,
    styles: Mapping[str, str],
    ends: set[str],
    every_matrix: bool,
    parameters: Collection[str] = (),
) -> list[str]:
    """Modules whose weights would be wrong: any parameter next to sharded layers; and all unsharded matrices on demand.

    Elsewhere what goes in and out of a module is equal on all ranks, so that its weights may stay whole.
    """
    regions = regions_of(styles)
    left_out = []
    for name, module in model.named_modules():
        if name in styles or name in ends or any(part in LATENT for part in name.split(".")):
            continue
        bare = {
            key: param
            for key, param in module._parameters.items()
            if param is not None and f"{name}.{key}" not in parameters
        }
        matrices = every_matrix and any(param.ndim >= 2 for param in bare.values())
        in_region = any(name == region or name.startswith(f"{region}.") for region in regions)
        if matrices or (in_region and bare):
            left_out.append(name or type(module).__name__)
    return left_out


def _listed(names: list[str], between: str = ", ") -> str:
    """Names with layer numbers folded, so that 32 equal layers are one entry."""
    return between.join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|\s|$)", "*", name) for name in names))
