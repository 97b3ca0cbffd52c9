"""Column-parallel layers on one input, computed together: one sum and one collective for the input's gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .linear import ColumnParallelLinear, column_shards

__all__ = ["check_fusable", "fuse_columns"]


class _FusedColumns:
    """Column layers on one input, computed together when the first of them is called.

    The parameters stay separate, so that a state dict has the model's names, and no parameter is copied. Fused is the
    input gradient: one sum and one collective, not one for each layer.

    Hazard: the output of a layer that is never called stays in memory, with its graph, until the next input.
    """

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        self.layers = list(layers)
        self._input: torch.Tensor | None = None
        self._outputs: dict[ColumnParallelLinear, torch.Tensor] = {}  # of those not yet called

    def output_of(self, layer: ColumnParallelLinear, x: torch.Tensor) -> torch.Tensor:
        if self._input is not x or layer not in self._outputs:
            # While accelerate offloads the weights of others, they are on meta: each layer then computes by itself.
            layers = [layer] if "_hf_hook" in vars(layer) else self.layers
            self._input, self._outputs = x, dict(zip(layers, column_shards(layers, x)))
        out = self._outputs.pop(layer)
        if not self._outputs:
            self._input = None
        return out


def fuse_columns(layers: Sequence[ColumnParallelLinear]) -> None:
    """Makes column layers that are always called on the same tensor share one input-gradient collective.

    Such layers are q, k and v, or gate and up.

    Raises:
        ValueError: they differ in input, group, sequence parallelism or bias, or gather their output.
    """
    check_fusable(layers)
    fused = _FusedColumns(layers)
    for layer in layers:
        layer._siblings = fused


def check_fusable(layers: Sequence[ColumnParallelLinear]) -> None:
    """Checks that column layers can share one input-gradient collective.

    Raises:
        ValueError: as `fuse_columns`.
    """
    signatures = {
        (
            layer.input_size,
            layer.axis,
            layer.sequence_parallel_enabled,
            layer.sequence_dimension,
            layer.input_is_replicated,
            layer.reduce_dtype,
            layer.added_bias() is not None,
            layer.gather_output,
        )
        for layer in layers
    }
    if len(layers) < 2 or len(signatures) != 1 or next(iter(signatures))[-1]:
        raise ValueError(
            "fuse_columns needs at least two layers with equal input size, group, sequence parallelism, reduce dtype "
            f"and bias, and gather_output=False; got {[repr(layer) for layer in layers]}"
        )
