"""Linear layers with a matrix for each expert of this ep rank, in NxD's layout `[experts/ep, in, out]`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ... import comm, spmd
from ...parallel_layers.autograd_linear import cast_if_autocast_enabled
from ...spmd import P, R, ShardedModule, ShardSpec, set_spec, spec_of
from .dispatch import experts_here

__all__ = ["ExpertFusedColumnParallelLinear", "ExpertFusedLinear", "ExpertFusedRowParallelLinear", "grouped_product"]


class ExpertFusedLinear(ShardedModule):
    """The matrices of this rank's experts; NxD's base class.

    Nothing is communicated here: `ExpertMLPs` takes tokens to the experts' ranks, and `MoE` sums over tp once a layer.

    Args:
        num_experts: of all ranks.
        input_size, output_size: of all tp ranks.
        shard_dim: dim of `[experts, in, out]` that is sharded over tp.
        stride: fused blocks in the sharded dim: 2 of gate and up.
        init_method: fills the matrix of one expert, `[in, out]`, in place; None: as `nn.Linear`.

    Raises:
        ValueError: ep does not divide the experts, or tp the sharded size.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        *,
        shard_dim: int,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        stride: int = 1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.input_size, self.output_size = num_experts, input_size, output_size
        self.expert_init_method = init_method
        local, tp = experts_here(num_experts), comm.size("tp")
        shape = (local, input_size, output_size)
        self._add("weight", ShardSpec("tp", shard_dim, stride, tp, shape, experts=True), dtype, device)
        self.register_parameter("bias", None)
        if bias:
            if shard_dim == 2:
                spec = ShardSpec("tp", 1, stride, tp, (local, output_size), experts=True)
            else:  # added to partial sums, on the first rank
                spec = ShardSpec(full_shape=(local, output_size), sequence_parallel=True, experts=True)
            self._add("bias", spec, dtype, device)

    def _add(self, name: str, spec: ShardSpec, dtype: torch.dtype, device: Any) -> None:
        param = nn.Parameter(torch.empty(spec.local_shape, dtype=dtype, device=device))
        self.register_parameter(name, param)
        set_spec(self, name, spec)
        if not param.is_meta:
            whole = torch.empty(spec.whole_shape, dtype=torch.promote_types(dtype, torch.float32))
            self._initialise(name, whole)
            param.data.copy_(spec.local_part(whole))

    def _initialise(self, name: str, value: torch.Tensor) -> None:
        """Fills the parameter of all experts, one by one."""
        bound = 1 / math.sqrt(self.input_size)
        for expert in value:
            (self.expert_init_method or partial(nn.init.uniform_, a=-bound, b=bound))(expert)

    def reset_parameters(self) -> None:
        """Initialises the parameters that are not on meta, each as a whole one, for `materialize`."""
        for name, param in self._parameters.items():
            if param is not None and not param.is_meta:
                self._initialise(name, param)

    def forward(self, input: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """`[rows, in] -> [rows, out]`; rows are in order of experts, `sizes` of each.

        A column layer takes all features and returns 1/tp of them, a row layer the reverse, as partial sums over tp.
        Under autocast all is in its dtype: torch casts operands of `bmm`, and not those of `grouped_mm`.
        """
        weight: torch.Tensor = self.weight
        input, weight, bias = cast_if_autocast_enabled(input, weight, self._used_bias())  # type: ignore[assignment]
        if len({*sizes}) == 1:
            out = torch.bmm(input.unflatten(0, (len(sizes), sizes[0])), weight)
            return (out if bias is None else out + bias.unsqueeze(1)).flatten(0, 1)
        out = grouped_product(input, weight, sizes)
        if bias is None:
            return out
        counts = torch.tensor(sizes, device=input.device)
        return out + bias.repeat_interleave(counts, 0, output_size=len(input))

    def _used_bias(self) -> torch.Tensor | None:
        bias = self.bias
        if bias is None or spec_of(bias).is_sharded:
            return bias
        return spmd.convert(bias, "tp", src=R, dst=P)


class ExpertFusedColumnParallelLinear(ExpertFusedLinear):
    """Matrices `[experts/ep, in, out/tp]`."""

    def __init__(self, num_experts: int, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__(num_experts, input_size, output_size, shard_dim=2, **options)


class ExpertFusedRowParallelLinear(ExpertFusedLinear):
    """Matrices `[experts/ep, in/tp, out]`, whose outputs are partial sums."""

    def __init__(self, num_experts: int, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__(num_experts, input_size, output_size, shard_dim=1, **options)


def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Returns the product of each group of rows with its matrix: `[rows, in], [groups, in, out] -> [rows, out]`.

    By torch's grouped kernel where it takes the operands (no float64, rows of 16 bytes), else group by group.
    """
    aligned = all(size * rows.element_size() % 16 == 0 for size in matrices.shape[1:])
    dtypes = (
        (torch.bfloat16,) if torch.compiler.is_compiling() else _KERNEL_DTYPES
    )  # torch's fake form takes that alone
    kernel = getattr(F, "grouped_mm", None) if aligned and rows.dtype in dtypes else None
    if kernel is None or rows.dtype != matrices.dtype:
        return torch.cat([part @ matrix for part, matrix in zip(rows.split(list(sizes)), matrices.unbind())])
    offsets = torch.tensor(sizes, device=rows.device).cumsum(0, dtype=torch.int32)
    product: torch.Tensor = kernel(rows.contiguous(), matrices, offs=offsets)
    return product


_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
