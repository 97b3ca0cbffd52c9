"""The model of NxD's trainer: a module, or a pipeline model, with NxD's methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..gradients.accumulation import adding_to_reduced
from ..modules.lora.model import AdapterMethods
from ..pipeline.model import NxDPPModel

__all__ = ["NxDModel", "loss_of"]


class NxDModel(AdapterMethods):
    """A model made by `initialize_parallel_model`: names of parameters are those of the model inside.

    Attributes that it does not have are the model's. `save_checkpoint`, `reduce_gradients` and the other functions of
    this package take it as the model inside.

    Attributes:
        module: the model, or the pipeline model around it.
        nxd_config: the configuration.
        pp_enabled: whether `module` is a pipeline model.
    """

    wrapped_attribute = "module"

    def __init__(self, module: nn.Module, nxd_config: Mapping[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.nxd_config = nxd_config
        self.pp_enabled = isinstance(module, NxDPPModel)
        if not self.pp_enabled:
            self.train()

    def __repr__(self) -> str:
        return f"NxDModel({self.module!r})"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    # Torch's own go through `named_children`, which are those of the model inside: they would leave that out.

    @property
    def training(self) -> bool:
        """Whether the model inside, or a module of this stage, is in training mode."""
        return any(module.training for module in self.local_modules())

    @training.setter
    def training(self, mode: bool) -> None:
        if "_modules" in vars(self):  # not yet in torch's `__init__`
            for module in self.local_modules():
                module.training = mode

    def train(self, mode: bool = True) -> NxDModel:
        self.module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], Any]) -> NxDModel:
        self.module.apply(fn)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> NxDModel:
        self.module._apply(fn, recurse)
        return self

    def run_train(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of a batch; gradients are added to those that parameters have.

        `NxDOptimizer.step` reduces them over ranks. In a pipeline inputs are passed by name.

        Returns:
            The loss: of a pipeline on its last stage, None on other stages; of another model its result, or the `loss`
            of its result, or the result's first element.

        Raises:
            TypeError: the result contains no loss.
        """
        if self.pp_enabled:
            with adding_to_reduced(self.module):
                return self.module.run_train(*args, **kwargs)
        loss = loss_of(self.module(*args, **kwargs))
        loss.backward()
        return loss.detach()

    def run_eval(self, *args: Any, **kwargs: Any) -> Any:
        """Forward without gradients, in evaluation mode; the mode is set back afterwards.

        Returns:
            Of a pipeline the loss, as `NxDPPModel.run_eval`; of another model the result of its forward.
        """
        if self.pp_enabled:
            return self.module.run_eval(*args, **kwargs)
        modes = [(module, module.training) for module in self.module.modules()]
        try:
            with torch.no_grad():
                return self.module.eval()(*args, **kwargs)
        finally:
            for module, training in modes:
                module.training = training

    def local_modules(self) -> list[nn.Module]:
        """Returns the modules of this rank: the children of this stage, or the model."""
        return list(self.module.local_children()) if self.pp_enabled else [self.module]

    def original_module(self) -> nn.Module:
        """Returns the model that `model_fn` built."""
        return self.module.original_module if self.pp_enabled else self.module

    @property
    def dtype(self) -> torch.dtype:
        return getattr(self.original_module(), "dtype", None) or next(self.parameters()).dtype

    @property
    def config(self) -> Any:
        return self.original_module().config

    @property
    def name_or_path(self) -> str:
        return str(self.original_module().name_or_path)

    # In a pipeline these are of this stage.

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._part("named_parameters")(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self._part("named_buffers")(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self._part("named_children")()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return self._part("named_modules")(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _part(self, name: str) -> Any:
        return getattr(self.module, f"local_{name}" if self.pp_enabled else name)


def loss_of(result: Any) -> torch.Tensor:
    """Returns the loss in a result: the result, its `loss`, or its first element.

    Raises:
        TypeError: it contains no loss.
    """
    found = result
    if not isinstance(found, torch.Tensor):
        found = getattr(found, "loss", None)
    if found is None and isinstance(result, Mapping):
        found = result.get("loss")
    if found is None and isinstance(result, (tuple, list)) and result:
        found = result[0]
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise TypeError(
            f"run_train: the forward must return the loss, a result with `loss`, or a tuple that begins with it; got a "
            f"{type(result).__name__}"
        )
    return found
