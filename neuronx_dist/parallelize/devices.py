"""Where the tensors of a rank are."""

from __future__ import annotations

import torch
from torch import nn

from .. import comm

__all__ = ["device_of"]


def device_of(module: nn.Module) -> torch.device:
    """Where a module is; of one without tensors, as a pipeline stage may be, where its mesh communicates."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return comm.current().backend.device if comm.is_initialized() else torch.get_default_device()
