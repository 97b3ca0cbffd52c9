"""A callback of transformers' Trainer that adds speed, MFU and memory to what it logs."""

from __future__ import annotations

from typing import Any

from .flops import TrainingFlops
from .step_meter import StepMeter

__all__ = ["trainer_callback"]


def trainer_callback(
    *, tokens_per_step: int | None = None, flops: TrainingFlops | None = None, **meter_options: Any
) -> Any:
    """Returns a `TrainerCallback` that adds the figures of `StepMeter` to each log of training.

    `callback.add_to(trainer)` puts it before the callbacks that write logs (TensorBoard), which then write them too;
    `Trainer(callbacks=[callback])` after them: the figures are in `trainer.state.log_history` alone.

    Args:
        tokens_per_step: tokens of an optimizer step, over all ranks; None: those that `callback.count(tokens)` has
            counted, else those that Trainer counts (`include_num_input_tokens_seen`). Without any, seconds and memory
            alone are added.
        flops: of a token; None: no FLOPs (see `training_flops`, which takes a model before it is sharded).
        meter_options: of `StepMeter`: `peak`, `devices`, `device`, `predicted_memory`.
    """
    from transformers import TrainerCallback

    class MetricsCallback(TrainerCallback):  # type: ignore[misc]
        """Adds the figures of a `StepMeter` to logs."""

        def __init__(self) -> None:
            self.meter: StepMeter | None = None
            self._seconds, self._steps, self._counted = 0.0, 0, 0

        def add_to(self, trainer: Any) -> Any:
            """Makes this the first callback of a trainer; returns the callback."""
            trainer.callback_handler.callbacks.insert(0, self)
            return self

        def count(self, tokens: int) -> None:
            """Counts tokens of the present step, of all ranks (`global_tokens`)."""
            self._counted += tokens

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.meter = StepMeter(flops=flops, **meter_options)
            self._reset(state)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.meter is not None:
                self._seconds += self.meter.step(0)["seconds"]
                self._steps += 1

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.meter is not None:
                self.meter.mark()

        on_save = on_evaluate

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if self.meter is None or not logs or "loss" not in logs or not self._steps:
                return
            tokens = self._counted or state.num_input_tokens_seen - self._seen
            if tokens_per_step is not None:
                tokens = tokens_per_step * self._steps
            row = self.meter.figures(tokens / self._steps, self._seconds / self._steps)
            if not tokens:
                row = {name: value for name, value in row.items() if name == "seconds" or "memory" in name}
            logs.update(row)
            state.log_history[-1].update(row)  # a copy of the logs
            self._reset(state)
            self.meter.mark()

        def _reset(self, state: Any) -> None:
            self._seconds, self._steps, self._counted, self._seen = 0.0, 0, 0, state.num_input_tokens_seen

    return MetricsCallback()
