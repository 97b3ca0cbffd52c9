"""Sizes of a Hugging Face model, counted in its module on meta, by the plan of `hf.swap`, which divides its weights.

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(GPT2Config())
    counted(module).num_parameters == sum(param.numel() for param in module.parameters())

Layers may have two matrices or three in their feed-forward layer, joined projections of queries, keys and values,
biases, any number of norms, learned positions before them and a bias of the head after them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from torch import nn

from .. import comm
from ..hf.context_parallel import check_context_parallel
from ..hf.dropout import check_dropout
from ..hf.model_plan import LOCAL_OUTPUT, ModelPlan, UnsupportedModelError, leaf_of, parent_of, stack_of, surroundings
from ..hf.plan_reading import end_of, read_plan
from ..hf.sequence_parallel import check_sequence_parallel
from ..mesh import Mesh
from ..model_shape import ModelShape
from .model_sizes import Block, Weight, Workload
from .played_layers import PlayedLayers

__all__ = ["counted", "fuses_loss", "has_experts_or_latents"]

_SCALED_LOGITS = ("logits_scaling", "logit_scale", "final_logit_softcapping")  # of Granite, Cohere, Gemma 2
_CLOSED_FORM = ("llama", "mistral", "qwen2", "qwen3")  # whose bytes `stage_memory.py` has in closed form
_BEFORE_LAYERS = ("embed", "wpe", "position")  # in the names of weights beside the embedding


def has_experts_or_latents(config: Any) -> bool:
    """Returns whether a model has experts or latent attention, whose weights are those of its config."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(ModelShape.of(config).experts or getattr(text, "kv_lora_rank", None))


def fuses_loss(config: Any) -> bool:
    """Returns whether `hf.swap` can fuse the loss: the model does not scale its logits."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return not any(getattr(text, name, None) for name in _SCALED_LOGITS)


def counted(module: Any) -> Workload:
    """Returns the sizes of a dense causal language model.

    Raises:
        UnsupportedModelError: `hf.swap` refuses the model, or the planner cannot describe it; the message has what of.
    """
    shape, plan = ModelShape.of(module.config), read_plan(module)
    if not (plan.embedding and plan.head and shape.layers and shape.heads):
        raise _refused(module, "it has no sharded embedding and head around layers with attention heads")
    stack = stack_of(next(iter(plan.styles)))
    layers = [_weights_of_layer(module, plan, name) for name in _layers(module, stack, shape.layers)]
    embedding, head = module.get_submodule(plan.embedding), module.get_submodule(plan.head)
    first, last = _outside(module, plan, stack)
    is_cut = bool(surroundings(module, plan))
    if is_cut:  # these weights see all tokens
        first, last = ([weight._replace(split=weight.split or "whole") for weight in end] for end in (first, last))
    projections = [name for name in plan.styles if parent_of(name) in plan.attentions and plan.styles[name] == "row"]
    of_style = {style: name for name, style in reversed(plan.styles.items())}
    gathered = of_style.get("gathered_column") or of_style.get("split_row", "")
    if not projections and not gathered:
        raise _refused(module, "its plan divides no attention")
    if not _accepts(check_dropout, module, plan, 2, False):
        gathered = "dropout"
    vocab, hidden = embedding.weight.shape
    heads, kv_heads = shape.heads, shape.kv_heads or shape.heads
    dim = _head_dim(module, shape, projections)
    columns, width = _feed_forward(module, plan, stack)
    norms, fused = _norms(module.get_submodule(f"{stack}.0"), hidden)
    model_type = str(getattr(module.config.get_text_config(), "model_type", type(module).__name__))
    closed = model_type in _CLOSED_FORM
    return Workload(
        name=model_type,
        blocks=tuple(
            Block(len(list(equal)), weights, width, columns > width, norms, fused) for weights, equal in groupby(layers)
        ),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        key_dim=dim,
        value_dim=dim,
        intermediate=width,
        vocab=vocab,
        tied=head.weight is embedding.weight,
        max_positions=shape.max_positions,
        source="module",
        fuses_loss=fuses_loss(module.config),
        undivided=leaf_of(gathered),
        pads_heads=all(plan.has_plain_attention(name) for name in plan.attentions),
        allows_sequence_parallel=_accepts(check_sequence_parallel, module, plan)
        and _accepts(check_dropout, module, plan, 2, True),
        allows_context_parallel=_accepts(check_context_parallel, module, plan, "auto"),
        first=tuple(first),
        last=tuple(last),
        head_bias=head.bias is not None,
        is_cut_after_positions=is_cut,
        bytes_of=None if closed else PlayedLayers(module.config),
    )


def _refused(module: nn.Module, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"plan: {type(module).__name__} cannot be planned: {reason}; pass a `Workload` with the weights of its layers"
    )


def _accepts(check: Any, *args: Any) -> bool:
    try:
        with comm.as_rank(Mesh(1), 0):  # sizes of axes, on which no reason depends
            check(*args)
    except UnsupportedModelError:
        return False
    return True


def _layers(module: nn.Module, stack: str, number: int) -> list[str]:
    layers = [f"{stack}.{name}" for name, _ in module.get_submodule(stack).named_children()] if stack else []
    if len(layers) != number:
        raise _refused(module, f"its config has {number} layers, and {stack or 'no list'} has {len(layers)}")
    return layers


def _weights_of_layer(module: nn.Module, plan: ModelPlan, layer: str) -> tuple[Weight, ...]:
    """Returns the weights of a layer in the order of its parameters; neighbours that are equal are one entry."""
    found = [
        _weight(module, plan, f"{layer}.{name}" if name else layer, key, param)
        for name, part in module.get_submodule(layer).named_modules()
        for key, param in part._parameters.items()
        if param is not None
    ]
    sums = sum(plan.styles.get(name) in ("row", "packed_row", "split_row") for name in _names(plan, layer))
    if sums != 2:
        raise _refused(module, f"{layer} has {sums} layers that sum over tp, in place of those of attention and MLP")
    return tuple(weight._replace(number=len(list(equal))) for weight, equal in groupby(found))


def _names(plan: ModelPlan, layer: str) -> Iterator[str]:
    return (name for name in plan.styles if name.startswith(f"{layer}."))


def _weight(module: nn.Module, plan: ModelPlan, name: str, key: str, param: nn.Parameter) -> Weight:
    """Returns one parameter, `key` of the module `name`, with the dim that its style divides."""
    if f"{name}.{key}" in plan.parameters or param.ndim > 2:
        raise _refused(module, f"{name}.{key} {tuple(param.shape)} is divided by a style of its own")
    style, is_matrix = plan.styles.get(name, ""), param.ndim == 2
    is_transposed = is_matrix and type(module.get_submodule(name)).__name__ == "Conv1D"
    is_plain = parent_of(name) in plan.attentions and plan.has_plain_attention(parent_of(name))
    if style in (*LOCAL_OUTPUT, "gathered_column"):
        split = "columns" if is_transposed else "rows"
        if is_plain:
            split = "key_value" if leaf_of(name) in ("k_proj", "v_proj") else "query"
    elif style in ("row", "packed_row", "split_row"):
        split = ("heads" if is_plain else "rows" if is_transposed else "columns") if is_matrix else ""
    elif style == "partial_gradient":
        split = "partial"
    elif style in ("", "whole", "local_heads") and not is_matrix:
        split = ""
    else:
        raise _refused(
            module, f"{name}.{key} {tuple(param.shape)} is whole on every rank of tp ({style or 'no'} style)"
        )
    return Weight(tuple(param.shape), split, products=int(is_matrix))


def _outside(module: Any, plan: ModelPlan, stack: str) -> tuple[list[Weight], list[Weight]]:
    """Returns the weights before the layers, beside the embedding, and those after them, beside the head."""
    ends = {id(param) for side in ("input", "output") for param in end_of(module, side).parameters()}
    first: list[Weight] = []
    last: list[Weight] = []
    after_layers = False
    for name, param in module.named_parameters():
        if name.startswith(f"{stack}.") or id(param) in ends:
            after_layers = after_layers or name.startswith(f"{stack}.")
            continue
        if any(isinstance(part, nn.Linear) for part in (module.get_submodule(parent_of(name)),)):
            raise _refused(module, f"{name} {tuple(param.shape)} is a matrix beside the layers")
        before = any(word in name for word in _BEFORE_LAYERS)
        if not before and not after_layers:  # a pipeline refuses it
            raise _refused(module, f"{name} is registered before its layers and used after them")
        (first if before else last).append(Weight(tuple(param.shape), products=0))
    return first, last


def _head_dim(module: nn.Module, shape: ModelShape, projections: list[str]) -> int:
    """Returns the width of a head: of what the projection after attention takes."""
    heads = shape.heads or 1
    if not projections:
        return int(getattr(module.config, "head_dim", None) or (shape.hidden or heads) // heads)  # type: ignore[union-attr,unused-ignore]
    layer: Any = module.get_submodule(projections[0])
    return int(layer.nx if type(layer).__name__ == "Conv1D" else layer.in_features) // heads


def _feed_forward(module: nn.Module, plan: ModelPlan, stack: str) -> tuple[int, int]:
    """Returns the columns of a layer's feed-forward matrices, gate and input together, and the rows of its last one."""
    columns = width = 0
    for name in _names(plan, f"{stack}.0"):
        layer: Any = module.get_submodule(name)
        if parent_of(name) in plan.attentions or plan.styles[name] not in (*LOCAL_OUTPUT, "row", "packed_row"):
            continue
        inputs, outputs = (layer.nx, layer.nf) if type(layer).__name__ == "Conv1D" else layer.weight.shape[::-1]
        if plan.styles[name] in LOCAL_OUTPUT:
            columns += outputs
        else:
            width = inputs
    return columns, width


def _norms(layer: nn.Module, hidden: int) -> tuple[int, bool]:
    """Returns the number of norms of complete rows in a layer, and whether they are torch's."""
    norms = [
        part
        for part in layer.modules()
        if [tuple(param.shape) for param in part._parameters.values() if param is not None][:1] == [(hidden,)]
    ]
    return len(norms), all(isinstance(part, nn.LayerNorm) for part in norms)
