"""NxD's trainer: one configuration, a model and an optimizer that are made by it, and their checkpoints.

trainer.py     `neuronx_distributed_config`, `initialize_parallel_model`, `initialize_parallel_optimizer`
model.py       `NxDModel`; optimizer.py: `NxDOptimizer`
accelerator.py `hf.Accelerator`: accelerate's, for a loop around a parallel model; needs that package
checkpoint.py  NxD's import path of `save_checkpoint` and `load_checkpoint`
"""

from .checkpoint import load_checkpoint, save_checkpoint
from .model import NxDModel
from .optimizer import NxDOptimizer
from .trainer import initialize_parallel_model, initialize_parallel_optimizer, neuronx_distributed_config

__all__ = [
    "NxDModel",
    "NxDOptimizer",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "load_checkpoint",
    "neuronx_distributed_config",
    "save_checkpoint",
]
