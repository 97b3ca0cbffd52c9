"""The optimizer that ZeRO-1 wraps: built on shards from the user's class or factory, or refused."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from ..gradients.elementwise import refuse_not_elementwise
from ..nearest import nearest
from .muon import MuonAdamW, is_muon_class

__all__ = ["OptimizerFactory", "check_factory", "make_base_optimizer"]

# Called with parameter groups (and options): a class, a `functools.partial` of one, any function.
OptimizerFactory = Callable[..., torch.optim.Optimizer]


def check_factory(wrapper: type, params: Any, factory: Any, options: Collection[str] = ()) -> None:
    """Refuses a factory that cannot build an optimizer of shards, as far as that is known before the call.

    Args:
        wrapper: the class that wraps the optimizer, for messages.
        params: the argument in the place of the parameters.
        options: names of options for the factory.

    Raises:
        TypeError: an optimizer was given instead of its class, something that cannot be called, a module in place of
            parameters, or an option that neither class has.
        ValueError: the optimizer's update is not elementwise.
    """
    name = wrapper.__name__
    if isinstance(params, nn.Module):
        raise TypeError(
            f"{name} got a {type(params).__name__}, a module, in place of parameters: pass model.parameters(), or "
            "model.local_parameters() of a pipeline model"
        )
    for given in (params, factory):
        if isinstance(given, torch.optim.Optimizer):
            raise TypeError(
                f"{name} creates its optimizer itself, over shards, but got an optimizer over full parameters. "
                f"Pass the class: {name}(params, {_call(given)})"
            )
    if not callable(factory):
        raise TypeError(
            f"{name}: optimizer_class is {reprlib.repr(factory)}; pass a class such as torch.optim.AdamW and its "
            "options, or a function that takes parameters and returns an optimizer"
        )
    factory = factory.func if isinstance(factory, partial) else factory
    if isinstance(factory, type):
        _refuse_shards(factory)
        accepted = inspect.signature(factory).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        for option in () if takes_any else options:
            if option not in accepted:
                known = [*accepted, *inspect.signature(wrapper).parameters]
                raise TypeError(
                    f"{name}: neither it nor {factory.__name__} takes the option {option!r}; nearest: "
                    f"{nearest(option, known)}"
                )


def make_base_optimizer(
    factory: OptimizerFactory, groups: list[dict[str, Any]], options: dict[str, Any]
) -> torch.optim.Optimizer:
    """Builds the optimizer of shards, which are passed as parameter groups.

    Raises:
        TypeError: the factory returned no optimizer.
        ValueError: the optimizer has other parameters than those passed, or its update is not elementwise.
    """
    given = [list(group["params"]) for group in groups]
    optimizer = factory(groups, **options)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer_class {factory!r} returned a {type(optimizer).__name__}, not a torch optimizer")
    _refuse_shards(type(optimizer))
    if [list(map(id, group["params"])) for group in optimizer.param_groups] != [list(map(id, ps)) for ps in given]:
        raise ValueError(
            f"optimizer_class {factory!r} returned {type(optimizer).__name__} with other parameters than those "
            "passed: it must use the parameter groups of its argument, which are shards, unchanged"
        )
    if isinstance(optimizer, torch.optim.Muon):
        optimizer = MuonAdamW.of_muon(optimizer)
    if not isinstance(optimizer, MuonAdamW) and any(group.get("optimizer") == "muon" for group in groups):
        raise ValueError(
            f"{type(optimizer).__name__} would train the matrices of muon_groups too: pass MuonAdamW as the optimizer"
        )
    optimizer.averages_over_data = True  # type: ignore[attr-defined] # the wrapper does
    return optimizer


def _refuse_shards(optimizer_class: type) -> None:
    if is_muon_class(optimizer_class):
        return
    refuse_not_elementwise(
        optimizer_class, advice=", or this optimizer after reduce_gradients(model), without the wrapper"
    )


def _call(optimizer: torch.optim.Optimizer) -> str:
    """The call that builds an optimizer, as text: its class and its options that are not defaults."""
    cls = type(optimizer)
    module = "torch.optim" if cls.__module__.startswith("torch.optim.") else cls.__module__
    parameters = inspect.signature(cls).parameters
    options = {
        name: value
        for name, value in {**optimizer.defaults, "lr": optimizer.param_groups[0].get("lr")}.items()
        if name in parameters and (name == "lr" or value != parameters[name].default)
    }
    return ", ".join([f"{module}.{cls.__qualname__}", *(f"{name}={value!r}" for name, value in options.items())])
