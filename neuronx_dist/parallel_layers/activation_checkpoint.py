"""Activation checkpointing of modules and functions: inputs are saved, and backward recomputes the activations.

    checkpoint_layers(model, "full")                     # the transformer layers
    checkpoint_layers(model, "attention")                # scores and probabilities, not the projections
    checkpoint_layers(model, ["norms", "LlamaMLP", "model.layers.3", MyBlock])
    checkpoint_layers(model, lambda module: isinstance(module, MyBlock) and module.index % 2 == 0)
    checkpoint_layers(model, functions=[F.silu, torch.tanh])

"full" is "Training Deep Nets with Sublinear Memory Cost" (Chen et al., 2016), "attention" the selective one of
"Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al., 2022). A module stays the same,
with its names: only its `forward` is wrapped, so that hooks run once. Recomputation draws the same random numbers from
every stream, and calls the same collectives, as the forward. Freed is what is saved inside: an input stays, and so does
a result that a call outside saves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn
from torch.overrides import resolve_name
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..nearest import nearest
from ..spmd.random import checkpoint
from ..weights.partial_model import partial_model
from .checkpointed_calls import attends, checkpoint_on_host, recompute_attention, run_inside, unchanged, writes_argument

__all__ = [
    "WORDS",
    "apply_activation_checkpointing",
    "checkpoint_layers",
    "checkpoint_wrapper",
    "keep_random_streams",
    "modules_of",
    "transformer_layers",
]

WORDS = ("full", "attention", "norms")
_NORM = re.compile(r"(Layer|RMS|Group|L2)_?Norm")  # in names of classes


def checkpoint_layers(
    model: nn.Module,
    layers: Any = None,
    *,
    functions: Collection[Callable[..., Any]] | Callable[[Any], bool] = (),
    offload: bool = False,
) -> list[str]:
    """Makes parts of a model recompute their activations in backward; in place.

    It may be called before or after `swap`, and before or after a pipeline model is made. While gradients are off
    (`run_eval`), nothing is recomputed. A second call for a module changes nothing.

    Args:
        model: a module, or a pipeline model.
        layers: "full": the `transformer_layer_cls` of a pipeline model, or the `_no_split_modules` of a Hugging Face
            model. "attention": the attention function of each attention, without its projections. "norms": the layers
            that normalise. A class of modules, its name, the name of one module ("layers.3"), a predicate on modules,
            or a list of these. None: "full", or nothing if there are `functions`.
        functions: torch functions whose calls run under a checkpoint, one by one: a list, one, or a predicate.
        offload: saved inputs that require a gradient lie in the host's memory, pinned if the device has a stream to
            copy on, until backward.

    Returns:
        The names of these modules in the model.

    Raises:
        ValueError: one of `layers` matches nothing; the message names the nearest. Or "full", and the model does not
            name its layers.
    """
    module = partial_model(model).original_module
    run = checkpoint_on_host if offload else checkpoint
    named = dict(module.named_modules())
    chosen: set[str] = set()
    actions: list[Callable[[], Any]] = []  # after all of `layers` are known to match
    for item in _items(model, layers, functions):
        matching = modules_of(module, item)
        if not matching:
            raise ValueError(_no_match(type(module).__name__, named, item))
        change: Callable[..., Any] = recompute_attention if item == "attention" else _wrap
        actions += [partial(change, layer, run) for layer in matching.values()]
        chosen |= set(matching)
    if functions:
        is_listed = not callable(functions) or resolve_name(functions) is not None  # one function of torch, as F.relu
        listed: list[Any] = [functions] if callable(functions) else list(functions)
        if others := [x for x in listed if isinstance(x, type) or not callable(x)]:
            raise ValueError(
                f"recompute: functions has {others[0]!r}: pass functions of torch, such as [F.silu], or a predicate on "
                "functions; classes of modules go into the first argument"
            )
        if in_place := [function for function in listed if is_listed and writes_argument(function)]:
            raise ValueError(
                f"recompute: {in_place[0].__name__} changes its argument in place, which cannot be recomputed: "
                "leave it out of functions"
            )
        called: Callable[[Any], Any] = set(listed).__contains__ if is_listed else listed[0]
        inside = transformer_layers(model)
        actions += [partial(run_inside, named[name], called, run) for name in ("", *inside)]
        chosen |= set(inside)
    for action in actions:
        action()
    return [name for name in named if name in chosen]


def modules_of(module: nn.Module, item: Any) -> dict[str, nn.Module]:
    """Returns by name the modules that a word, class, name or predicate stands for; "attention": `module` too."""
    named = dict(module.named_modules())
    if item == "attention":
        return {name: layer for name, layer in named.items() if attends(layer)}
    return {name: layer for name, layer in named.items() if _matches(name, layer, item)}


def _items(model: nn.Module, layers: Any, functions: Any) -> Iterator[Any]:
    """Yields the classes, names, words and predicates of `layers`; in place of "full" the layers that it stands for."""
    if layers is None:
        layers = () if functions else "full"
    for item in layers if isinstance(layers, (list, tuple, set, frozenset)) else [layers]:
        if isinstance(item, str) and item == "full":
            yield from _named_layers(model)
        elif isinstance(item, str) or callable(item):
            yield item
        else:
            raise ValueError(
                f"recompute: expected {', '.join(map(repr, WORDS))}, a class, its name, the name of a layer, "
                f"or a predicate on modules, got {item!r}"
            )


def _no_match(model: str, named: dict[str, nn.Module], item: Any) -> str:
    if item == "attention":
        return (
            f"recompute: no module of this {model} calls an attention function in its forward "
            "(transformers' attention interface, F.scaled_dot_product_attention): pass the class of its attention"
        )
    known = sorted({type(layer).__name__ for layer in named.values()} | set(named) - {""} | set(WORDS))
    text = item if isinstance(item, str) else getattr(item, "__name__", repr(item))
    what = "norms" if item == "norms" else f"layer {text!r}"
    return f"recompute: this {model} has no {what}; nearest words, classes and names are {nearest(text, known)}"


def checkpoint_wrapper(module: nn.Module) -> nn.Module:
    """Makes one module recompute its activations in backward; in place. Returns the module. (NxD's name.)"""
    return _wrap(module, checkpoint)


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


def _named_layers(model: nn.Module) -> list[Any]:
    """Returns the layers that a model names as its transformer layers."""
    for attribute in ("transformer_layer_cls", "_no_split_modules"):
        layers = getattr(model, attribute, None)
        if layers:
            present = {type(module).__name__ for module in model.modules()}
            listed = list(layers) if isinstance(layers, (list, tuple, set)) else [layers]
            return [item for item in listed if not isinstance(item, str) or item in present] or listed
    raise ValueError(
        f"recompute: the transformer layers of this {type(model).__name__} are unknown; pass their class (of a wrapped "
        "model, the module inside)"
    )


def transformer_layers(model: nn.Module) -> list[str]:
    """Names of a model's transformer layers; none if the model does not name their class."""
    try:
        items = _named_layers(model)
    except ValueError:
        return []
    named = partial_model(model).original_module.named_modules()
    return [name for name, module in named if any(_matches(name, module, item) for item in items)]


def _matches(name: str, module: nn.Module, item: Any) -> bool:
    if name == "":
        return False
    if isinstance(item, str):
        is_norm = item == "norms" and _NORM.search(type(module).__name__)
        return bool(is_norm) or item in (name, type(module).__name__)
    return isinstance(module, item) if isinstance(item, type) else bool(item(module))


def _wrap(module: nn.Module, run: Callable[..., Any]) -> nn.Module:
    forward = module.__dict__.get("forward")
    if not (isinstance(forward, partial) and forward.func is _recompute):
        module.forward = update_wrapper(partial(_recompute, module, run, module.forward), module.forward)
    return module


def _recompute(
    module: nn.Module, run: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs the forward of a module under a checkpoint, without a cache of transformers', which backward would extend.

    Raises:
        ValueError: the cache is not empty.
        RuntimeError: an argument changes in place.
    """
    if torch.is_grad_enabled():
        args = tuple(_no_cache(module, x) for x in args)
        kwargs = {name: _no_cache(module, x) for name, x in kwargs.items()}
    return run(unchanged(forward, type(module).__name__, run), *args, **kwargs)


def _no_cache(module: nn.Module, x: Any) -> Any:
    if not hasattr(x, "get_seq_length"):
        return x
    layer = next((index for part in module.modules() if (index := getattr(part, "layer_idx", None)) is not None), 0)
    if length := int(x.get_seq_length(layer)):
        raise ValueError(
            f"recompute: {type(module).__name__} receives a {type(x).__name__} of {length} tokens, to which backward "
            "would append again: leave out past_key_values in training, or call the model under torch.no_grad()"
        )
    return None
