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

How "attention" finds the function: modules of transformers call one of their attention interface, which runs under a
checkpoint in modules that have the mark `_ATTENTION` (`_attend`); others call torch's, which the mode `_Calls` sees.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial, update_wrapper
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..nearest import nearest
from ..spmd.random import checkpoint
from ..torch_internals.autograd import in_checkpoint
from ..torch_internals.tensors import storage_key, version_of
from ..weights.partial_model import partial_model

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
_IN_PLACE = re.compile(r".*[^_]_|__(i(add|sub|mul|truediv|floordiv|mod|and|or|xor|lshift|rshift|pow)|set(item)?)__")
_ATTENTION = "_recomputed_attention"  # attribute of a module of transformers: the checkpoint that its attention runs in
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the name by which modules of transformers read the attention interface
_FUNCTIONS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
_local = threading.local()  # .modes: the functions that `_Calls` of this thread run under checkpoints


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
        change: Callable[..., Any] = _recompute_attention if item == "attention" else _wrap
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
        if in_place := [function for function in listed if is_listed and _writes(function)]:
            raise ValueError(
                f"recompute: {in_place[0].__name__} changes its argument in place, which cannot be recomputed: "
                "leave it out of functions"
            )
        called: Callable[[Any], Any] = set(listed).__contains__ if is_listed else listed[0]
        inside = transformer_layers(model)
        actions += [partial(_run_inside, named[name], called, run) for name in ("", *inside)]
        chosen |= set(inside)
    for action in actions:
        action()
    return [name for name in named if name in chosen]


def modules_of(module: nn.Module, item: Any) -> dict[str, nn.Module]:
    """Returns by name the modules that a word, class, name or predicate stands for; "attention": `module` too."""
    named = dict(module.named_modules())
    if item == "attention":
        return {name: layer for name, layer in named.items() if _attends(layer)}
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
    return run(_unchanged(forward, type(module).__name__, run), *args, **kwargs)


def _unchanged(function: Callable[..., Any], name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function for a checkpoint: it raises if a tensor among its arguments changes in place until backward.

    Those on the host (`checkpoint_on_host`) are copies, which only the call itself can change.
    """
    if is_compiling() or not torch.is_grad_enabled():
        return function
    before: dict[Any, tuple[int, bool]] = {}  # version, and whether it is the same tensor in backward

    def check(arguments: dict[Any, Any], when: str) -> None:
        for key, (version, stays) in before.items():
            if version_of(arguments[key]) != version and (stays or when == "by the call"):
                raise RuntimeError(
                    f"recompute: argument {key!r} of {name} was changed in place {when}, so that backward would "
                    f"recompute another result: pass a copy to {name}, or do not recompute it"
                )

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        if before:
            check(arguments, "after the call")
            return function(*args, **kwargs)
        for key, x in arguments.items():
            if isinstance(x, torch.Tensor) and not x.is_inference():
                before[key] = version_of(x), run is not checkpoint_on_host or not _moves(x)
        result = function(*args, **kwargs)
        check(arguments, "by the call")
        return result

    return call


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


# --- functions --------------------------------------------------------------------------------------------------------


def _attends(module: nn.Module) -> bool:
    """Returns whether the forward of a module calls an attention function."""
    return _calls(module, _INTERFACE, *(function.__name__ for function in _FUNCTIONS))


def _calls(module: nn.Module, *names: str) -> bool:
    """Returns whether the forward of a module's class, or a function inside of it, reads one of these names."""
    code = [inspect.unwrap(type(module).forward).__code__]
    code += [constant for constant in code[0].co_consts if inspect.iscode(constant)]
    return any(not set(names).isdisjoint(one.co_names) for one in code)


def _recompute_attention(module: nn.Module, run: Callable[..., Any]) -> None:
    if not _calls(module, _INTERFACE):
        _run_inside(module, _FUNCTIONS.__contains__, run)
        return
    vars(module).setdefault(_ATTENTION, _Mark(run))
    vars(module).setdefault("forward", module.forward)  # a pipeline's recording before it does not serve any more


class _Mark:
    """Checkpoint in which a module's attention runs; in each process that has one the interface asks for it."""

    def __init__(self, run: Callable[..., Any]) -> None:
        from transformers.modeling_utils import AttentionInterface  # type: ignore[import-untyped, unused-ignore]

        self.run, get_interface = run, AttentionInterface.get_interface
        if not hasattr(get_interface, _ATTENTION):

            def get(self: Any, *args: Any, **kwargs: Any) -> Any:
                return partial(_attend, get_interface(self, *args, **kwargs))

            AttentionInterface.get_interface = update_wrapper(get, get_interface)
            setattr(get, _ATTENTION, True)

    def __reduce__(self) -> Any:
        return _Mark, (self.run,)  # after pickling: in another process


def _attend(function: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs a function of transformers' attention interface, under a checkpoint if the module has the mark."""
    mark = vars(module).get(_ATTENTION)
    if mark is None:
        return function(module, *args, **kwargs)
    return mark.run(
        _unchanged(function, f"the attention of {type(module).__name__}", mark.run), module, *args, **kwargs
    )


def _run_inside(module: nn.Module, called: Callable[[Any], bool], run: Callable[..., Any]) -> None:
    """Makes the functions that a module calls, and for which `called` is true, run under checkpoints."""
    module.forward = update_wrapper(partial(_with_calls, module.forward, called, run), module.forward)


def _with_calls(
    forward: Callable[..., Any], called: Callable[[Any], bool], run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    with _Calls(called, run):
        return forward(*args, **kwargs)


def _writes(function: Any) -> bool:
    """Returns whether a function changes its first argument, by its name."""
    return _IN_PLACE.fullmatch(getattr(function, "__name__", "")) is not None


class _Calls(TorchFunctionMode):
    """Runs the functions for which `called` is true under checkpoints: of nested modes the innermost does."""

    def __init__(self, called: Callable[[Any], bool], run: Callable[..., Any]) -> None:
        super().__init__()
        self._called, self._run = called, run

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(_local, "is_inside", False) or not torch.is_grad_enabled() or not self._called(func):
            return func(*args, **(kwargs or {}))
        is_recomputed = not is_compiling() and in_checkpoint()  # without this mode
        if is_recomputed or _writes(func) or (kwargs and (kwargs.get("inplace") or "out" in kwargs)):
            return func(*args, **(kwargs or {}))
        _local.is_inside = True
        try:
            once = _unchanged(func, func.__name__, self._run)
            call, values, _ = _distinct(once, args, kwargs or {})  # attention of x to itself needs one x
            return self._run(call, *values)
        finally:
            _local.is_inside = False


# --- inputs on the host -----------------------------------------------------------------------------------------------


def checkpoint_on_host(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a function as `checkpoint` does, and moves the activations among its arguments to the host until backward.

    These are tensors that require a gradient and have a history: weights, masks and rotary embeddings, which others
    hold too, stay. In compiled code all stay.
    """
    if is_compiling() or not torch.is_grad_enabled():
        return checkpoint(function, *args, **kwargs)
    function, args, _ = _distinct(function, args, kwargs)
    tensors = [x for x in args if isinstance(x, torch.Tensor) and _moves(x)]
    moved = {storage_key(x.untyped_storage()) for x in tensors}
    with torch.autograd.graph.saved_tensors_hooks(partial(_to_host, moved), _from_host):
        return checkpoint(function, *args)


def _distinct(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns a function of the distinct values among the arguments, these, and no keywords.

    A checkpoint saves positional arguments alone, each by itself.
    """
    values = (*args, *kwargs.values())
    distinct = {id(x): x for x in values}
    positions = {key: position for position, key in enumerate(distinct)}
    order = [positions[id(x)] for x in values]

    def call(*distinct: Any) -> Any:
        again = [distinct[position] for position in order]
        return function(*again[: len(args)], **dict(zip(kwargs, again[len(args) :])))

    return call, tuple(distinct.values()), {}


def _moves(x: torch.Tensor) -> bool:
    return x.requires_grad and not x.is_leaf


def _to_host(moved: set[int], x: torch.Tensor) -> Any:
    if storage_key(x.untyped_storage()) not in moved:
        return x
    on_host = torch.empty_like(x, device="cpu", pin_memory=x.device.type == "cuda")
    return x.device, on_host.copy_(x, non_blocking=True)


def _from_host(saved: Any) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    device, on_host = saved
    return on_host.to(device, non_blocking=True)
