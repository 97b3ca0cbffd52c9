"""Lightning's progress bar, on the rank that reports the loss."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import TQDMProgressBar

from .logger import reports_loss

__all__ = ["NeuronTQDMProgressBar"]


class NeuronTQDMProgressBar(TQDMProgressBar):
    """Shows progress on one rank: of the last pipeline stage, or of the first with `log_rank0` of the module."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if reports_loss(getattr(pl_module, "log_rank0", False)):
            self.enable()
        else:
            self.disable()
