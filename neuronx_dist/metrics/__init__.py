"""Figures of a run: tokens per second and device, model FLOPs and their share of the peak, memory, and where they go.

flops.py          FLOPs of training a token, by parameters and attention; peaks of devices
step_meter.py     `StepMeter`: time, tokens, MFU and memory of each step
writers.py        `JsonLines`, `TensorBoard`: callables `(step, values)`, as any logger can be
step_profiler.py  `profile_steps`: torch.profiler's trace of some steps, with collectives, tasks and the pipeline's
                  timeline in it
trainer_logs.py   `trainer_callback`: these figures in the logs of transformers' Trainer

`docs/metrics.md` shows them in a training loop.
"""

from .flops import PEAKS, TrainingFlops, peak_flops, training_flops
from .step_meter import StepMeter, global_tokens, peak_memory
from .step_profiler import profile_steps
from .trainer_logs import trainer_callback
from .writers import JsonLines, TensorBoard

__all__ = [
    "PEAKS",
    "JsonLines",
    "StepMeter",
    "TensorBoard",
    "TrainingFlops",
    "global_tokens",
    "peak_flops",
    "peak_memory",
    "profile_steps",
    "trainer_callback",
    "training_flops",
]
