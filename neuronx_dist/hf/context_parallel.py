"""Context parallelism of a swapped model: its attention sees the tokens of all cp ranks.

    batch = nxd.get_batch_on_this_context_parallel_rank(batch, balance="zigzag")   # [b, s] -> [b, s/cp], shifted labels
    items = nxd.global_num_items(batch["labels"], num_microbatches)
    loss = model(**batch, num_items_in_batch=items).loss                            # this rank's share

The attention is one of transformers' attention interface. `position_ids` say where this rank's tokens stand, for rotary
and learned positions as for the mask: contiguous or zig-zag parts, packed documents. All that is not attention takes
tokens one by one. Gradients are those of this rank's tokens; `reduce_gradients` and ZeRO-1 average over dp and cp.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import comm
from ..attention.batch import forget_split, is_part_for, labels_are_shifted, padding_was_left_out, split_of_positions
from ..attention.context_parallel import attend, parts_of_axis, traffic
from ..gradients.reduce import global_num_items
from ..model_shape import padded_heads
from .model_plan import ModelPlan, UnsupportedModelError, attentions_of

__all__ = ["apply_context_parallel", "check_context_parallel"]

# Masks that are more than causal, a window and documents, by the words of transformers' code that makes them.
_OTHER_MASKS = ("or_mask_function=", "and_mask_function=", "block_sequence_ids=", "create_chunked_causal_mask(")
_ATTENTION = ("full_attention", "sliding_attention")
_LOG = logging.getLogger(__name__)
_IMPLEMENTATION = "_attn_implementation"  # attribute of configs
_ROUTER_LOGITS = "output_router_logits"  # argument of models of experts, and attribute of their configs
_RAN = "_ran_over_context_parallel_ranks"  # attribute of an attention module: its forward called `_attention`


def check_context_parallel(model: Any, plan: ModelPlan, method: str) -> None:
    """Refuses models of which a part of a sequence cannot be computed by itself, but for attention.

    Raises:
        UnsupportedModelError: with the reason.
        ValueError: the method is unknown, or Ulysses has too few heads.
    """
    degrees = _degrees(method)
    config = model.config.get_text_config() if hasattr(model, "config") else None
    if reason := _reason(model, plan, config):
        raise UnsupportedModelError(
            f"swap: {type(model).__name__} {reason}: it cannot be trained with cp={comm.size('cp')}; use cp=1 (and tp "
            "with sequence_parallel=True for long sequences)"
        )
    heads = padded_heads(plan.heads, plan.kv_heads, comm.size("tp")).heads
    if all(heads % comm.size((f"cp%{degree}", "tp")) for degree in degrees):
        of_cp = " or ".join(map(str, degrees))
        raise ValueError(
            f"swap: {heads} attention heads cannot be divided among tp={comm.size('tp')} x {of_cp} ranks of "
            f'cp={comm.size("cp")}, as context_parallel="{method}" does: use "ring", or "auto"'
        )


def _degrees(method: str) -> list[int]:
    """Returns how many ranks may divide the heads: 1 is the ring, cp is Ulysses.

    Raises:
        ValueError: there is no such method at this cp.
    """
    cp = comm.size("cp")
    divisors = [n for n in range(1, cp + 1) if cp % n == 0]
    both = divisors[1:-1]
    methods = {"auto": divisors, "ring": [1], "ulysses": [cp], **({"ring+ulysses": both} if both else {})}
    methods |= {f"ring+ulysses:{n}": [n] for n in both}
    if method not in methods:
        raise ValueError(f"swap: context_parallel={method!r} is not one of {', '.join(methods)} (cp={cp})")
    return methods[method]


def _reason(model: Any, plan: ModelPlan, config: Any) -> str:
    if config is None or not hasattr(model, "set_attn_implementation"):
        return "is no model of transformers"
    if not (plan.head and (plan.local_logits or _is_masked(model))) or getattr(
        model.config, "is_encoder_decoder", False
    ):
        return "is neither a causal nor a masked language model"
    classes = _classes(model)
    if not all(of_model._can_set_attn_implementation() for of_model in classes):
        return "computes attention in code of its own, not by transformers' attention interface"
    mixers = {*(getattr(config, "layer_types", None) or ())} - {*_ATTENTION}
    if mixers or getattr(model, "_is_stateful", False) or any(isinstance(m, nn.Conv1d) for m in model.modules()):
        return f"has layers that pass a state along the sequence{': ' * bool(mixers)}{', '.join(sorted(mixers))}"
    if not _attentions(model):
        return "has no attention that is known by the names of its projections"
    source = "".join(inspect.getsource(sys.modules[name]) for name in {of_model.__module__ for of_model in classes})
    if others := [word.strip("=(") for word in _OTHER_MASKS if word in source]:
        return f"has masks that are more than causal ({', '.join(others)})"
    if (window := getattr(config, "sliding_window", None)) and "sliding_window=" not in source:
        return f"has a window in its mask only, which is not passed to its attention (sliding_window={window})"
    if "create_position_ids_from_input_ids" in source:
        return "has positions that begin after pad_token_id (create_position_ids_from_input_ids), not with 0"
    if (cap := getattr(config, "attn_logit_softcapping", None)) is not None:
        return f"caps the scores of attention (attn_logit_softcapping={cap})"
    rope = getattr(config, "rope_parameters", None) or {}
    types = {str(one.get("rope_type")) for one in (rope, *rope.values()) if isinstance(one, dict)}
    if dynamic := {"dynamic", "longrope"} & types:
        return f"has rotary frequencies that depend on the length of the sequence (rope_type {', '.join(dynamic)})"
    return ""


def _is_masked(model: Any) -> bool:
    """Returns whether a model predicts masked tokens from those before and after them, as BERT."""
    return any(one.__name__.endswith("ForMaskedLM") for one in type(model).__mro__)


def _classes(model: Any) -> list[Any]:
    """Returns the classes of transformers whose code the model and its parts are, also where a user's classes inherit.

    A class without such a parent, as code that came with a checkpoint, stands for itself.
    """
    of_parts = [type(module) for module in model.modules() if hasattr(module, "set_attn_implementation")]
    named = [[one for one in cls.__mro__ if one.__module__.startswith("transformers.models.")] for cls in of_parts]
    return list(dict.fromkeys(found[0] if found else cls for cls, found in zip(of_parts, named)))


def _attentions(model: Any) -> list[nn.Module]:
    """Returns the model's attentions, also those that are not sharded over tp, which a plan does not name."""
    return [model.get_submodule(name) for name in attentions_of(name for name, _ in model.named_modules())]


def apply_context_parallel(model: Any, method: str) -> None:
    """Sets the model's attention, in a copy of its config, and the checks of inputs and attentions."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # type: ignore[import-untyped, unused-ignore]

    name = f"neuronx_dist_{method}"  # none of transformers' masks has this name: it makes none
    for degree in _degrees(method):
        parts_of_axis(degree)  # while all ranks are here
    ALL_ATTENTION_FUNCTIONS.register(name, partial(_attention, method))
    copies: dict[int, Any] = {}
    for module in model.modules():  # another model that shares the config has masks, which this attention does not read
        of_module = vars(module)
        of_module.update({k: copy.deepcopy(x, copies) for k, x in of_module.items() if hasattr(x, _IMPLEMENTATION)})
    model.set_attn_implementation(name)
    if _is_masked(model):
        model.register_forward_hook(partial(_over_all_labels, inspect.signature(model.forward)), with_kwargs=True)
    model.check_batch = _check_labels  # called by a pipeline, which has the values
    decoder = model.get_decoder()  # which value heads call, and which model.forward(..) goes through
    for called in (model,) if decoder is model else (model, decoder):
        check = partial(_check_inputs, list(inspect.signature(called.forward).parameters))
        if called is model:
            called.register_forward_pre_hook(check, with_kwargs=True)
        else:  # users call its forward, too, which has no hooks
            called.forward = partial(_checked_forward, check, called, called.forward)
    for attention in _attentions(model):
        attention.register_forward_hook(_check_ran)


def _check_ran(attention: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of an attention: refuses one that has not called the attention over context-parallel ranks."""
    if not any(vars(module).pop(_RAN, False) for module in attention.modules()):
        raise UnsupportedModelError(
            f"{type(attention).__name__} with cp={comm.size('cp')} saw the tokens of this rank only: its forward did "
            "not call the attention that swap has set. Let it call transformers' ALL_ATTENTION_FUNCTIONS, leave out "
            "set_attn_implementation after swap, or use cp=1"
        )


def _checked_forward(check: Any, decoder: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    check(decoder, args, kwargs)
    return forward(*args, **kwargs)


def _check_inputs(names: list[str], model: nn.Module, args: Any, kwargs: Any) -> None:
    """Forward pre-hook of the model and its decoder: refuses inputs that were not split, and masks."""
    inputs = {**dict(zip(names, args)), **kwargs}
    where = f"{type(model).__name__} with cp={comm.size('cp')}"
    if inputs.get("position_ids") is None:
        raise ValueError(
            f"{where} needs position_ids, which say where this rank's tokens stand: split the batch by "
            "nxd.get_batch_on_this_context_parallel_rank"
        )
    if inputs.get("attention_mask") is not None:
        raise ValueError(
            f"{where} reads no attention_mask: leave it out, as nxd.get_batch_on_this_context_parallel_rank does; pad "
            "on the right, with labels of -100, or pack documents, with position_ids that restart"
        )
    if padding_was_left_out() and inputs.get(_ROUTER_LOGITS, getattr(model.config, _ROUTER_LOGITS, False)):
        raise ValueError(
            f"{where}: the auxiliary loss of its routers would count padding, since attention_mask was left out of "
            "batches: pass output_router_logits=False, or pack documents, with position_ids that restart"
        )
    forget_split(inputs["position_ids"])
    _check_labels(model, inputs)


def _check_labels(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Refuses labels that nobody shifted, in the first batch of training and of evaluation that shows it.

    Raises:
        ValueError: the labels of all ranks equal their input_ids.
    """
    names = ("input_ids", "labels", "position_ids")
    given = [inputs[name] for name in names if inputs.get(name) is not None]
    causal = not _is_masked(model)
    has_head = any(one.__name__.endswith(("ForMaskedLM", "ForCausalLM", "LMHeadModel")) for one in type(model).__mro__)
    if has_head and any(is_part_for(causal, x) is False for x in given):  # a body alone may be of either kind
        raise ValueError(
            f"{type(model).__name__} with cp={comm.size('cp')}: its labels are {'' if causal else 'not '}to be "
            f"shifted: split by nxd.get_batch_on_this_context_parallel_rank(batch, causal={causal})"
        )
    if not causal:
        return
    checked: set[bool] = model.__dict__.setdefault("_labels_checked", set())
    if model.training in checked or len(given) < len(names):
        return
    shifted = labels_are_shifted(*given)
    if shifted is False:
        raise ValueError(
            f"{type(model).__name__} with cp={comm.size('cp')}: labels equal input_ids: they must be shifted before "
            "the split, as by nxd.get_batch_on_this_context_parallel_rank"
        )
    if shifted:
        checked.add(model.training)


def _over_all_labels(signature: inspect.Signature, model: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Forward hook of a masked language model: its loss is this rank's share of the mean over the labels of all ranks.

    Raises:
        ValueError: the output is a tuple, whose loss cannot be replaced.
    """
    inputs = signature.bind_partial(*args, **kwargs).arguments
    labels = inputs.get("labels")
    if labels is None:
        return
    if isinstance(output, tuple):
        raise ValueError(
            f"{type(model).__name__} with cp={comm.size('cp')} and return_dict=False: its loss would be the mean over "
            "the labels of one rank: leave return_dict at True"
        )
    logits = output.logits.to(torch.promote_types(output.logits.dtype, torch.float32)).flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    items = inputs.get("kwargs", {}).get("num_items_in_batch")
    output.loss = total / (global_num_items(labels, shift=False, dtype=logits.dtype) if items is None else items)


def _cheapest(method: str, *call: Any, **sees: Any) -> int:
    """Returns the degree of the method by which a rank sends least in a call of `attend`; logs each that is taken once.

    Equal on all ranks, which have equal shapes, splits and documents.
    """
    degrees = _degrees(method)
    if len(degrees) == 1:
        return degrees[0]
    query = call[0]
    sent = {degree: traffic(degree, *call, **sees) for degree in degrees if query.shape[1] % degree == 0}
    best = min(sent, key=sent.__getitem__)
    taken: set[int] = comm.current().extras.setdefault("context_parallel_degrees", set())
    if best not in taken:
        taken.add(best)
        by_degree = {1: "ring", comm.size("cp"): "ulysses"}
        names = {degree: by_degree.get(degree, f"ring+ulysses:{degree}") for degree in sent}
        costs = ", ".join(
            f"{names[degree]} {elements * query.element_size() / 1e6:.3g} MB in {messages} messages"
            for degree, (elements, messages) in sent.items()
        )
        _LOG.info("attention over cp=%d is %s; a rank sends per call: %s", comm.size("cp"), names[best], costs)
    return best


def _attention(
    method: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    position_ids: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes one attention of transformers' interface; returns `[b, s/cp, heads, e]`."""
    where = f"{type(module).__name__} with cp={comm.size('cp')}"
    if position_ids is None:
        raise ValueError(f"{where}: the model passes no position_ids to its attention: use cp=1")
    for what, given in {
        "an attention mask": attention_mask,
        "attention dropout": dropout or None,
        "softcap": softcap,
        "a position bias": position_bias,
        "a cache": None if key.shape[2] == query.shape[2] else key.shape[2],
    }.items():
        if given is not None:
            instead = "pass use_cache=False" if what == "a cache" else "leave it out"
            raise ValueError(f"{where}: {what} is not possible over context-parallel ranks: {instead}, or use cp=1")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    split, documents = split_of_positions(position_ids)
    setattr(module, _RAN, True)
    sees: dict[str, Any] = dict(causal=causal, window=sliding_window)
    degree = _cheapest(method, query, key, value, split, documents, **sees)
    out = attend(degree, query, key, value, split, documents, **sees, scale=scaling, sinks=s_aux)
    return out.transpose(1, 2).contiguous(), None
