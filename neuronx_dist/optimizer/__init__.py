"""Optimizers whose state is sharded over the data-parallel ranks, or that keep fp32 master weights."""

from .adamw_fp32 import AdamW_FP32OptimParams
from .loss_scaler import LossScaler
from .shards import ParameterShard
from .zero1 import MasterWeightsOptimizer, NeuronZero1Optimizer
from .zero_redundancy_optimizer import NeuronEPZero1Optimizer

__all__ = [
    "AdamW_FP32OptimParams",
    "LossScaler",
    "MasterWeightsOptimizer",
    "NeuronEPZero1Optimizer",
    "NeuronZero1Optimizer",
    "ParameterShard",
]
