"""Separate projections as the fused ones that NeuronX Distributed's models have: the inverse of `nxd_names.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..weights.shard_spec import ShardSpec
from .nxd_heads import HeadOrder
from .nxd_writing import RankedTensor

__all__ = ["FUSED", "FusedNames"]

FUSED = ("weight_q", "weight_qkv")


@dataclass(frozen=True)
class FusedNames:
    """Names of NxD's Llama models: `gate_up_proj`, and those of `GQAQKVColumnParallelLinear`.

    Attributes:
        heads: of the key/value projections, with their repetitions.
        tp: over how many ranks they are divided.
        qkv: "weight_q": `qkv_proj.weight_q`, `.weight_k` and `.weight_v`; "weight_qkv": one `qkv_proj.weight_qkv`.
    """

    heads: HeadOrder
    tp: int
    qkv: str = "weight_q"

    def is_of_attention(self, name: str) -> bool:
        """Whether a parameter is divided by heads."""
        return _parts(name)[1] in ("q_proj", "k_proj", "v_proj", "o_proj")

    def fused(self, tensors: Sequence[RankedTensor]) -> list[RankedTensor]:
        """Parameters, or a state of each of them, by NxD's names; `origin` is that of the first in each."""
        by_name = {tensor.origin: tensor for tensor in tensors}
        result = []
        for tensor in tensors:
            path, projection, entry = _parts(tensor.origin)
            others = [by_name.get(f"{path}{name}_proj.{entry}") for name in ("gate", "up", "q", "k", "v")]
            gate, up, query, key, value = others
            if projection == "gate_proj" and up is not None:
                result.append(self._gate_up(tensor, up))
            elif projection == "up_proj" and gate is not None:
                continue
            elif projection == "q_proj" and key is not None and value is not None and self.qkv == "weight_qkv":
                result.append(self._one(tensor, key, value))
            elif projection in ("k_proj", "v_proj") and query is not None and self.qkv == "weight_qkv":
                continue
            elif projection in ("q_proj", "k_proj", "v_proj"):
                names = {stage: [f"{path}qkv_proj.{entry}_{projection[0]}"] for stage in tensor.names}
                rows = tensor.spec.unpadded_shape[0] * (1 if projection[0] == "q" else self.heads.multiplier)
                read = partial(self._by_heads, tensor.read, projection)
                result.append(self._divided(tensor, names, (rows, *tensor.spec.unpadded_shape[1:]), 0, read))
            elif projection == "o_proj" and len(tensor.spec.unpadded_shape) == 2:
                read = partial(self._by_heads, tensor.read, projection)
                result.append(self._divided(tensor, tensor.names, tensor.spec.unpadded_shape, 1, read))
            else:
                result.append(tensor)
        return result

    def _gate_up(self, gate: RankedTensor, up: RankedTensor) -> RankedTensor:
        path, _, entry = _parts(gate.origin)
        count, *rest = gate.spec.unpadded_shape
        spec = ShardSpec("tp", 0, 2, self.tp, (2 * count, *rest))
        names = {stage: [f"{path}gate_up_proj.{entry}"] for stage in gate.names}
        return gate._replace(names=names, spec=spec, read=partial(_joined, [gate.read, up.read]))

    def _one(self, *parts: RankedTensor) -> RankedTensor:
        path, _, entry = _parts(parts[0].origin)
        counts = [part.spec.unpadded_shape[0] * times for part, times in zip(parts, (1, *[self.heads.multiplier] * 2))]
        names = {stage: [f"{path}qkv_proj.{entry}_qkv"] for stage in parts[0].names}
        shape = (sum(counts), *parts[0].spec.unpadded_shape[1:])
        return self._divided(parts[0], names, shape, 0, partial(self._by_rank, [part.read for part in parts]))

    def _divided(
        self,
        tensor: RankedTensor,
        names: Mapping[int, Sequence[str]],
        shape: Sequence[int],
        dim: int,
        read: Callable[[], torch.Tensor],
    ) -> RankedTensor:
        blocks = self.heads.kv_heads * self.heads.multiplier
        if shape[dim] % self.tp or shape[dim] % blocks:
            raise ValueError(
                f"{tensor.origin} with {shape[dim]} rows is not divisible by tp={self.tp} and by {self.heads.kv_heads} "
                f"key/value heads, {self.heads.multiplier} times each: choose another kv_size_multiplier"
            )
        return tensor._replace(names=names, spec=ShardSpec("tp", dim, 1, self.tp, tuple(shape)), read=read)

    def _by_heads(self, read: Callable[[], torch.Tensor], projection: str) -> torch.Tensor:
        if projection in ("k_proj", "v_proj"):
            return self.heads.repeated(read())
        return self.heads.ordered(read(), 1 if projection == "o_proj" else 0)

    def _by_rank(self, reads: Sequence[Callable[[], torch.Tensor]]) -> torch.Tensor:
        parts = [self._by_heads(read, f"{letter}_proj").chunk(self.tp) for letter, read in zip("qkv", reads)]
        return torch.cat([part[rank] for rank in range(self.tp) for part in parts])


def _parts(name: str) -> tuple[str, str, str]:
    """`layers.0.attn.`, `q_proj`, `weight`."""
    module, _, entry = name.rpartition(".")
    path, dot, projection = module.rpartition(".")
    return path + dot, projection, entry


def _joined(reads: Sequence[Callable[[], torch.Tensor]]) -> torch.Tensor:
    return torch.cat([read() for read in reads])
