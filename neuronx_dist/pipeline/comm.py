"""NxD's messages between neighbouring stages: tensors whose shape the receiver knows, and Python objects.

A pipeline model sends by itself (`run/`); these are for scripts that do it by hand. Stages are a ring: the next one of
the last is the first. Both sides call in the same order.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from .. import comm
from ..parallel_layers.parallel_state import rmsg

__all__ = ["recv_from", "recv_python_object", "rmsg", "send", "send_python_object"]


def send(tensor: torch.Tensor, send_next: bool = True, all_reduce_send_recv: bool = False) -> torch.Tensor:
    """Sends a tensor to the next stage, or to the previous one. Returns the tensor.

    Args:
        all_reduce_send_recv: as NxD has it, without effect.
    """
    comm.send(tensor, "pp", dst=_neighbour(send_next))
    return tensor


def recv_from(
    tensor_meta: Any, recv_prev: bool = True, tracing: bool = False, all_reduce_send_recv: bool = False
) -> torch.Tensor:
    """Returns the tensor that the previous stage, or the next one, sends.

    Args:
        tensor_meta: has the `shape`, `dtype` and `requires_grad` of the tensor.
        tracing, all_reduce_send_recv: as NxD has them, without effect.
    """
    device = comm.current().backend.device
    received = torch.empty(tuple(tensor_meta.shape), dtype=tensor_meta.dtype, device=device)
    comm.recv(received, "pp", src=_neighbour(not recv_prev))
    return received.requires_grad_(bool(tensor_meta.requires_grad))


def send_python_object(obj: Any, send_next: bool = True, method: str = "tcp") -> None:
    """Sends an object that pickle takes, of any size, to the next stage, or to the previous one.

    Args:
        method: as NxD has it ("tcp", "gloo"), without effect: objects go the way of tensors.
    """
    device = comm.current().backend.device
    content = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8).to(device)
    send(torch.tensor([len(content)], device=device), send_next)
    send(content, send_next)


def recv_python_object(recv_prev: bool = True, method: str = "tcp") -> Any:
    """Returns the object that the previous stage, or the next one, sends."""
    length = recv_from(torch.empty(1, dtype=torch.int64, device="meta"), recv_prev)
    content = recv_from(torch.empty(int(length), dtype=torch.uint8, device="meta"), recv_prev)
    return pickle.loads(bytes(content.cpu().tolist()))


def _neighbour(is_next: bool) -> int:
    """Returns the stage next to this one, by its index."""
    return (comm.rank("pp") + (1 if is_next else -1)) % comm.size("pp")
