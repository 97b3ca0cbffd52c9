"""The device of a rank's tensors."""

from __future__ import annotations

import torch
from torch import nn

from ... import comm

__all__ = ["device_of"]


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of a module's tensors; without tensors (a pipeline stage) that of its mesh's backend."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return comm.current().backend.device if comm.is_initialized() else torch.get_default_device()
