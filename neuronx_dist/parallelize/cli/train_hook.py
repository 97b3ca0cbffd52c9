"""Hooks of the trainer: methods that it calls at the events of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["EVENTS", "AggregatedTrainHook", "TrainHook", "hook_of"]

# Each event, and what a hook receives after the trainer.
EVENTS = {
    "after_setup": "",
    "on_finalize": "",
    "on_train_start": "",
    "on_train_end": "",
    "on_val_start": "",
    "on_val_end": "val_loss",
    "on_epoch_start": "epoch",
    "on_epoch_end": "epoch",
    "on_step_start": "epoch, idx",
    "on_step_end": "epoch, idx, step_metrics, aggregated_outputs",
    "on_train_step_start": "batches",
    "on_train_step_end": "outputs",
    "on_val_step_start": "batches",
    "on_val_step_end": "outputs",
    "after_aggregate_train_step_outputs": "aggregated_outputs, train_loss",
    "after_aggregate_val_step_outputs": "aggregated_outputs, val_loss",
    "before_zero_grad": "",
    "after_zero_grad": "",
    "before_sync_grad": "",
    "after_sync_grad": "",
    "before_gnorm_clip": "",
    "after_gnorm_clip": "gnorm",
    "before_optimizer_step": "",
    "after_optimizer_step": "",
    "before_log_train_metrics": "step_metrics, aggregated_outputs",
    "before_log_val_metrics": "metrics",
    "on_load_checkpoint": "checkpoint",
    "after_load_checkpoint": "checkpoint",
    "on_save_checkpoint": "checkpoint",
}


class TrainHook:
    """Base class of hooks: a method `(trainer, ...)` for each of `EVENTS`, which does nothing."""


def _method(event: str, arguments: str) -> Callable[..., None]:
    """Returns the method of an event."""

    def method(self: TrainHook, trainer: Any, *args: Any) -> None: ...

    method.__name__, method.__qualname__ = event, f"TrainHook.{event}"
    method.__doc__ = f"Does nothing; receives the trainer{arguments and ', ' + arguments}."
    return method


for _event, _arguments in EVENTS.items():
    setattr(TrainHook, _event, _method(_event, _arguments))


def hook_of(functions: Mapping[str, Any]) -> TrainHook:
    """Returns a hook that calls a function at each event that has one."""
    hook = TrainHook()
    hook.__dict__.update({event: function for event, function in functions.items() if function})
    return hook


class AggregatedTrainHook:
    """Calls several hooks in order: `hook.on_epoch_start(trainer, 0)` calls that of each."""

    def __init__(self, hooks: Sequence[Any]) -> None:
        self.hooks = hooks

    def __getattr__(self, event: str) -> Any:
        if event not in EVENTS:
            raise AttributeError(event)
        return lambda *args: [getattr(hook, event)(*args) for hook in self.hooks]
