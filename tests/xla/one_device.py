"""A process with one XLA device of the CPU, for what is executed on it; one for the whole session.

The session's own process does not become one: torch counts its devices at the first backward of a process.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

TIMEOUT = 120.0  # seconds for one function


def on_device(function: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of `function(*args)`, of an importable module, there; CPU tensors and plain values."""
    return _process().submit(function, *args).result(TIMEOUT)


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _become_a_device)


def _become_a_device() -> None:
    os.environ.update(
        PJRT_DEVICE="CPU",
        CPU_NUM_DEVICES="1",
        OMP_NUM_THREADS="1",
        XLA_FLAGS="--xla_backend_optimization_level=0",  # compiles in half the time
        TF_CPP_MIN_LOG_LEVEL="2",
    )
    import neuronx_dist as nxd

    nxd.init_distributed("xla")
    nxd.initialize_model_parallel()
