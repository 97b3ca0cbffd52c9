"""Tensors of a module: their device, and buffers protected from the forward of a dummy batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ... import comm

__all__ = ["buffers_kept", "device_of"]


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Replaces the buffers of a module by copies for a while: writes of forward to the copies are lost.

    The buffers themselves are not written, because autograd may have saved them for other microbatches.
    """
    tables = [(child._buffers, dict(child._buffers)) for child in module.modules()]
    copies: dict[int, torch.Tensor] = {}  # by id of the buffer, which may have several names
    for table, before in tables:
        for name, x in before.items():
            if x is not None:
                table[name] = copies.setdefault(id(x), x.detach().clone())
    try:
        yield
    finally:
        for table, before in tables:
            table.update(before)


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of a module's tensors; without tensors (a pipeline stage) that of its mesh's backend."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return comm.current().backend.device if comm.is_initialized() else torch.get_default_device()
