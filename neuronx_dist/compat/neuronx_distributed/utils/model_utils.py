"""NxD's functions for models: building on meta, moving to a device with ties and marks of parameters."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from ....parallel_layers.utils import copy_tensor_model_parallel_attributes, move_model_to_device
from ....weights.init_device import init_on_device as _init_on_device
from ....weights.materialize import initialize_modules

__all__ = [
    "LogicalNCConfig",
    "analyze_shared_parameters",
    "check_delay_tracing",
    "get_delay_tracing",
    "get_model_sequential",
    "get_platform_lnc",
    "has_fake_tensors",
    "init_on_device",
    "is_hf_accelerate_available",
    "is_hf_pretrained_model",
    "is_hf_transformers_available",
    "is_nxdt_available",
    "is_nxdt_pretrained_model",
    "move_model_to_device",
    "preserve_parallel_attributes",
    "preserve_shared_weights",
    "recursive_filter",
    "reinit_model",
    "retie_shared_weights",
]


class LogicalNCConfig(IntEnum):
    """NxD's names for the number of physical cores of a logical one."""

    LNC_1 = 1
    LNC_2 = 2


@contextmanager
def init_on_device(
    device: str | torch.device, include_buffers: bool = False, force_custom_init_on_device: bool = False
) -> Iterator[None]:
    """`neuronx_dist.init_on_device`; the last argument has no effect."""
    with _init_on_device(device, include_buffers=include_buffers):
        yield


def reinit_model(model: nn.Module, device: torch.device, param_init_fn: Callable[..., Any]) -> None:
    """Gives the parameters on meta their values by `param_init_fn(module, device)`, and moves the model."""
    initialize_modules(model.named_modules(), param_init_fn)
    move_model_to_device(model, device)


def get_model_sequential(
    model: nn.Module,
    device: torch.device,
    sequential_move_factor: int = 11,
    param_init_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Gives parameters on meta their values, and moves the model to the device. Returns the model."""
    if param_init_fn is not None:
        initialize_modules(model.named_modules(), param_init_fn)
    return move_model_to_device(model, device)


def is_hf_transformers_available() -> bool:
    """Returns whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def is_hf_accelerate_available() -> bool:
    """Returns whether accelerate is installed."""
    return importlib.util.find_spec("accelerate") is not None


def is_nxdt_available() -> bool:
    """Returns False: NxD Training is not supported."""
    return False


def is_nxdt_pretrained_model(model: nn.Module) -> bool:
    """Returns False: NxD Training is not supported."""
    return False


def has_fake_tensors(model: nn.Module, ignored_params: set[nn.Parameter] | None = None) -> bool:
    """Returns False: torchdistx's fake tensors are not supported; models are built on meta."""
    return False


def check_delay_tracing(nxd_config: Any) -> bool:
    """Returns False: a pipeline model is cut when it is made."""
    return False


def get_delay_tracing(arg: Any) -> bool:
    """Returns False: a pipeline model is cut when it is made."""
    return False


def get_platform_lnc() -> LogicalNCConfig:
    """Returns the number of physical cores of a logical one that `NEURON_LOGICAL_NC_CONFIG` says, 1 by default."""
    return LogicalNCConfig(int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", "1")))


def is_hf_pretrained_model(model: nn.Module) -> bool:
    """Returns whether a model is one of transformers' `PreTrainedModel`."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.") for cls in type(model).mro()
    )


def analyze_shared_parameters(
    module: nn.Module, shared_parameters: dict[nn.Parameter, list[str]] | None = None, prefix: str = ""
) -> list[list[str]]:
    """Returns the names of each parameter that has several."""
    names = {} if shared_parameters is None else shared_parameters
    for name, param in module.named_parameters(prefix, remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return [found for found in names.values() if len(found) > 1]


def retie_shared_weights(module: nn.Module, shared_weight_names: list[list[str]]) -> None:
    """Makes all names of a list the parameter of its first name."""
    for first, *others in shared_weight_names:
        param = module.get_parameter(first)
        for name in others:
            owner, _, key = name.rpartition(".")
            module.get_submodule(owner)._parameters[key] = param


@contextmanager
def preserve_shared_weights(model: nn.Module, ignore_hf: bool = False) -> Iterator[None]:
    """Ties again at the end what was tied at the start."""
    names = analyze_shared_parameters(model)
    try:
        yield
    finally:
        retie_shared_weights(model, names)


@contextmanager
def preserve_parallel_attributes(model: nn.Module) -> Iterator[None]:
    """Gives parameters that are replaced inside the marks of the parameters of the same names."""
    before = dict(model.named_parameters())
    try:
        yield
    finally:
        for name, param in model.named_parameters():
            if name in before and param is not before[name]:
                copy_tensor_model_parallel_attributes(param, before[name])


def recursive_filter(item: Any, predicate: Callable[[torch.Tensor], bool]) -> Any:
    """Returns a nest of dicts, lists, tuples and sets without the tensors for which `predicate` is false."""

    def stays(value: Any) -> bool:
        return not isinstance(value, torch.Tensor) or predicate(value)

    if isinstance(item, dict):
        return {key: recursive_filter(value, predicate) for key, value in item.items() if stays(value)}
    if isinstance(item, (list, tuple, set)):
        return type(item)(recursive_filter(value, predicate) for value in item if stays(value))
    return item if stays(item) else None
