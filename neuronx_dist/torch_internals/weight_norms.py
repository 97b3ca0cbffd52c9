"""Functions that torch puts in the place of a parameter: norms of weights, parametrizations, pruning."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

# Names in `torch.nn.utils` of the classes that compute with a whole weight: without them the norm of a shard is
# taken for the weight's.
OF_WHOLE_WEIGHTS: dict[type, str] = {
    parametrizations._WeightNorm: "parametrizations.weight_norm",
    parametrizations._SpectralNorm: "parametrizations.spectral_norm",
    parametrizations._Orthogonal: "parametrizations.orthogonal",
    WeightNorm: "weight_norm",
    SpectralNorm: "spectral_norm",
    prune.RandomUnstructured: "prune.random_unstructured",
    prune.L1Unstructured: "prune.l1_unstructured",
    prune.RandomStructured: "prune.random_structured",
    prune.LnStructured: "prune.ln_structured",
}


def around_parametrizing(watch: Callable[[nn.Module, str, Any], AbstractContextManager[None]]) -> None:
    """Makes torch put a function of a parameter in the parameter's place in a context `watch(module, name, method)`.

    The method is a parametrization, the class of an old norm or of pruning, or, where `prune.global_unstructured`
    prunes several parameters, that function. Without it shards are parametrized as if they were weights.
    """
    register, prune_all = parametrize.register_parametrization, prune.global_unstructured

    @functools.wraps(register)
    def registered(module: nn.Module, tensor_name: str, parametrization: nn.Module, **options: Any) -> nn.Module:
        with watch(module, tensor_name, parametrization):
            return register(module, tensor_name, parametrization, **options)

    @functools.wraps(prune_all)
    def pruned(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for module, name in parameters:
                stack.enter_context(watch(module, name, prune_all))
            return prune_all(parameters, *args, **kwargs)

    parametrize.register_parametrization, prune.global_unstructured = registered, pruned
    methods: tuple[Any, ...] = (WeightNorm, SpectralNorm, prune.BasePruningMethod)
    for method in methods:
        method.apply = classmethod(_watched_apply(vars(method)["apply"], watch))


def _watched_apply(apply: Any, watch: Callable[[nn.Module, str, Any], AbstractContextManager[None]]) -> Any:
    """Returns the function of a class method, which calls the static or class method `apply` in a context."""

    def applied(cls: type, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        with watch(module, name, cls):
            return apply.__get__(None, cls)(module, name, *args, **kwargs)

    return functools.wraps(apply.__func__)(applied)
