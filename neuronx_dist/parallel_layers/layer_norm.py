"""Norms, whose parameters are marked if sequence parallelism makes their gradients partial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..spmd import ShardedModule, ShardSpec, set_spec

__all__ = ["LayerNorm", "RMSNorm"]

Shape = int | Sequence[int]


class _Norm(ShardedModule):
    weight: nn.Parameter | None
    bias: nn.Parameter | None

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
        nn.Module.__init__(self)  # `nn.LayerNorm` would make its own parameters
        sizes = [normalized_shape] if isinstance(normalized_shape, int) else normalized_shape
        self.normalized_shape: tuple[int, ...] = tuple(sizes)
        self.eps = eps
        self.elementwise_affine = affine
        self.sequence_parallel_enabled = sequence_parallel
        spec = ShardSpec(full_shape=self.normalized_shape, sequence_parallel=sequence_parallel)
        for name, present in (("weight", affine), ("bias", bias)):
            value = torch.empty(self.normalized_shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(value) if present else None)
            if present:
                set_spec(self, name, spec)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{list(self.normalized_shape)}, eps={self.eps}, sequence_parallel={self.sequence_parallel_enabled}"


class LayerNorm(_Norm, nn.LayerNorm):  # type: ignore[misc]  # which scripts ask for, to initialise it
    """`torch.nn.LayerNorm` over the last dims: `[.., *normalized_shape]`; the output has the same shape and dtype.

    `sequence_parallel_enabled`: the input is a shard of the sequence, so `grads.reduce_gradients` sums the gradients
    over tp.
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

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


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

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(input, self.normalized_shape, self.weight, self.eps)
