"""NxD's `utils`: where a script runs, and small modules.

activation_checkpoint.py, adamw_fp32_optim_params.py, random.py  NxD's import paths
batch_utils.py   a context-parallel rank's part of a batch
logger.py        a logger of rank 0
model_utils.py   building on meta, ties and marks of parameters
tensor_utils.py  `cumsum`
utils.py         names of hardware, a JSON file
"""

from __future__ import annotations

import os

import torch

from ....comm.backends.local_device import device_type, select
from ....comm.launch import end_step
from .utils import HloMetadataLevel, hardware

__all__ = ["HloMetadataLevel", "cpu_mode", "get_device", "hardware", "mark_step", "master_print"]


def cpu_mode() -> bool:
    """Returns whether `NXD_CPU_MODE` asks for the CPU."""
    return int(os.environ.get("NXD_CPU_MODE", "0")) > 0


def mark_step() -> None:
    """Ends a step, which is a program on XLA and nothing elsewhere."""
    end_step()


def master_print(msg: object) -> None:
    """Prints on rank 0."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(msg, flush=True)


def get_device() -> torch.device:
    """Returns this rank's device; the CPU in `cpu_mode`."""
    return torch.device("cpu") if cpu_mode() else select(device_type("auto"))
