"""Constants of a program as text: constants are a part of its code, and are sent with it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

import torch

from ...weights.host_memory import as_bytes

__all__ = ["constants_from_text", "constants_text"]


def constants_text(constants: Mapping[str, torch.Tensor]) -> str:
    """Returns constants by name as JSON."""
    entries = {}
    for name, tensor in constants.items():
        data = base64.b64encode(bytes(as_bytes(tensor.detach().cpu().contiguous()))).decode()
        entries[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "data": data}
    return json.dumps(entries)


def constants_from_text(text: str) -> dict[str, torch.Tensor]:
    """Returns the constants of a text that `constants_text` made, by name."""
    return {name: _tensor(**entry) for name, entry in json.loads(text).items()}


def _tensor(dtype: str, shape: list[int], data: str) -> torch.Tensor:
    torch_dtype = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=torch_dtype)
    return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch_dtype).reshape(shape)
