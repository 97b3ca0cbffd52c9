"""Optimizers whose state is sharded over the data-parallel ranks, or that keep fp32 master weights."""

from .shards import ParameterShard
from .zero1 import MasterWeightsOptimizer, NeuronZero1Optimizer

__all__ = ["MasterWeightsOptimizer", "NeuronZero1Optimizer", "ParameterShard"]
