"""GPT-2's linear layer, transformers' `Conv1D`, sharded: its weight is `[in, out]`, also in checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import comm, spmd
from ..weights.shard_spec import ShardedModule, ShardSpec, set_spec

__all__ = ["ParallelConv1D"]


class ParallelConv1D(ShardedModule):
    """`Y = X · A + b`, with A `[in, out]` sharded along the output features, or along the input features (`row`).

    A column layer's output is `[.., out/tp]`; a row layer takes `[.., in/tp]`, and its sum over tp is `[.., out]`.

    Args:
        stride: number of fused blocks of the output (query, key and value: 3), each sharded separately.
        input_is_replicated: of a column layer: the input's gradient is summed elsewhere.
        sequence_parallel_enabled: of a row layer: the sum is scattered along `sequence_dimension`.
    """

    axis = "tp"
    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self,
        input_size: int,
        output_size: int,
        dtype: torch.dtype,
        *,
        row: bool,
        stride: int = 1,
        input_is_replicated: bool = False,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int = 1,
    ) -> None:
        super().__init__()
        self.nx, self.nf = input_size, output_size
        self.row, self.input_is_replicated = row, input_is_replicated
        self.sequence_parallel_enabled, self.sequence_dimension = sequence_parallel_enabled, sequence_dimension
        tp = comm.size("tp")
        spec = ShardSpec("tp", 0 if row else 1, stride, tp, (input_size, output_size))
        whole_bias = ShardSpec(full_shape=(output_size,), sequence_parallel=sequence_parallel_enabled)
        bias_spec = whole_bias if row else ShardSpec("tp", 0, stride, tp, (output_size,))
        for name, layout in (("weight", spec), ("bias", bias_spec)):
            self.register_parameter(name, nn.Parameter(torch.empty(layout.local_shape, dtype=dtype, device="meta")))
            set_spec(self, name, layout)

    def full_module(self) -> Any:
        """The unsharded layer, on meta, for initialisers."""
        from transformers.pytorch_utils import Conv1D

        with torch.device("meta"):
            return Conv1D(self.nf, self.nx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[.., in] -> [.., out/tp]`; of a row layer `[.., in/tp] -> [.., out]`."""
        return self.summed(x @ self.weight) if self.row else self.used_input(x) @ self.weight + self.bias

    def used_input(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a column layer's input, whose gradient is summed over tp."""
        if self.input_is_replicated:
            return x
        return spmd.reinterpret(x, "tp", src=spmd.I, dst=spmd.R, reduce_dtype=torch.float32)

    def summed(self, out: torch.Tensor) -> torch.Tensor:
        """Returns the sum over tp of a row layer's products, and the bias."""
        out = spmd.trust(out, "tp", spmd.P)
        if not self.sequence_parallel_enabled:
            return spmd.all_reduce(out, "tp", src=spmd.P, dst=spmd.I, reduce_dtype=torch.float32) + self.bias
        scattered = spmd.S(self.sequence_dimension)
        return spmd.reduce_scatter(out, "tp", src=spmd.P, dst=scattered, reduce_dtype=torch.float32) + self.bias
