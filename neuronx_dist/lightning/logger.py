"""Lightning's TensorBoard logger, on the rank that reports the loss, which in a pipeline is not rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from .. import comm

__all__ = ["NeuronTensorBoardLogger", "reports_loss"]


def reports_loss(log_rank0: bool = False) -> bool:
    """Returns whether this rank is the one that logs: the first of the last pipeline stage, or of the first stage."""
    if not comm.is_initialized():  # Lightning ends its loggers after an error before the mesh exists, too
        return False
    stage = 0 if log_rank0 else comm.size("pp") - 1
    return bool(comm.rank(("dp", "cp")) == 0 and comm.rank("tp") == 0 and comm.rank("pp") == stage)


class NeuronTensorBoardLogger(TensorBoardLogger):
    """Writes on one rank: of the last pipeline stage, or of the first with `log_rank0`.

    Attributes:
        print_step: the step of the next metrics; below 0 they are left out until validation starts. A module's
            `training_step` may set it, as NxD's examples do; as long as nobody does, metrics have the trainer's step.
    """

    def __init__(self, log_rank0: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.log_rank0 = log_rank0
        self._print_step: int | None = None

    @property
    def print_step(self) -> int:
        return -1 if self._print_step is None else self._print_step

    @print_step.setter
    def print_step(self, value: int = -1) -> None:
        self._print_step = value

    def should_print(self) -> bool:
        """Returns whether this rank writes metrics now."""
        return reports_loss(self.log_rank0) and (self._print_step is None or self._print_step >= 0)

    def start_validation(self, step: int) -> None:
        """Writes the metrics of validation, at this step, where those of training are left out."""
        if self._print_step is not None and self._print_step < 0:
            self._print_step = step

    @property
    def experiment(self) -> Any:
        """The SummaryWriter on the rank that writes; on others an object whose methods do nothing."""
        with self._writer_as_rank_zero():
            return super().experiment

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self.should_print():
            with self._writer_as_rank_zero():
                super().log_metrics(metrics, step if self._print_step is None else self._print_step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        with self._writer_as_rank_zero():
            super().log_hyperparams(params, *args, **kwargs)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        with self._writer_as_rank_zero():
            super().log_graph(model, input_array)

    def save(self) -> None:
        with self._writer_as_rank_zero():
            super().save()

    def finalize(self, status: str) -> None:
        with self._writer_as_rank_zero():
            super().finalize(status)

    @contextmanager
    def _writer_as_rank_zero(self) -> Iterator[None]:
        """Makes the rank that writes Lightning's rank zero, which alone its loggers write on."""
        before = rank_zero_only.rank
        rank_zero_only.rank = 0 if reports_loss(self.log_rank0) else 1
        try:
            yield
        finally:
            rank_zero_only.rank = before
