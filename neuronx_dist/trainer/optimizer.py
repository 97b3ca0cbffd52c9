"""The optimizer of NxD's trainer: its step reduces the gradients over the mesh, and clips them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..gradients.gradient import parameters_of
from ..gradients.norm import clip_grad_norm
from ..gradients.reduce import complete_reduction

__all__ = ["NxDOptimizer"]


class NxDOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` first reduces the gradients over the mesh, and clips them.

    Gradients of sequence-parallel parameters are summed over tp, all are averaged over dp x cp (experts' over edp).
    What a pipeline's `run_train` has done is not done again. With ZeRO-1 the optimizer inside averages and clips.

    Attributes:
        optimizer: the optimizer inside; `param_groups`, `state` and `defaults` are its.
        nxd_config: the configuration.
    """

    wrapped_attribute = "optimizer"

    def __init__(self, optimizer: torch.optim.Optimizer, nxd_config: Mapping[str, Any]) -> None:
        self.optimizer = optimizer
        self.nxd_config = nxd_config
        self._grad_norm: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"NxDOptimizer({self.optimizer!r})"

    def __getattr__(self, name: str) -> Any:  # hooks and whatever else the optimizer inside has
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __reduce__(self) -> Any:  # for pickle and deepcopy; `__getstate__` is what torch_xla's functions read
        return type(self), (self.optimizer, self.nxd_config)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.optimizer.__getstate__())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizer.__setstate__(state)

    @property
    def params(self) -> list[torch.Tensor]:
        """NxD's name for the parameters of all groups."""
        return parameters_of(self.optimizer)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of the last step's gradients over all ranks, before clipping; None without clipping."""
        return self._grad_norm

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduces gradients, clips them, and steps; all ranks call it.

        Raises:
            ValueError: a closure without ZeRO-1: its gradients would not be reduced.
        """
        options = self.nxd_config["optimizer_config"]
        params = self.params
        if not options["zero_one_enabled"] and closure is not None:
            raise ValueError(
                "NxDOptimizer.step(closure): gradients that a closure computes would not be reduced over ranks; "
                "compute them by run_train before step()"
            )
        try:
            complete_reduction(params, average_over_data=not options["zero_one_enabled"])
        except RuntimeError as error:
            if "second call" in str(error):
                raise RuntimeError(
                    "NxDOptimizer.step: these gradients were reduced, and stepped on, already: call zero_grad() and "
                    "run_train (or backward) before the next step"
                ) from error
            raise
        if options["zero_one_enabled"]:
            result = self.optimizer.step(closure)
            self._grad_norm = self.optimizer.grad_norm  # type: ignore[attr-defined]
            return result
        if options["grad_clipping"]:
            self._grad_norm = clip_grad_norm(params, options["max_grad_norm"])
        return self.optimizer.step()

    def save_state_dict(self, output_dir: str, num_workers_per_step: int = 8) -> None:
        """Saves the state of ZeRO-1, in NxD's older format; `save_checkpoint` is preferred."""
        self.optimizer.save_sharded_state_dict(output_dir, num_workers_per_step)  # type: ignore[attr-defined]

    def load_state_dict_from(self, output_dir: str, num_workers_per_step: int = 8) -> None:
        """Loads the state that `save_state_dict` saved."""
        self.optimizer.load_sharded_state_dict(output_dir, num_workers_per_step)  # type: ignore[attr-defined]
