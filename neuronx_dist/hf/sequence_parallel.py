"""Sequence parallelism for a swapped model: activations between attention and MLP are sharded along the sequence.

transformers' code reads sequence lengths off its tensors: masks and position ids off the embedding's output, attention
off its input. So the tensors are full exactly where it looks:

    tokens -> embedding        [b, s, h]     partial sums over tp, full length
           -> first layer      reduce-scatter on entry                            -> [b, s/tp, h]
    layer:    norm             [b, s/tp, h]
              attention, MLP   all-gather on entry -> [b, s, h] ... row layer reduce-scatters -> [b, s/tp, h]
           -> final norm       [b, s/tp, h]
           -> head             all-gathers its input                              -> [b, s, vocab/tp]

The entry gather's backward is the reduce-scatter that sums the input gradients over tp, so the column layers inside do
not reduce theirs (`input_is_replicated`). Replicated parameters see a part of the sequence, or a part of the heads:
their gradients are partial, which their layout says (`sequence_parallel`), and `reduce_gradients` sums them.

A part of a layer that needs the complete sequence (experts and their router, layers that gather their output, other
mixers than attention) is an island: its input is gathered, its result, equal on all ranks, is cut again. Where more
than an embedding, a norm and a head surround the layers, the sequence is cut before the first layer, and gathered after
the last.

All is done by hooks on the modules, so it holds as well when a pipeline runs the modules one by one.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn

from .. import comm, spmd
from ..parallel_layers.replace import mark_partial_gradients
from ..weights.shard_spec import spec_of
from .model_plan import ModelPlan, UnsupportedModelError, is_layer, islands_of, stacks_of, surroundings

__all__ = ["apply_sequence_parallel", "check_sequence_parallel"]

# What attention, MLP and decoder layers call their input when it is passed by name.
_HIDDEN = ("hidden_states", "hidden_state", "x")
_OF_EVERY_LAYER = "per_layer_input"  # an argument of layers `[b, s, features]`, computed from all tokens (Gemma 4)
# Arguments of layers that belong to the tokens of the complete sequence, or come from earlier layers beside the hidden
# states; and classes inside of layers whose hidden states are several streams, `[b, s, streams, h]`.
_OF_TOKENS = ("audio_token_mask", "block_states", "ple_input_ids")
_STREAMS = ("HyperConnection", "AltUp")


def check_sequence_parallel(model: Any, plan: ModelPlan) -> None:
    """Refuses models without one list of layers that take one stream of hidden states, or with experts beside it.

    Raises:
        UnsupportedModelError: with the reason.
    """
    stacks, reason = stacks_of(plan), ""
    experts = [name for name, style in plan.styles.items() if style == "experts"]
    config = getattr(model, "config", None)
    count = getattr(config and config.get_text_config(), "num_hidden_layers", None) or 1
    if len(stacks) != 1:
        reason = f"has {len(stacks)} lists of layers{': ' if stacks else ''}{', '.join(stacks)}"
    elif len(model.get_submodule(stacks[0])) < count:
        reason = f"calls the layers of {stacks[0]} {count} times"
    elif any(is_layer(name.rpartition(".")[0]) for name in experts):
        reason = f"has experts and a router beside the other parts of a layer ({experts[0]})"
    else:
        layer = model.get_submodule(stacks[0])[0]
        streams = [name for name, module in layer.named_modules() if any(s in type(module).__name__ for s in _STREAMS)]
        arguments = [name for name in _OF_TOKENS if name in signature(layer.forward).parameters]
        if streams:
            reason = f"has several streams of hidden states ({stacks[0]}.0.{streams[0]})"
        elif arguments:
            reason = f"passes {arguments[0]} to its layers, which belongs to the complete sequence"
    if reason:
        raise UnsupportedModelError(
            f"sequence_parallel=True needs one list of layers, called in turn; {type(model).__name__} {reason}: swap "
            "it without"
        )


def apply_sequence_parallel(model: nn.Module, plan: ModelPlan) -> None:
    """Adds the hooks, and marks the replicated parameters. The layers were built for it by `swap`."""
    layers: Any = model.get_submodule(stacks_of(plan)[0])
    islands = islands_of(model, plan)
    names = list(signature(layers[0].forward).parameters)
    if _OF_EVERY_LAYER in names:
        for layer in layers:
            layer.register_forward_pre_hook(partial(_take_argument, names.index(_OF_EVERY_LAYER)), with_kwargs=True)
    if surroundings(model, plan):
        layers[0].register_forward_pre_hook(_take_sequence, with_kwargs=True)
        layers[-1].register_forward_hook(_gather_output)
    else:
        layers[0].register_forward_pre_hook(_scatter_embedding, with_kwargs=True)
    for region in plan.regions:
        if not any(f"{region}.".startswith(f"{root}.") for root in islands):
            model.get_submodule(region).register_forward_pre_hook(_gather_sequence, with_kwargs=True)
    for root in map(model.get_submodule, islands):
        root.register_forward_pre_hook(_gather_equal, with_kwargs=True)
        root.register_forward_hook(_take_output, with_kwargs=True)
    apart = {module for root in islands for module in model.get_submodule(root).modules()}
    for module in (layers if surroundings(model, plan) else model).modules():
        if module not in apart and not any(spec_of(param).is_sharded for param in module.parameters(recurse=False)):
            mark_partial_gradients(module)
    if plan.head and plan.local_logits:
        model.register_forward_pre_hook(_refuse_part_of_the_logits, with_kwargs=True)


def _take(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sequence `[batch, seq, hidden]` that is equal on all ranks."""
    _check_length(x)
    return spmd.convert(x, "tp", src=spmd.I, dst=spmd.S(1))


def _gather(x: torch.Tensor) -> torch.Tensor:
    return spmd.all_gather(x, "tp", src=spmd.S(1), dst=spmd.I)


def _take_sequence(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    return _on_hidden_states(_take, args, kwargs)


def _take_argument(position: int, layer: nn.Module, args: Any, kwargs: Any) -> Any:
    """Takes this rank's part of the argument for every layer, which is equal on all ranks; None stays."""
    if len(args) > position:
        x = args[position]
        return (*args[:position], None if x is None else _take(x), *args[position + 1 :]), kwargs
    x = kwargs.get(_OF_EVERY_LAYER)
    return args, kwargs if x is None else {**kwargs, _OF_EVERY_LAYER: _take(x)}


def _gather_equal(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Gathers the input of an island, and arguments of its shape: a residual that is added inside."""
    shape = (args[0] if args else kwargs[_hidden_name(kwargs)]).shape

    def gathered(x: Any) -> Any:
        return _gather(x) if isinstance(x, torch.Tensor) and x.shape == shape else x

    return tuple(map(gathered, args)), {name: gathered(x) for name, x in kwargs.items()}


def _gather_output(module: nn.Module, args: Any, output: Any) -> Any:
    return (_gather(output[0]), *output[1:]) if isinstance(output, tuple) else _gather(output)


def _take_output(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    batch, length = (args[0] if args else kwargs[_hidden_name(kwargs)]).shape[:2]

    def take(x: torch.Tensor) -> torch.Tensor:  # Llama 4 returns its tokens as [batch * seq, hidden]
        return _take(x.unflatten(0, (batch, length))).flatten(0, 1) if x.ndim == 2 else _take(x)

    return (take(output[0]), *output[1:]) if isinstance(output, tuple) else take(output)


def _check_length(x: torch.Tensor) -> None:
    tp = comm.size("tp")
    if x.shape[1] % tp:
        raise ValueError(
            f"sequence parallelism: a sequence of {x.shape[1]} tokens is not divisible by tp={tp}; "
            f"pad it to {-(-x.shape[1] // tp) * tp}"
        )


def _scatter_embedding(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    def scatter(x: torch.Tensor) -> torch.Tensor:
        _check_length(x)
        return spmd.reduce_scatter(x, "tp", src=spmd.P, dst=spmd.S(1), reduce_dtype=torch.float32)

    return _on_hidden_states(scatter, args, kwargs)


def _gather_sequence(module: nn.Module, args: Any, kwargs: Any) -> Any:
    def gather(x: torch.Tensor) -> torch.Tensor:  # the dtype is that of the sum in backward
        return spmd.all_gather(x, "tp", src=spmd.S(1), dst=spmd.R, reduce_dtype=torch.float32)

    return _on_hidden_states(gather, args, kwargs)


def _on_hidden_states(change: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = _hidden_name(kwargs)
    return args, {**kwargs, name: change(kwargs[name])}


def _hidden_name(kwargs: dict[str, Any]) -> str:
    return next(name for name in _HIDDEN if name in kwargs)


def _refuse_part_of_the_logits(model: nn.Module, args: Any, kwargs: Any) -> None:
    keep = kwargs.get("logits_to_keep", 0)
    if not isinstance(keep, int) or keep != 0:
        raise ValueError(
            "sequence parallelism: logits_to_keep would select positions of this rank's shard; leave it at 0, or swap "
            "without sequence_parallel for generation"
        )
