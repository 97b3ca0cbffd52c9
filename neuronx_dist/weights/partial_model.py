"""A model of which this rank holds a part, such as the stage of a pipeline; and an ordinary module seen as one.

Gradients, checkpoints, initial weights and the checker ask a model only what `PartialModel` answers:

    for name, param in partial_model(model).local_named_parameters():
        ...                     # of a pipeline model those of this stage, of any other module all
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import nn

from ..comm import Communicator
from .shard_spec import restamp

__all__ = [
    "PartialModel",
    "Slot",
    "buffer_slots",
    "install_parameter",
    "is_partial",
    "join",
    "parameter_names",
    "parameter_slots",
    "partial_model",
    "unwrapped",
]


class PartialModel(Protocol):
    """A model of which this rank holds a part. Names are those of the whole model.

    Attributes:
        original_module: the whole model; what other ranks hold is on the meta device.
        partitioned: whether it is known yet which part is local.
        tied_weights_synced: whether the copies of a tied weight have been made equal.
    """

    @property
    def original_module(self) -> nn.Module: ...

    @property
    def partitioned(self) -> bool: ...

    @property
    def tied_weights_synced(self) -> bool: ...

    def is_local(self, name: str) -> bool:
        """Returns whether this rank holds the parameter, buffer or module of this name."""

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules of this rank, and the containers around them."""

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters of this rank, each once; a tied weight by its first name on this rank."""

    def tied_groups(self) -> list[tuple[nn.Parameter, Communicator]]:
        """`(this rank's copy, the ranks that hold one)` of each weight that several parts hold."""


class _WholeModel:
    """An ordinary module: all of it is local."""

    partitioned = True
    tied_weights_synced = True

    def __init__(self, module: nn.Module) -> None:
        self.original_module = module

    def is_local(self, name: str) -> bool:
        return True

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return self.original_module.named_modules()

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.original_module.named_parameters()

    def tied_groups(self) -> list[tuple[nn.Parameter, Communicator]]:
        return []


_MEMBERS = (
    "original_module",
    "partitioned",
    "tied_weights_synced",
    "is_local",
    "local_named_modules",
    "local_named_parameters",
    "tied_groups",
)


def is_partial(model: Any) -> TypeGuard[PartialModel]:
    """Returns whether a model implements `PartialModel`.

    (Not `isinstance`: since Python 3.12 that does not see a submodule, such as `original_module` is one.)

    Raises:
        TypeError: it has tied weights of several ranks (`tied_groups`), and not all of the rest.
    """
    if not hasattr(model, "tied_groups"):
        return False
    missing = [name for name in _MEMBERS if not hasattr(model, name)]
    if missing:
        raise TypeError(
            f"{type(model).__name__} has tied_groups, but lacks {', '.join(missing)}: a model with a part on each "
            "rank must implement neuronx_dist.weights.partial_model.PartialModel"
        )
    return True


def unwrapped(wrapper: Any) -> Any:
    """Returns the model, or optimizer, inside of the trainer's wrappers: classes with a `wrapped_attribute`."""
    while (attribute := getattr(type(wrapper), "wrapped_attribute", None)) is not None:
        wrapper = getattr(wrapper, attribute)
    return wrapper


def partial_model(model: nn.Module | PartialModel) -> PartialModel:
    """Returns the model itself if it is partial; else a view of it in which everything is local."""
    model = unwrapped(model)
    return model if is_partial(model) else _WholeModel(model)  # type: ignore[arg-type]


class Slot(NamedTuple):
    """The place of a tensor, `module._parameters[key]` or `module._buffers[key]`; `name`: its name in the model."""

    name: str
    module: nn.Module
    key: str
    tensor: torch.Tensor


def parameter_slots(model: nn.Module | PartialModel) -> Iterator[Slot]:
    """The slots of this rank's parameters; a tied weight has several. Slots may be filled anew meanwhile."""
    return _slots(model, "_parameters")


def buffer_slots(model: nn.Module | PartialModel) -> Iterator[Slot]:
    """The slots of this rank's buffers. Slots may be filled anew meanwhile."""
    return _slots(model, "_buffers")


def _slots(model: nn.Module | PartialModel, table: str) -> Iterator[Slot]:
    part = partial_model(model)
    for prefix, module in part.local_named_modules():
        for key, tensor in list(getattr(module, table).items()):
            if tensor is not None and part.is_local(join(prefix, key)):
                yield Slot(join(prefix, key), module, key, tensor)


def parameter_names(model: nn.Module | PartialModel) -> dict[int, list[str]]:
    """All names of each parameter in the whole model, by `id`, in order: more than one where weights are tied."""
    whole = partial_model(model).original_module
    restamp(whole)
    names: dict[int, list[str]] = {}
    for name, param in whole.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return names


def install_parameter(param: torch.Tensor, value: torch.Tensor) -> None:
    """Gives a meta parameter a value; it stays the same object, so that ties, attributes and optimizers hold."""
    real = nn.Parameter(value, requires_grad=param.requires_grad)
    real.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, real)


def join(prefix: str, name: str) -> str:
    """Qualified name of the member `name` of the module at `prefix`."""
    return f"{prefix}.{name}" if prefix else name
