"""NxD's names for the random streams (`neuronx_dist.spmd.random` holds them)."""

from __future__ import annotations

from ..spmd.random import TENSOR_PARALLEL, RNGStreams, checkpoint, manual_seed, streams

__all__ = [
    "RNGStreams",
    "TENSOR_PARALLEL",
    "XLARNGStatesTracker",
    "checkpoint",
    "get_rng_tracker",
    "get_xla_rng_tracker",
    "model_parallel_manual_seed",
    "model_parallel_xla_manual_seed",
]

XLARNGStatesTracker = RNGStreams
get_rng_tracker = streams
get_xla_rng_tracker = streams
model_parallel_manual_seed = manual_seed
model_parallel_xla_manual_seed = manual_seed
