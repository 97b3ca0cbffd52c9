"""Plain data (numbers, strings, lists, dicts, tensors) as bytes of `torch.save`, of which no code is run."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .errors import CheckpointCorrupted

__all__ = ["packed", "unpacked"]


def packed(what: str, value: Any) -> bytes:
    """The bytes of a value, its tensors on the CPU.

    Args:
        what: is packed, for messages.

    Raises:
        ValueError: it could not be read back without running code; the message has the innermost key.
    """
    buffer = io.BytesIO()
    try:
        value = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, (list, tuple)) else ()
        for key in keys:
            packed(f"{what}[{key!r}]", value[key])
        raise ValueError(
            f"{what} holds a {type(value).__name__} that cannot be read back as plain data (numbers, strings, lists, "
            f"dicts, tensors): {_reason(error)}"
        ) from error
    return buffer.getvalue()


def unpacked(what: str, content: bytes | memoryview) -> Any:
    """What `packed` has packed; nothing that the bytes say is run.

    Raises:
        CheckpointCorrupted: they are something else.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointCorrupted(f"{what} holds other things than plain data: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """One line of a message, without the advice that torch gives."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = next((line for line in lines if "Unpickler error" in line), lines[0])
    return line.partition(". Please")[0]
