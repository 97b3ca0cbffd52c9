"""Figures of a run: tokens per second and device, model FLOPs and their share of the peak, memory, and where they go.

flops.py             FLOPs of training a token, by parameters and attention; peaks of devices
step_meter.py        `StepMeter`: time, tokens, MFU and memory of each step
writers.py           `JsonLines`, `TensorBoard`: callables `(step, values)`, as any logger can be
step_profiler.py     `profile_steps`: torch.profiler's trace of some steps, with collectives, tasks and the pipeline's
                     timeline in it
trainer_callback.py  these figures in the logs of transformers' Trainer

`docs/metrics.md` shows them in a training loop.
"""

from ..lazy_names import lazy_names

_FILES = {
    "flops": ("PEAKS", "TrainingFlops", "peak_flops", "training_flops"),
    "step_meter": ("StepMeter", "global_tokens", "peak_memory"),
    "step_profiler": ("profile_steps",),
    "trainer_callback": ("trainer_callback",),
    "writers": ("JsonLines", "TensorBoard"),
}

__getattr__ = lazy_names(__name__, {name: f"metrics.{file}" for file, names in _FILES.items() for name in names})
