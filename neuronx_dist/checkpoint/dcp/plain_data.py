"""Plain data (numbers, strings, lists, dicts, tensors) as bytes of `torch.save`; reading runs no code."""

from __future__ import annotations

import io
from typing import Any

import torch

from ...torch_internals.tensors import pytree
from ...weights.torch_files import read_plain
from ..errors import CheckpointCorrupted

__all__ = ["packed", "unpacked"]


def packed(what: str, value: Any) -> bytes:
    """Packs a value into bytes, its tensors on the CPU.

    Args:
        what: name of the value, for error messages.

    Raises:
        ValueError: the value could not be read back without running code; the message has the innermost key.
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
    """Reads the bytes of `packed`; runs no code.

    Raises:
        CheckpointCorrupted: the bytes hold other things than plain data.
    """
    try:
        return read_plain(content, what)
    except ValueError as error:
        raise CheckpointCorrupted(str(error)) from error


def _reason(error: Exception) -> str:
    """One line of an error message, without torch's advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = next((line for line in lines if "Unpickler error" in line), lines[0])
    return line.partition(". Please")[0]
