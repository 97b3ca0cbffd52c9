"""Optimizers whose state is sharded over the data-parallel ranks, or that have fp32 master weights.

zero1.py            ZeRO-1: `NeuronZero1Optimizer`, `MasterWeightsOptimizer`; base_optimizer.py: the optimizer it wraps
shards.py           one parameter's master shard; sharding.py: the ranks that divide it
shard_buckets.py    the buckets of shards on the wire; gathers.py: parameters that await an all-gather
rank_state.py       one rank's state and file; loss_scaler.py: the scale of an fp16 loss
muon.py             Muon with AdamW: `MuonAdamW`, `muon_groups`; matrix_owners.py: the ranks that have whole matrices
adamw_fp32.py, zero_redundancy_optimizer.py   NxD's names
"""

from .adamw_fp32 import AdamW_FP32OptimParams
from .loss_scaler import LossScaler
from .muon import MuonAdamW, muon_groups
from .shards import ParameterShard
from .zero1 import MasterWeightsOptimizer, NeuronZero1Optimizer
from .zero_redundancy_optimizer import NeuronEPZero1Optimizer

__all__ = [
    "AdamW_FP32OptimParams",
    "LossScaler",
    "MasterWeightsOptimizer",
    "MuonAdamW",
    "NeuronEPZero1Optimizer",
    "NeuronZero1Optimizer",
    "ParameterShard",
    "muon_groups",
]
