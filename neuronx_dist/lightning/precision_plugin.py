"""The step of an optimizer under Lightning: gradients first, then reduction, clipping and update in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.plugins.precision import Precision

from ..trainer import NxDOptimizer

__all__ = ["NeuronXLAPrecisionPlugin"]


class NeuronXLAPrecisionPlugin(Precision):
    """Steps an `NxDOptimizer`, which reduces gradients over ranks and clips them.

    The model has the dtype that it was built in; `mixed_precision_config` of the configuration has the masters.

    Args:
        mixed_precision_enabled: as NxD has it, without effect.
    """

    def __init__(self, mixed_precision_enabled: bool = False) -> None:
        super().__init__()
        self.mixed_precision_enabled = mixed_precision_enabled

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Runs the closure, which computes gradients under automatic optimization, and steps.

        Raises:
            TypeError: automatic optimization of an optimizer whose step would leave gradients unreduced.
        """
        if model.automatic_optimization and not isinstance(optimizer, NxDOptimizer):
            raise TypeError(
                f"automatic optimization by a {type(optimizer).__name__} would not reduce gradients over ranks: return "
                "neuronx_dist.initialize_parallel_optimizer(...) from configure_optimizers"
            )
        result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def clip_gradients(self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Refuses `Trainer(gradient_clip_val=)`, whose norm would be this rank's.

        Raises:
            ValueError: a value is set.
        """
        if clip_val:
            raise ValueError(
                f"Trainer(gradient_clip_val={clip_val}) would clip by the norm of this rank's shards: set "
                "max_grad_norm in optimizer_config"
            )
