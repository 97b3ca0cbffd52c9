"""NxD's trainer: one configuration, a model and an optimizer that are made by it, and their checkpoints.

config.py      `neuronx_distributed_config`: the options and their defaults
model.py       `initialize_parallel_model`, `NxDModel`
optimizer.py   `initialize_parallel_optimizer`, `NxDOptimizer`
"""

from ..checkpoint.api import load_checkpoint, save_checkpoint
from .config import neuronx_distributed_config
from .model import NxDModel, initialize_parallel_model
from .optimizer import NxDOptimizer, initialize_parallel_optimizer

__all__ = [
    "NxDModel",
    "NxDOptimizer",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "load_checkpoint",
    "neuronx_distributed_config",
    "save_checkpoint",
]
