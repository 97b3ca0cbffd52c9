"""Trainer of transformers on all ranks: `neuronx_dist.hf.Trainer` and `TrainingArguments`; docs/trainer.md.

parallel_trainer.py     `Trainer`; the mixin that distributes transformers' loop: model, optimizer, batches, steps
exchanges.py            labels, losses, predictions and checksums that ranks exchange
training_arguments.py   `TrainingArguments`: degrees and options, and what is refused
chosen_layout.py        `layout="auto"`: the fastest layout by `nxd.plan`
trainer_checkpoints.py  what is saved: a folder for `from_pretrained`, and the run's state for any layout

Its classes extend those of transformers and accelerate, which are imported with this room.
"""

from .parallel_trainer import ParallelTrainerMixin, Trainer
from .training_arguments import TrainingArguments

__all__ = ["ParallelTrainerMixin", "Trainer", "TrainingArguments"]
