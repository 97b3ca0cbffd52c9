"""Adapters on parallel layers; base and adapter share the layer's collective.

    column:  y[.., out/tp] = x · Wᵀ + s · (x · Aᵀ) · Bᵀ     A [r, in] whole, B [out/tp, r] as W
    row:     y = Σ over tp (x · Wᵀ + s · (x · Aᵀ) · Bᵀ)     A [r, in/tp] as W, B [out, r] whole

Activations need no other collective than the layer's. The replicated matrix gets a partial gradient on each rank,
because the other matrix is sharded: backward sums it over tp, `[r, in]` or `[out, r]`. Under sequence parallelism the
reduction of gradients does that, as for norms (`sequence_parallel`).

Under sequence parallelism a column layer's gathered input, `[s, b, in]`, is saved for the gradient of A, where a layer
without an adapter saves its shard and gathers it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ... import spmd
from ...parallel_layers.linear import ColumnParallelLinear, RowParallelLinear, sequence_dim_of
from ...parallel_layers.transposed_linear import ParallelConv1D
from ...spmd import I, P, R, S
from ..qkv_linear import GQAQKVColumnParallelLinear
from .config import LoraConfig
from .layer import LoraLayer, WholeLinear

__all__ = ["LoraGQAQKVParallelLinear", "LoraParallelConv1D", "LoraParallelLinear"]

_LETTERS = ("q", "k", "v")


def _whole_input(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns a column layer's input as every rank uses it: gathered along the sequence, its gradient summed."""
    dim = sequence_dim_of(layer, x)
    if dim is not None:
        return spmd.all_gather(x, layer.axis, src=S(dim), dst=R)
    if getattr(layer, "input_is_replicated", False):
        return x
    return spmd.convert(x, layer.axis, src=I, dst=R)


def _replicated(part: nn.Module, base: Any) -> torch.Tensor:
    """Returns the weight of the replicated matrix for use: backward sums its gradient, if no later reduction does."""
    weight: torch.Tensor = part.weight  # type: ignore[assignment]
    return weight if base.sequence_parallel_enabled else spmd.convert(weight, base.axis, src=I, dst=R)


def _check(layer: Any, *weights: torch.Tensor) -> None:
    name = type(layer).__name__
    if layer.axis != "tp":
        raise ValueError(f"adapters: {name} is parallel over {layer.axis}; only tp is possible")
    if any(spec.unpadded is not None or spec.group is not None for spec in map(spmd.spec_of, weights)):
        raise ValueError(
            f"adapters: {name} has padded heads, which an adapter would train; choose a tp that divides them"
        )


class LoraParallelLinear(LoraLayer):
    """An adapter on a `ColumnParallelLinear` or `RowParallelLinear`.

    Raises:
        ValueError: the layer is parallel over another group than tp, or has padded heads.
    """

    def __init__(self, base_layer: ColumnParallelLinear | RowParallelLinear, lora_config: LoraConfig) -> None:
        super().__init__(base_layer, lora_config)
        weight, rank = base_layer.weight, self.lora_rank
        _check(base_layer, weight)
        shared: dict[str, Any] = dict(bias=False, dtype=weight.dtype, device=weight.device, stride=base_layer.stride)
        partly = base_layer.sequence_parallel_enabled
        if isinstance(base_layer, RowParallelLinear):
            self.lora_A = RowParallelLinear(
                base_layer.input_size, rank, input_is_parallel=True, init_method=self.initialise_a, **shared
            )
            self.lora_B = WholeLinear(rank, base_layer.output_size, nn.init.zeros_, partly, weight)
        else:
            self.lora_A = WholeLinear(base_layer.input_size, rank, self.initialise_a, partly, weight)
            self.lora_B = ColumnParallelLinear(
                rank,
                base_layer.output_size,
                gather_output=False,
                init_method=nn.init.zeros_,
                replicas=base_layer.replicas,
                **shared,
            )

    def forward(self, x: torch.Tensor) -> Any:
        if self.base_alone():
            return self.base_layer(x)
        return self._row(x) if isinstance(self.base_layer, RowParallelLinear) else self._column(x)

    def _column(self, x: torch.Tensor) -> Any:
        base: Any = self.base_layer
        inputs = _whole_input(base, x)
        bias = None if base.gather_output else base.used(base.added_bias())
        out = F.linear(inputs, base.used(base.weight), bias)
        low_rank = F.linear(self.lora_dropout(inputs), _replicated(self.lora_A, base))
        out = out + F.linear(low_rank, base.used(self.lora_B.weight)) * self.scaling
        if base.gather_output:
            out = base.gathered_output(out)
        return (out, base.used(base.bias)) if base.skip_bias_add else out

    def _row(self, x: torch.Tensor) -> Any:
        base: Any = self.base_layer
        axis, shard = base.axis, x
        if not base.input_is_parallel:
            shard = x.unflatten(-1, (base.stride, -1)) if base.stride > 1 else x  # of each block its piece
            shard = spmd.convert(shard, axis, src=I, dst=S(-1))
            shard = shard.flatten(-2) if base.stride > 1 else shard
        low_rank = F.linear(self.lora_dropout(shard), self.lora_A.weight)  # type: ignore[arg-type]
        adapted = F.linear(low_rank, _replicated(self.lora_B, base)) * self.scaling
        partial = F.linear(shard, base.used_weight()) + adapted
        partial, bias = spmd.trust(partial, axis, P), base.added_bias()
        if not base.reduce_output:
            out = partial if bias is None else partial + spmd.convert(bias, axis, src=R, dst=P).to(partial.dtype)
        else:
            dim = sequence_dim_of(base, x)
            if dim is not None:
                out = spmd.reduce_scatter(partial, axis, src=P, dst=S(dim), reduce_dtype=base.reduce_dtype)
            else:
                out = spmd.all_reduce(partial, axis, src=P, dst=I, reduce_dtype=base.reduce_dtype)
            out = out if bias is None else out + bias
        return (out, base.bias) if base.skip_bias_add else out

    def deltas(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        yield self.base_layer.weight, self.lora_B.weight @ self.lora_A.weight * self.scaling  # type: ignore


class LoraParallelConv1D(LoraLayer):
    """An adapter on a `ParallelConv1D`, GPT-2's layer, whose weight is `[in, out]`; A is `[r, in]` and B `[out, r]`."""

    base_layer: ParallelConv1D

    def __init__(self, base_layer: ParallelConv1D, lora_config: LoraConfig) -> None:
        super().__init__(base_layer, lora_config)
        weight, rank, stride = base_layer.weight, self.lora_rank, spmd.spec_of(base_layer.weight).stride
        shared: dict[str, Any] = dict(bias=False, dtype=weight.dtype, device=weight.device, stride=stride)
        a, b = self.initialise_a, nn.init.zeros_
        if base_layer.row:
            self.lora_A = RowParallelLinear(base_layer.nx, rank, input_is_parallel=True, init_method=a, **shared)
            self.lora_B = WholeLinear(rank, base_layer.nf, b, base_layer.sequence_parallel_enabled, weight)
        else:
            self.lora_A = WholeLinear(base_layer.nx, rank, a, False, weight)
            self.lora_B = ColumnParallelLinear(rank, base_layer.nf, gather_output=False, init_method=b, **shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.base_layer
        if self.base_alone():
            return base(x)
        a: Any = self.lora_A.weight if base.row else _replicated(self.lora_A, base)
        b: Any = _replicated(self.lora_B, base) if base.row else self.lora_B.weight
        x = x if base.row else base.used_input(x)
        out = x @ base.weight + F.linear(F.linear(self.lora_dropout(x), a), b) * self.scaling
        return base.summed(out) if base.row else out + base.bias

    def deltas(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        yield self.base_layer.weight, (self.lora_B.weight @ self.lora_A.weight * self.scaling).t()  # type: ignore


class LoraGQAQKVParallelLinear(LoraLayer):
    """An adapter on a `GQAQKVColumnParallelLinear`: one A for queries, keys and values, and a B for each."""

    base_layer: GQAQKVColumnParallelLinear
    lora_B: GQAQKVColumnParallelLinear

    def __init__(self, base_layer: GQAQKVColumnParallelLinear, lora_config: LoraConfig) -> None:
        super().__init__(base_layer, lora_config)
        weight = base_layer.weight_q
        _check(base_layer, weight, base_layer.weight_k)
        partly = base_layer.sequence_parallel_enabled
        self.lora_A = WholeLinear(base_layer.input_size, self.lora_rank, self.initialise_a, partly, weight)
        self.lora_B = GQAQKVColumnParallelLinear(
            self.lora_rank,
            base_layer.output_sizes,
            bias=False,
            gather_output=False,
            dtype=weight.dtype,
            device=weight.device,
            init_method=nn.init.zeros_,
            kv_size_multiplier=base_layer.kv_size_multiplier,
            fuse_qkv=base_layer.fuse_qkv,
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        base = self.base_layer
        if self.base_alone():
            return base(x)
        inputs = _whole_input(base, x)
        weights = base.used("weight")
        biases: list[Any] = base.used("bias") if base.use_bias and not base.gather_output else [None] * 3
        low_rank = F.linear(self.lora_dropout(inputs), _replicated(self.lora_A, base))
        outputs = [
            F.linear(inputs, weight, bias) + F.linear(low_rank, b) * self.scaling
            for weight, bias, b in zip(weights, biases, self.lora_B.used("weight"))
        ]
        return base.whole_outputs(outputs)

    def get_qkv(self, layer: GQAQKVColumnParallelLinear) -> tuple[torch.Tensor, ...]:
        """Returns the weights of queries, keys and values of a layer, such as `lora_B`."""
        return layer.weight_q, layer.weight_k, layer.weight_v

    def deltas(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for letter, b in zip(_LETTERS, self.get_qkv(self.lora_B)):
            yield getattr(self.base_layer, f"weight_{letter}"), b @ self.lora_A.weight * self.scaling  # type: ignore
