"""NxD's names for the random streams (`neuronx_dist.spmd.random` holds them)."""

from __future__ import annotations

import random
import sys

from ..comm import is_initialized
from ..comm.generators import get_state, set_state
from ..comm.generators import seed as seed_default_stream
from ..spmd.random import TENSOR_PARALLEL, RNGStreams, checkpoint, manual_seed, streams

__all__ = [
    "RNGStreams",
    "TENSOR_PARALLEL",
    "XLARNGStatesTracker",
    "checkpoint",
    "get_rng_state",
    "get_rng_tracker",
    "get_xla_rng_tracker",
    "model_parallel_manual_seed",
    "model_parallel_xla_manual_seed",
    "set_random_seed",
    "set_rng_state",
]

XLARNGStatesTracker = RNGStreams
get_rng_tracker = streams
get_xla_rng_tracker = streams
model_parallel_manual_seed = manual_seed
model_parallel_xla_manual_seed = manual_seed
# The default stream, whatever the device: with `get_rng_tracker().get_states()`, all that a checkpoint needs of it.
get_rng_state = get_state
set_rng_state = set_state


def set_random_seed(seed: int) -> None:
    """Seeds Python's, NumPy's (where it is in use) and torch's generators, and with a mesh the random streams."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    (manual_seed if is_initialized() else seed_default_stream)(seed)
