"""Norms whose parameters know that sequence parallelism makes their gradients partial."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, Union

import torch
import torch.nn.functional as F
from torch import nn

from ..spmd import ShardedModule, ShardSpec, set_spec

__all__ = ["LayerNorm", "RMSNorm"]

Shape = Union[int, Sequence[int]]


class _Norm(ShardedModule):
    def __init__(
        self,
        normalized_shape: Shape,
        eps: float,
        affine: bool,
        bias: bool,
        device: Any,
        dtype: Any,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, numbers.Integral) else tuple(normalized_shape)  # type: ignore[arg-type]
        self.normalized_shape: tuple[int, ...] = shape  # type: ignore[assignment]
        self.eps = eps
        self.sequence_parallel_enabled = sequence_parallel
        self.register_parameter(
            "weight", nn.Parameter(torch.ones(shape, device=device, dtype=dtype)) if affine else None
        )  # type: ignore[arg-type]
        self.register_parameter("bias", nn.Parameter(torch.zeros(shape, device=device, dtype=dtype)) if bias else None)  # type: ignore[arg-type]
        for name in ("weight", "bias"):
            if getattr(self, name) is not None:
                set_spec(self, name, ShardSpec(full_shape=self.normalized_shape, sequence_parallel=sequence_parallel))

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{list(self.normalized_shape)}, eps={self.eps}, sequence_parallel={self.sequence_parallel_enabled}"


class LayerNorm(_Norm):
    """`torch.nn.LayerNorm` over the last dims: `[.., *normalized_shape]`, same shape out, same dtype out.

    `sequence_parallel_enabled`: the input is a shard of the sequence, so `grads.reduce_gradients` sums the gradients over tp.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            elementwise_affine and bias,
            device,
            dtype,
            sequence_parallel_enabled,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(_Norm):
    """Root-mean-square norm (arXiv:1910.07467) over the last dims, computed in fp32 for lower precisions."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        sequence_parallel_enabled: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, True, False, device, dtype, sequence_parallel_enabled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
