"""Dynamic scaling of an fp16 loss, so that small gradients are not lost and large ones are noticed.

    optimizer = NeuronZero1Optimizer(params, torch.optim.AdamW, lr=lr, loss_scaler=scaler)
    scaler.scaled(loss).backward()
    optimizer.step()                # divides by the scale, or leaves the step out and makes the scale smaller

The scheme is that of "Mixed Precision Training" (Micikevicius et al., 2018) and of `torch.amp.GradScaler`. All ranks
have the same norm, which shows an infinite or NaN gradient of any rank: so ranks agree without another collective.
"""

from __future__ import annotations

import torch

__all__ = ["LossScaler"]

_SMALLEST = 2.0**-24  # of fp16: a scale below it cannot be what makes gradients overflow


class LossScaler:
    """The factor of the loss, the same on all ranks.

    Args:
        scale: the initial scale.
        growth: factor of the scale after `interval` steps without an overflow.
        backoff: factor of the scale after a step with one.

    Raises:
        ValueError: `scale` is not positive, `growth` is below 1, `backoff` is not between 0 and 1, `interval` below 1.
    """

    def __init__(
        self, scale: float = 2.0**16, *, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ) -> None:
        if not (scale > 0 and growth >= 1 and 0 < backoff < 1 and interval >= 1):
            raise ValueError(
                "LossScaler needs scale > 0, growth >= 1, 0 < backoff < 1 and interval >= 1; got "
                f"scale={scale}, growth={growth}, backoff={backoff}, interval={interval}"
            )
        self.scale = scale
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self._good_steps = 0

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The scaled loss, to call `backward` on."""
        return loss * self.scale

    def update(self, finite: bool) -> None:
        """Adapts the scale after a step; the optimizer calls it.

        Raises:
            RuntimeError: gradients are not finite at any scale.
        """
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.scale *= self.backoff
            if self.scale < _SMALLEST:
                raise RuntimeError(
                    f"gradients are NaN or infinite in every step, even with the loss scale at {self.scale:g}, so "
                    "the scale is not the cause. Check the loss, the learning rate and the data"
                )
        elif self._good_steps == self.interval:
            self.scale *= self.growth
            self._good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """Returns the state that a resumed run continues with."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Restores the state that `state_dict` returned."""
        self.scale, self._good_steps = state_dict["scale"], int(state_dict["good_steps"])
