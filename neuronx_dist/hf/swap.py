"""Puts parallel layers into a Hugging Face model, in place, as transformers' own `tp_plan` says, or a plan of ours.

What a decoder layer costs (b batch, s sequence, h hidden, i intermediate; `*` marks what is sharded over tp):

    x [b,s,h] -> norm -> q,k,v [b,s,h/tp*] -> attention of local heads -> o [b,s,h] (partial) -> all-reduce
              -> norm -> gate,up [b,s,i/tp*] -> act, product -> down [b,s,h] (partial) -> all-reduce

two all-reduces forward, and two backward: q, k and v share one input gradient, and so do gate and up (`fuse_columns`),
while their parameters and names in the state dict stay Hugging Face's. The embedding is split by vocabulary, and so is
the head, whose local logits `[b, s, vocab/tp]` go straight into the vocabulary-parallel cross entropy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from .. import comm, spmd
from ..model_shape import ModelShape, padded_heads
from ..parallel_layers.activation_checkpoint import keep_random_streams
from ..parallel_layers.pad import pads_heads
from ..parallel_layers.replace import LayerPlan, apply
from ..unknown_keywords import names_the_nearest
from ..weights.partial_model import unwrapped
from ..weights.wrappers import wrapper_of
from .context_parallel import apply_context_parallel, check_context_parallel
from .deferred_logits import computed, defer_logits
from .derived import IndivisibleError, derive
from .dropout import check_dropout, draw_apart
from .experts import count_all_tokens, declare_rows, distribute_experts, generate_together
from .in_place import IN_PLACE, multiply_output, shard_parameter, sharded_dim
from .loss import causal_lm_loss
from .model_plan import ATTENTION, ModelPlan, UnsupportedModelError, leaf_of, parent_of
from .packed_rows import separate_documents
from .plan_reading import SAME_AS_LINEAR, read_plan, words_of, words_of_config
from .sequence_parallel import apply_sequence_parallel, check_sequence_parallel

__all__ = ["PlannedLayers", "is_swapped", "return_whole_logits", "swap"]


class PlannedLayers(Protocol):
    """A plan that gives layers, such as `planning.Plan`."""

    @property
    def layers(self) -> Sequence[LayerPlan]: ...


@names_the_nearest
def swap(
    model: Any,
    *,
    plan: PlannedLayers | Sequence[LayerPlan] | Mapping[str, str] | Any | None = None,
    inputs: Mapping[str, Any] | None = None,
    sequence_parallel: bool = False,
    pad_heads: bool = False,
    pad_vocab: bool = False,
    inplace_logits: bool = False,
    fused_loss: bool | None = None,
    ep: int | None = None,
    context_parallel: str = "auto",
) -> Any:
    """Replaces the linear layers, embedding and head of a Hugging Face model by parallel ones. Returns the model.

    Works on a model on the meta device, which then gets its values from `materialize` or `load_pretrained`, and on a
    real one, whose weights are sliced. Called with labels, a swapped causal LM gives the loss and this rank's logits
    `[batch, seq, vocab/tp]`, which training does not compute unless they are read; without, the full logits. Other
    models (encoders, sequence to sequence, classification) give what they gave before, on every rank.

    Args:
        model: any model of transformers for which there is a plan, or any module with `plan="derived"`; the embedding
            may be tied to the head.
        plan: which layers become parallel ones: transformers' words by layer name (`"model.layers.*.mlp.up_proj":
            "colwise"`; all words: docs/models.md), to which sizes, embedding and head are added; or `LayerPlan`s, or a
            `planning.Plan` with them, which are applied as they are, and have the embedding and the head; or a
            `DistributedConfig` of transformers, whose `tp_plan` changes words of the plan of None, and whose `tp_size`
            and `pp_size` are to be those of the mesh. None: the plan of ours in `words.py`, else what transformers
            says. Words of one's own that do not go together are refused where names and styles show it;
            `spmd.check(lambda: hf.swap(model, plan=plan), inputs, {"tp": 2})` proves a plan. "derived": the columns
            and rows that the rules of `parallelize` find for the module's own forward, which is recorded.
        inputs: with `plan="derived"`: example arguments of forward, by name, of which shapes and dtypes count; None:
            the model's `dummy_inputs`.
        sequence_parallel: between attention and MLP, activations are `[batch, seq/tp, hidden]`; so are the
            `hidden_states` that the model returns when asked to.
        pad_heads: add zero heads where tp does not divide the heads (see `parallel_layers.pad`); False refuses the
            model then. It is not needed where tp is larger than the number of key/value heads and a multiple of it:
            then tp / kv_heads adjacent ranks hold each of them (`model_shape.padded_heads`).
        pad_vocab: add zero rows to the embedding and the head where tp does not divide the vocabulary; False refuses
            the model then. With labels the last columns of the local logits are padding, and -inf; the full logits
            have the real size, and so has what is saved.
        inplace_logits: the loss writes over the logits, which saves memory of their size and time: those that come
            with a loss, in training, have no meaning then. For training that uses the loss alone, as `run_train` does.
        fused_loss: in training the loss of a call with labels is computed from the head's input, and no rank holds the
            logits of all tokens (`parallel_linear_cross_entropy`). `output.logits` of such a call are computed when
            their values are read, at the latest before the next optimizer step; under sequence parallelism all ranks
            of tp read them, or none. None: wherever nothing reads the logits before the loss, as a model that scales or
            caps them does, or an adapter on the head. True: a model that reads them is refused, here or by the first
            loss. False, in compiled code, on XLA and in evaluation: the loss of the logits.
        ep: ranks over which whole experts are distributed: that of the mesh, which None means, or 1: every rank has
            all experts. Over tp each expert is sharded as the plan says.
        context_parallel: on a mesh with cp > 1, attention over the parts of the sequences: "ring"; "ulysses", which
            needs heads that tp x cp divides; "ring+ulysses:2", in which 2 adjacent ranks divide the heads, or
            "ring+ulysses"; "auto": of these, that by which a rank sends fewest bytes, in each call
            (`hf/context_parallel.py` has the loop). Without cp it has no effect.

    Raises:
        UnsupportedModelError: the plan does not cover the model, or would train it wrongly; the layers are named.
        ValueError: tp does not divide a size, or the plan names layers that the model has not; the message has the
            numbers and names.
    """
    tp, ep = comm.size("tp"), comm.size("ep") if ep is None else ep
    if wrapper_of(type(model)) or "_orig_mod" in getattr(model, "_modules", {}) or unwrapped(model) is not model:
        raise ValueError(
            f"swap: {type(model).__name__} wraps a model: swap the model, and wrap, compile or add adapters then"
        )
    if ep not in (1, comm.size("ep")):
        raise ValueError(f"swap: ep={ep} is neither 1 nor the ep of the mesh, {comm.size('ep')}: initialize it so")
    if is_swapped(model):
        raise ValueError(f"swap: this {type(model).__name__} is already swapped")
    if inner := next((name for name, module in model.named_modules() if _SWAPPED in vars(module)), ""):
        raise ValueError(f"swap: {inner} of this {type(model).__name__} is already swapped: swap a module once")
    if inputs is not None and not _is_derived(plan):
        raise ValueError('swap: inputs are example arguments of forward for plan="derived", and the plan is another')
    model_plan, layers = _planned(model, plan, tp, sequence_parallel, inputs)
    _check_sizes(model, model_plan, layers, tp, pad_heads or pads_heads(), pad_vocab)
    check_dropout(model, model_plan, tp, sequence_parallel)
    vocabulary: int = model.get_submodule(model_plan.head).out_features if model_plan.head else 0
    if sequence_parallel:
        check_sequence_parallel(model, model_plan)
    if comm.size("cp") > 1:
        check_context_parallel(model, model_plan, context_parallel)
    if fused_loss:
        _check_fused_loss(model, model_plan)

    scales = _plain_layers(model, model_plan)
    apply(model, layers)
    for name, scale in scales.items():
        model.get_submodule(name).register_forward_hook(partial(multiply_output, *scale))
    if ep > 1:
        distribute_experts(model)
        generate_together(model)
    else:
        declare_rows(model)
    count_all_tokens(model)
    _apply_in_place(model, model_plan)
    _set_local_head_counts(model, model_plan, tp)
    if tp > 1:
        draw_apart(model, model_plan)
    keep_random_streams(model)
    if sequence_parallel:
        apply_sequence_parallel(model, model_plan)
    if comm.size("cp") > 1:
        apply_context_parallel(model, context_parallel)
    if model_plan.head and model_plan.local_logits:
        if fused_loss is not False:
            defer_logits(model.get_submodule(model_plan.head), type(model).__name__ if fused_loss else "")
        model.loss_function = partial(causal_lm_loss, inplace_logits=inplace_logits)
        model.register_forward_hook(partial(_full_logits_without_labels, vocabulary))
    elif model_plan.head and vocabulary % tp:
        model.get_submodule(model_plan.head).register_forward_hook(partial(_without_padding, vocabulary))
    if any(param.is_meta for param in model.parameters()):
        model.register_forward_pre_hook(_refuse_without_values, with_kwargs=True, prepend=True)
    if tp > 1 or ep > 1:
        model.save_pretrained = partial(_refuse_own_save, type(model).__name__)
    separate_documents(model)
    setattr(model, _SWAPPED, True)
    return model


_SWAPPED = "_is_swapped"


def is_swapped(model: nn.Module) -> bool:
    """Returns whether `swap` has replaced the layers of this model."""
    return getattr(model, _SWAPPED, False)


def _refuse_own_save(name: str, *args: Any, **kwargs: Any) -> None:
    """Stands in the place of the model's `save_pretrained`, which would write the shards of one rank."""
    raise RuntimeError(
        f"{name}.save_pretrained would write the shards of one rank: call neuronx_dist.hf.save_pretrained(model, "
        "folder), on all ranks"
    )


def _plain_layers(model: nn.Module, plan: ModelPlan) -> dict[str, tuple[float, bool]]:
    """Makes subclasses of torch's layers with the same forward plain ones; returns the scales of scaled embeddings.

    Beside a scale: whether it is a buffer, which has the rounding of its dtype, and then of the weight's.
    """
    for name in plan.styles:
        if type(model.get_submodule(name)).__name__ in SAME_AS_LINEAR:
            model.get_submodule(name).__class__ = nn.Linear
    scales: dict[str, tuple[float, bool]] = {}
    for name in (plan.embedding, *plan.tied) if plan.embedding else ():
        table: Any = model.get_submodule(name)
        if type(table) is not nn.Embedding:
            table.__class__ = nn.Embedding
            scale = table.embed_scale
            if isinstance(scale, torch.Tensor):
                if scale.is_meta:  # where modules are made on meta, as in a check, a tensor has values on the CPU only
                    scale = torch.tensor(table.scalar_embed_scale, dtype=scale.dtype, device="cpu")
                scales[name] = float(scale), True
            else:
                scales[name] = scale, False
    return scales


def _apply_in_place(model: Any, plan: ModelPlan) -> None:
    """Shards bare parameters, and adds the hooks of modules that stay."""
    for name, style in plan.parameters.items():
        module, _, key = name.rpartition(".")
        shard_parameter(model.get_submodule(module), key, style)
    if comm.size("tp") > 1:
        for name, style in plan.styles.items():
            if style in IN_PLACE:
                config = model.config.get_text_config() if hasattr(model, "config") else None
                IN_PLACE[style](model.get_submodule(name), config)


def _check_fused_loss(model: nn.Module, plan: ModelPlan) -> None:
    """Refuses a model that the fused loss does not fit.

    Raises:
        UnsupportedModelError: with the reason.
    """
    if not (plan.head and plan.local_logits):
        what = "the loss of a causal LM, and this model has another" if plan.head else "a sharded output layer"
        raise UnsupportedModelError(
            f"swap: {type(model).__name__}: fused_loss=True needs {what}: leave fused_loss at None"
        )


def _without_padding(vocabulary: int, head: nn.Module, args: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits[..., :vocabulary]


def _planned(
    model: Any,
    given: Any,
    tp: int,
    sequence_parallel: bool,
    inputs: Mapping[str, Any] | None,
) -> tuple[ModelPlan, Sequence[LayerPlan]]:
    """Returns the model's plan, and the plans of its layers, from the user's `plan` argument."""
    if _is_derived(given):
        # Where modules are made on meta, as in a check, forward's constants have values nevertheless.
        with torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext():
            plan = _derived_plan(model, inputs, tp)
        _check_sequence(model, plan, sequence_parallel)
        return plan, plan.layers(model, tp, sequence_parallel=sequence_parallel)
    if hasattr(given, "tp_plan") and hasattr(given, "fsdp_size"):
        words = words_of_config(model, given, {axis: comm.size(axis) for axis in ("tp", "pp")})
        plan = read_plan(model, words, complete=False)
        return plan, plan.layers(model, tp, sequence_parallel=sequence_parallel)
    if given is None or isinstance(given, Mapping):
        plan = read_plan(model, given)
        return plan, plan.layers(model, tp, sequence_parallel=sequence_parallel)
    layers = list(given if isinstance(given, Sequence) else given.layers)
    if not layers or not all(isinstance(layer, LayerPlan) for layer in layers):
        raise ValueError(
            f"swap: plan={given!r:.200} has no layers to replace; pass a list of LayerPlans, a Plan with layers, or "
            "a dict from layer names to transformers' styles"
        )
    plan = read_plan(model, words_of(layers))
    missing = {end for end in (plan.embedding, plan.head) if end} - {layer.name for layer in layers}
    if missing:
        raise ValueError(f"swap: the plan must shard {', '.join(sorted(missing))}: the loss takes sharded logits")
    return plan, layers


def _is_derived(plan: Any) -> bool:
    """Returns whether a plan is the word "derived".

    Raises:
        ValueError: it is another string.
    """
    if isinstance(plan, str) and plan != "derived":
        raise ValueError(f'swap: plan={plan!r} is no plan; the only word is "derived"')
    return isinstance(plan, str)


def _derived_plan(model: Any, inputs: Mapping[str, Any] | None, tp: int) -> ModelPlan:
    """Derives a plan; where tp does not divide the heads, from another degree, and with the heads of the config.

    Raises:
        IndivisibleError: the config has no heads, or they are not all that a rank changes.
    """
    try:
        derived = derive(model, inputs, tp)
    except IndivisibleError as error:
        if error.degree == 1 or not ModelShape.of(getattr(model, "config", None)).heads:
            raise
        derived = derive(model, inputs, tp, error.degree)
        if {name for values in derived.attributes.values() for name in values} - {*_OF_CONFIG, *_DIVIDED}:
            raise
        return read_plan(model, derived.words)
    return read_plan(model, derived.words, derived=derived)


def _check_sequence(model: nn.Module, plan: ModelPlan, sequence_parallel: bool) -> None:
    """Refuses sequence parallelism where a module gathers the sequence before weights that then see all of it.

    Raises:
        UnsupportedModelError: with these weights.
    """
    inside = [
        name
        for name, style in plan.styles.items()
        if style == "whole" and any(name.startswith(f"{region}.") or name == region for region in plan.regions)
    ]
    if sequence_parallel and inside:
        raise UnsupportedModelError(
            f"swap: {type(model).__name__}: sequence_parallel=True gathers the sequence where {parent_of(inside[0])} "
            f"begins, before {leaf_of(inside[0])}, whose gradient would be counted tp times: move it out, or swap "
            "without"
        )


# Attributes of attention modules with a number of heads, or of features of all heads, which tp divides.
_OF_CONFIG = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_key_value_groups")
_DIVIDED = ("n_heads", "num_kv_heads", "split_size", "all_head_size", "inner_dim")


def _set_local_head_counts(model: nn.Module, plan: ModelPlan, tp: int) -> None:
    """Sets the local number of heads on attention modules whose code reads it; Llama's code views by -1."""
    if plan.derived is not None:
        for name, values in plan.derived.attributes.items():
            vars(model.get_submodule(name)).update(values)
    if not (plan.heads and plan.kv_heads):
        return
    heads, kv_heads, replicas = padded_heads(plan.heads, plan.kv_heads, tp)
    heads, kv_heads = heads // tp, kv_heads * replicas // tp
    groups = plan.heads // plan.kv_heads
    counts = {  # of the model, and of a rank
        "num_heads": (plan.heads, heads),
        "num_attention_heads": (plan.heads, heads),
        "num_key_value_heads": (plan.kv_heads, kv_heads),
        "num_key_value_groups": (groups, heads // kv_heads),
    }
    for region in map(model.get_submodule, plan.regions):
        for attribute, (of_model, of_rank) in counts.items():
            size = getattr(region, attribute, None)
            if not isinstance(size, int):
                continue
            is_kept = attribute == "num_key_value_groups" or size % tp
            setattr(region, attribute, of_rank if size == of_model else size if is_kept else size // tp)
        for attribute in _DIVIDED:
            size = getattr(region, attribute, None)
            if isinstance(size, int) and size % tp == 0:
                setattr(region, attribute, size // tp)


def _check_sizes(
    model: nn.Module, plan: ModelPlan, layers: Sequence[LayerPlan], tp: int, pad_heads: bool, pad_vocab: bool
) -> None:
    problems = _head_problems(model, plan, tp, pad_heads) if plan.attentions and plan.derived is None else []
    end: Any = model.get_submodule(plan.head or plan.embedding) if plan.head or plan.embedding else None
    vocabulary = 0 if end is None else end.out_features if plan.head else end.num_embeddings
    if vocabulary % tp and not pad_vocab:
        problems.append(
            f"the vocabulary of {vocabulary} is not divisible by tp={tp}: pass pad_vocab=True, which adds "
            f"{-vocabulary % tp} zero rows"
        )
    whole = [layer for layer in layers if "replicas" not in layer.options]
    sizes = [(leaf_of(layer.name), layer.padded_size) for layer in whole if layer.padded_size]
    problems += [f"{what} of size {size} is not divisible by tp={tp}" for what, size in sizes if size % tp]
    problems += _parameter_problems(model, plan, tp)
    if problems:
        raise ValueError(f"swap: {type(model).__name__}: " + "; ".join(dict.fromkeys(problems)))


def _parameter_problems(model: nn.Module, plan: ModelPlan, tp: int) -> list[str]:
    """Bare parameters whose sharded dim tp does not divide."""
    problems = []
    for name, style in plan.parameters.items():
        shape = model.get_parameter(name).shape
        dim, blocks = sharded_dim(style, len(shape))
        size = shape[dim]
        if style.endswith(("row", "column")) and size % (tp * blocks):
            what = f" in {blocks} blocks" if blocks > 1 else ""
            problems.append(f"{leaf_of(name)} of size {size}{what} is not divisible by tp={tp}")
    return problems


def _head_problems(model: nn.Module, plan: ModelPlan, tp: int, pad_heads: bool) -> list[str]:
    of_model = plan.heads, plan.kv_heads
    heads = padded_heads(*of_model, tp)
    numbers = {name: getattr(model.get_submodule(name), "num_heads", plan.heads) for name in plan.attentions}
    others = {leaf_of(name): n for name, n in numbers.items() if isinstance(n, int) and n != plan.heads}
    if refused := {name: n for name, n in others.items() if n % tp or heads.pads(*of_model)}:
        listed = ", ".join(f"{name} of {n} heads" for name, n in refused.items())
        return [f"the model has {plan.heads} attention heads and {listed}: both are to be divisible by tp={tp}"]
    is_plain = all(plan.has_plain_attention(name) for name in plan.attentions)
    if heads.pads(*of_model) and not pad_heads:
        choices = [n for n in range(1, plan.heads + 1) if not padded_heads(*of_model, n).pads(*of_model)]
        return [
            f"{plan.heads} attention heads over {plan.kv_heads} key/value heads are not divisible by tp={tp}: "
            f"{'pass pad_heads=True, or ' if is_plain else ''}choose tp from {choices}"
        ]
    if not heads.pads(*of_model) and heads.replicas == 1:
        return []
    what = "replicates k_proj, v_proj and pads" if heads.replicas > 1 else "pads"
    if not is_plain:
        return [f"tp={tp} {what} {', '.join(ATTENTION)}; this model's attention has other layers"]
    modules = map(model.get_submodule, plan.attentions)
    if heads.replicas > 1 and not all(hasattr(module, "num_key_value_groups") for module in modules):
        return [f"tp={tp} {what} {', '.join(ATTENTION)}, and this model's attention has no num_key_value_groups to set"]
    return []


def _refuse_without_values(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Forward pre-hook of the model: refuses inputs with values while parameters on meta have none.

    Modules that accelerate offloads have a `_hf_hook`, which gives them their values before their forward.
    """
    param = next(model.parameters())
    if param.is_meta and any(type(x) is torch.Tensor and not x.is_meta for x in (*args, *kwargs.values())):
        if any(hasattr(module, "_hf_hook") for module in model.modules()):
            return
        raise RuntimeError(
            f"{type(model).__name__} was swapped on the meta device, and its parameters have no values yet: call "
            "hf.load_pretrained(model, folder), or hf.materialize(model, seed), before forward"
        )


def _full_logits_without_labels(vocabulary: int, model: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of the model: gathers the logits of a call without labels; the loss takes local logits."""
    loss = output[0] if isinstance(output, tuple) else output.loss
    if isinstance(output, tuple):
        if loss.ndim == 0:
            return output
        return (_gather_vocabulary(output[0], vocabulary), *output[1:])
    if loss is None and output.logits is not None:
        output.logits = _gather_vocabulary(output.logits, vocabulary)
    return output


def return_whole_logits(model: Any) -> None:
    """Makes a swapped causal LM return logits `[batch, seq, vocab]` beside the loss of a call with labels too."""
    vocabulary: int = model.config.get_text_config().vocab_size

    def gather(model: Any, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (
                (output[0], _gather_vocabulary(output[1], vocabulary), *output[2:]) if output[0].ndim == 0 else output
            )
        if output.loss is not None and output.logits is not None:
            output.logits = _gather_vocabulary(output.logits, vocabulary)
        return output

    model.register_forward_hook(gather)


def _gather_vocabulary(logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """`[..., padded/tp]` -> `[..., vocabulary]`, equal on all ranks; backward takes this rank's columns."""
    logits = computed(logits)
    return spmd.all_gather(logits, "tp", src=spmd.S(logits.ndim - 1), dst=spmd.I)[..., :vocabulary]
