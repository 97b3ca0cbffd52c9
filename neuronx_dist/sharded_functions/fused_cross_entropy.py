"""The two passes of the cross entropy over its logits as compiled kernels, for GPUs with Triton.

torch's operators would read and write temporary tensors of the logits' size in float32 several times. The kernels that
`torch.compile` makes read the logits once and write one gradient, and need no other memory of that size. The first use
of a dtype compiles for seconds.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["exp_sums", "write_gradient"]

_WORTH = 1 << 22  # logits: with fewer a step is over before the compilation pays
_failed: list[str] = []  # why compilation failed, once it did


def exp_sums(logits: Tensor, highest: Tensor) -> Tensor | None:
    """Returns Σ exp(z - m) over the last dim, in the dtype of m: `[.., V], [..] -> [..]`.

    None: the logits are few, or the kernels cannot be compiled.
    """
    if logits.numel() < _WORTH or _failed or not _has_triton():
        return None
    return _call(_exp_sums, logits, highest)


def write_gradient(
    out: Tensor, logits: Tensor, highest: Tensor, weight: Tensor, position: Tensor, at_label: Tensor
) -> bool:
    """Writes `(exp(z - m) + at_label at the position) * weight`; returns whether it could be compiled.

    Shapes: `out` and `logits` `[.., V]`, which may be one tensor, all others `[.., 1]`.
    """
    return _call(_write_gradient, out, logits, highest, weight, position, at_label) is not None


def _exp_sums(logits: Tensor, highest: Tensor) -> Tensor:
    return (logits.to(highest.dtype) - highest.unsqueeze(-1)).exp().sum(-1)


def _write_gradient(
    out: Tensor, logits: Tensor, highest: Tensor, weight: Tensor, position: Tensor, at_label: Tensor
) -> Tensor:
    exponentials = (logits.to(highest.dtype) - highest).exp()
    is_label = torch.arange(logits.shape[-1], device=logits.device) == position
    return out.copy_((exponentials + torch.where(is_label, at_label, 0.0)) * weight)


def _call(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor | None:
    try:
        return _compiled(function)(*(x.detach() for x in tensors))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: B902 - whatever a compiler lacks on this machine, the operators do without it
        _failed.append(str(error))
        warnings.warn(
            "the cross entropy could not be compiled, and is slower without "
            f"({type(error).__name__}: {_failed[0]:.300})",
            stacklevel=2,
        )
        return None


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _compiled(function: Callable[..., Tensor]) -> Any:
    return torch.compile(function, dynamic=True)
