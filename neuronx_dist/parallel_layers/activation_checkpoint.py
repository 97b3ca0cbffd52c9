"""Activation checkpointing of layers: a layer saves its inputs, and backward recomputes its activations.

    checkpoint_layers(model, LlamaDecoderLayer)          # a class, its name, names of layers, or several of these

This is "Training Deep Nets with Sublinear Memory Cost" (Chen et al., 2016). A layer stays the same module, with its
names: only its `forward` is wrapped, so that hooks run once. Recomputation draws the same random numbers from every
stream, and calls the same collectives, as the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..nearest import nearest
from ..spmd.random import checkpoint
from ..weights.partial_model import partial_model

__all__ = ["apply_activation_checkpointing", "checkpoint_layers", "checkpoint_wrapper", "keep_random_streams"]


def checkpoint_layers(model: nn.Module, layers: Any = None) -> list[str]:
    """Makes layers of a model recompute their activations in backward; in place.

    It may be called before or after `swap`, and before or after a pipeline model is made. While gradients are off
    (`run_eval`), nothing is recomputed. A second call for a layer changes nothing.

    Args:
        model: a module, or a pipeline model.
        layers: a class of layers, its name, the name of one layer ("layers.3"), or a list of these. None: the
            `transformer_layer_cls` of a pipeline model, or the `_no_split_modules` of a Hugging Face model.

    Returns:
        The names of these layers in the model.

    Raises:
        ValueError: one of `layers` matches nothing; the message names the nearest. Or `layers` is None, and the model
            does not name its layers.
    """
    if layers is None:
        layers = _named_layers(model)
    module = partial_model(model).original_module
    named = dict(module.named_modules())
    chosen: dict[str, nn.Module] = {}
    for item in layers if isinstance(layers, (list, tuple, set, frozenset)) else [layers]:
        matching = {name: layer for name, layer in named.items() if _matches(name, layer, item)}
        if not matching:
            text = item if isinstance(item, str) else getattr(item, "__name__", repr(item))
            known = sorted({type(layer).__name__ for layer in named.values()} | set(named) - {""})
            raise ValueError(
                f"checkpoint_layers: this {type(module).__name__} has no layer {text!r}; nearest classes and names "
                f"are {nearest(text, known)}"
            )
        chosen.update(matching)
    for layer in chosen.values():
        checkpoint_wrapper(layer)
    return [name for name in named if name in chosen]


def checkpoint_wrapper(module: nn.Module) -> nn.Module:
    """Makes one module recompute its activations in backward; in place. Returns the module. (NxD's name.)"""
    if not _is_wrapped(module):
        module.forward = update_wrapper(partial(checkpoint, module.forward), module.forward)
    return module


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[[nn.Module], nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda module: True,
) -> None:
    """NxD's and torch's name: recomputes the activations of all modules inside `model` for which `check_fn` is true.

    Args:
        model: a module, or a pipeline model; it is not wrapped itself.
        checkpoint_wrapper_fn: this module's `checkpoint_wrapper`, or another function that changes a module in place.
        check_fn: module -> whether this module is recomputed as a whole.

    Raises:
        ValueError: `checkpoint_wrapper_fn` returned another module, whose parameters would have other names.
    """
    for name, module in [*partial_model(model).original_module.named_modules()]:
        if name and check_fn(module) and (other := checkpoint_wrapper_fn(module)) is not module:
            raise ValueError(
                f"apply_activation_checkpointing: checkpoint_wrapper_fn returned a {type(other).__name__} around "
                f"{name}, which changes the names of its parameters; leave it out, or pass "
                "neuronx_dist.checkpoint_wrapper"
            )


def keep_random_streams(model: nn.Module) -> None:
    """Makes Hugging Face's checkpointing replay every random stream, whenever it is switched on.

    `gradient_checkpointing_enable()` gives layers torch's checkpoint, which replays the default stream alone.
    """
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.register_forward_pre_hook(_use_our_checkpoint)


def _use_our_checkpoint(module: Any, args: Any) -> None:
    function = getattr(module, "_gradient_checkpointing_func", None)
    if isinstance(function, partial) and function.func is torch_checkpoint:
        module._gradient_checkpointing_func = checkpoint


def _named_layers(model: nn.Module) -> Any:
    """The layers that a model names as its transformer layers."""
    for attribute in ("transformer_layer_cls", "_no_split_modules"):
        layers = getattr(model, attribute, None)
        if layers:
            present = {type(module).__name__ for module in model.modules()}
            listed = list(layers) if isinstance(layers, (list, tuple, set)) else [layers]
            return [item for item in listed if not isinstance(item, str) or item in present] or listed
    raise ValueError(
        f"checkpoint_layers: the transformer layers of this {type(model).__name__} are unknown; pass their class as "
        "`layers`"
    )


def _matches(name: str, module: nn.Module, item: Any) -> bool:
    if isinstance(item, str):
        return item in (name, type(module).__name__) and name != ""
    if isinstance(item, type):
        return isinstance(module, item) and name != ""
    raise ValueError(f"checkpoint_layers: expected a class, its name, or the name of a layer, got {item!r}")


def _is_wrapped(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is checkpoint
