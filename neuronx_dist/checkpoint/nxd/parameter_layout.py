"""The layout of a parameter in NeuronX Distributed's files, and in a model: names, heads, shards; both directions.

    files                                       a model, of Hugging Face's names
    qkv_proj.weight_q, .weight_k, .weight_v     q_proj.weight, k_proj.weight, v_proj.weight
    qkv_proj.weight_qkv, qkv_proj.weight        the same, one behind the other in each shard; also weight_q, ...
    gate_up_proj.weight                         gate_proj.weight, up_proj.weight, half of each shard

                   reading                                      writing
    projections    `separated`                                  `FusedNames.fused`
    heads          `HeadOrder.natural`, `HeadOrder.single`      `HeadOrder.ordered`, `HeadOrder.repeated`
    shards         `division_of`                                `RankedTensor.divided`

Projections are separated where the model that loads has the separate names, and not the fused one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ...weights.shard_spec import ShardSpec
from ..errors import CheckpointMismatch
from .nxd_writing import RankedTensor
from .rank_files import StoredTensor

__all__ = [
    "FUSED",
    "ShardDivision",
    "FusedNames",
    "HeadOrder",
    "FusedOrigin",
    "by_rank",
    "division_of",
    "names_of_keys",
    "part_rows",
    "separate_names",
    "separated",
]

FUSED = ("weight_q", "weight_qkv")


# --- heads


@dataclass(frozen=True)
class HeadOrder:
    """The order of heads over the ranks, where NeuronX Distributed repeats key/value heads (`kv_size_multiplier`).

    With key/value heads 0 and 1, a multiplier of 2, query heads a b (which use 0) and c d (which use 1), on 4 ranks:

        trn1    key/value 0 1 0 1    query a c b d
        trn2    key/value 0 0 1 1    query a b c d

    The query projection's rows, and the output projection's columns, stand in this order of heads.

    Attributes:
        kv_heads: key/value heads of the model.
        multiplier: number of repetitions of each of these heads.
        blocked: repetitions of a head stand side by side, as on trn2.
    """

    kv_heads: int
    multiplier: int = 1
    blocked: bool = False

    @property
    def blocks(self) -> Sequence[int]:
        """Number of the block of query heads at each position; a block uses one repetition of a key/value head."""
        count = self.kv_heads * self.multiplier
        if self.blocked:
            return range(count)
        return [head * self.multiplier + copy for copy in range(self.multiplier) for head in range(self.kv_heads)]

    def ordered(self, weight: torch.Tensor, dim: int) -> torch.Tensor:
        """Puts the heads of a query or output projection, along `dim`, in this order."""
        return self._selected(weight, dim, self.blocks)

    def natural(self, weight: torch.Tensor, dim: int) -> torch.Tensor:
        """The inverse of `ordered`."""
        return self._selected(weight, dim, sorted(range(len(self.blocks)), key=self.blocks.__getitem__))

    def repeated(self, weight: torch.Tensor) -> torch.Tensor:
        """Repeats the heads of a key or value projection (dim 0)."""
        heads = self._split(weight, 0, self.kv_heads)
        if self.blocked:
            return heads.repeat_interleave(self.multiplier, 0).flatten(0, 1)
        return torch.cat([weight] * self.multiplier)

    def single(self, weight: torch.Tensor) -> torch.Tensor:
        """The inverse of `repeated`."""
        if not self.blocked:
            return self._split(weight, 0, self.multiplier)[0]
        return self._split(weight, 0, self.kv_heads * self.multiplier)[:: self.multiplier].flatten(0, 1)

    def fused(self, parts: Sequence[torch.Tensor], tp: int) -> torch.Tensor:
        """Fuses query, key and value projections (dim 0), each in the order of heads over the ranks; see `by_rank`."""
        query, key, value = parts
        return by_rank([self.ordered(query, 0), self.repeated(key), self.repeated(value)], tp)

    def _selected(self, weight: torch.Tensor, dim: int, order: Sequence[int]) -> torch.Tensor:
        if list(order) == sorted(order):
            return weight
        parts = self._split(weight, dim, len(order))
        return parts.index_select(dim, torch.tensor(order)).flatten(dim, dim + 1)

    def _split(self, weight: torch.Tensor, dim: int, count: int) -> torch.Tensor:
        if weight.shape[dim] % count:
            raise ValueError(
                f"{self.kv_heads} key/value heads, {self.multiplier} times each, do not divide dim {dim} of a "
                f"projection {tuple(weight.shape)}"
            )
        return weight.unflatten(dim, (count, -1))


# --- fused projections


@dataclass(frozen=True)
class FusedNames:
    """Names of NxD's Llama models: `gate_up_proj`, and those of `GQAQKVColumnParallelLinear`.

    Attributes:
        heads: of the key/value projections, with their repetitions.
        tp: number of ranks that they are divided over.
        qkv: "weight_q": `qkv_proj.weight_q`, `.weight_k` and `.weight_v`; "weight_qkv": one `qkv_proj.weight_qkv`.
    """

    heads: HeadOrder
    tp: int
    qkv: str = "weight_q"

    def is_of_attention(self, name: str) -> bool:
        """Returns whether a parameter is divided by heads."""
        return _split_name(name)[1] in ("q_proj", "k_proj", "v_proj", "o_proj")

    def fused(self, tensors: Sequence[RankedTensor]) -> list[RankedTensor]:
        """Fuses parameters, or states of parameters, under NxD's names; `origin` is that of the first fused part."""
        by_name = {tensor.origin: tensor for tensor in tensors}
        result = []
        for tensor in tensors:
            path, projection, entry = _split_name(tensor.origin)
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
        path, _, entry = _split_name(gate.origin)
        count, *rest = gate.spec.unpadded_shape
        spec = ShardSpec("tp", 0, 2, self.tp, (2 * count, *rest))
        names = {stage: [f"{path}gate_up_proj.{entry}"] for stage in gate.names}
        return gate._replace(names=names, spec=spec, read=partial(_joined, [gate.read, up.read]))

    def _one(self, *parts: RankedTensor) -> RankedTensor:
        path, _, entry = _split_name(parts[0].origin)
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
        return self.heads.fused([read() for read in reads], self.tp)


class FusedOrigin(NamedTuple):
    """Place of a parameter in a file: name of the file's parameter, and first row in it."""

    name: str
    start: int = 0


def separated(
    state: Mapping[str, Any], specs: Mapping[str, ShardSpec], tp: int
) -> tuple[dict[str, Any], dict[str, FusedOrigin]]:
    """Cuts fused projections of a rank's state dict into the model's parameters; returns these with their places.

    Args:
        specs: layouts of the parameters of the model that loads.
        tp: number of ranks over which the saved state was divided.
    """
    result: dict[str, Any] = {}
    origins: dict[str, FusedOrigin] = {}
    for name, value in state.items():
        choices = [] if name in specs else separate_names(name)
        parts = next((parts for parts in choices if all(part in specs for part in parts)), None)
        if parts is None:
            result[name], origins[name] = value, FusedOrigin(name)
            continue
        start = 0
        for part, rows in zip(parts, part_rows(value.shape[0], specs[parts[0]].unpadded_shape[0] // tp, len(parts))):
            result[part], origins[part] = value.rows(start, start + rows), FusedOrigin(name, start)
            start += rows
    return result, origins


def by_rank(parts: Sequence[torch.Tensor], tp: int) -> torch.Tensor:
    """Fuses projections (dim 0): rank by rank, its rows of each projection."""
    return torch.cat([shard for shards in zip(*(part.chunk(tp) for part in parts)) for shard in shards])


def separate_names(name: str) -> list[list[str]]:
    """Separate names of a fused projection, in its order: Hugging Face's, NxD's; none for any other name."""
    module, _, key = name.rpartition(".")
    path, dot, projection = module.rpartition(".")
    entry, _, letters = key.partition("_")
    choices = []
    if projection == "gate_up_proj" and not letters:
        choices.append([f"{path}{dot}{part}_proj.{entry}" for part in ("gate", "up")])
    if projection == "qkv_proj" and letters in ("", "q", "k", "v", "qkv"):
        choices.append([f"{path}{dot}{letter}_proj.{entry}" for letter in letters or "qkv"])
    if letters == "qkv":
        choices.append([name.removesuffix("qkv") + letter for letter in letters])
    return choices


def names_of_keys(name: str) -> list[str]:
    """Names that the weight of the keys may have, beside a query or output projection; none for any other name."""
    module, _, key = name.rpartition(".")
    path, dot, projection = module.rpartition(".")
    if key in ("weight_q", "bias_q"):
        return [f"{module}.weight_k"]
    return [
        f"{path}{dot}{keys}" for keys in ("k_proj.weight", "qkv_proj.weight_k") if projection in ("q_proj", "o_proj")
    ]


def part_rows(total: int, query: int, parts: int) -> list[int]:
    """Number of rows of each part; query has `query` rows, key and value, which may be repeated, half of the rest."""
    if parts == 3:
        return [query, (total - query) // 2, (total - query) // 2]
    return [total // parts] * parts


def _split_name(name: str) -> tuple[str, str, str]:
    """Splits a name such as `layers.0.attn.q_proj.weight` into `layers.0.attn.`, `q_proj` and `weight`."""
    module, _, entry = name.rpartition(".")
    path, dot, projection = module.rpartition(".")
    return path + dot, projection, entry


def _joined(reads: Sequence[Callable[[], torch.Tensor]]) -> torch.Tensor:
    return torch.cat([read() for read in reads])


# --- shards


class ShardDivision(NamedTuple):
    """Division of a saved parameter over tp.

    Attributes:
        spec: layout of the saved parameter.
        shards: tp rank -> index of its shard; ranks with a replica are left out.
    """

    spec: ShardSpec
    shards: dict[int, int]


def division_of(name: str, spec: ShardSpec, shards: Sequence[StoredTensor]) -> ShardDivision:
    """Infers the division of a saved parameter from its shards; `spec` is its layout in the model that loads.

    Raises:
        CheckpointMismatch: the shards are no division of the model's parameter.
    """
    whole, local = spec.unpadded_shape, shards[0].shape
    if local == whole or len(shards) == 1:
        return ShardDivision(ShardSpec(full_shape=local), {0: 0})
    described = f"{name} is {local} on each of {len(shards)} tp ranks there, and the whole {whole} here"
    if spec.dim is None:
        raise CheckpointMismatch(
            f"{described}, where it is not sharded, so its sharded dim is unknown: build the model with its "
            "parallel layers, also at tp=1 (a Hugging Face model by neuronx_dist.hf.swap)"
        )
    total = tuple(size * len(shards) if dim == spec.dim else size for dim, size in enumerate(local))
    if any(shard.shape != local for shard in shards) or len(total) != len(whole) or total[spec.dim] < whole[spec.dim]:
        return ShardDivision(ShardSpec(full_shape=total), {0: 0})  # reported with all other differences
    saved = ShardSpec("tp", spec.dim, spec.stride, len(shards), total, whole[spec.dim])
    if total == whole:
        return ShardDivision(saved, {tp: tp for tp in range(len(shards))})
    replicated = _replicated(saved, shards)
    if replicated is not None:
        return replicated
    for tp, shard in enumerate(shards):
        begin, end = saved.positions(tp)
        for block in shard.tensor().chunk(spec.stride, spec.dim):
            padding = block.narrow(spec.dim, end - begin, block.shape[spec.dim] - (end - begin))
            if padding.numel() and not bool((padding == padding.flatten()[0]).all()):
                raise CheckpointMismatch(f"{described}: the additional rows are neither padding nor a repetition")
    return ShardDivision(saved, {tp: tp for tp in range(len(shards))})


def _replicated(padded: ShardSpec, shards: Sequence[StoredTensor]) -> ShardDivision | None:
    """The division if several ranks hold each shard, such as key/value heads that are fewer than ranks; else None.

    The values decide between the orders 0 1 0 1 (trn1) and 0 0 1 1 (trn2).
    """
    assert padded.dim is not None
    times, rest = divmod(padded.full_shape[padded.dim], padded.unpadded_shape[padded.dim])
    if rest or len(shards) % times or padded.stride > 1:
        return None
    count = len(shards) // times
    spec = replace(padded, num_partitions=count, full_shape=padded.unpadded_shape, unpadded=None)
    for number_of in (lambda tp: tp % count, lambda tp: tp // times):
        first = {number_of(tp): tp for tp in reversed(range(len(shards)))}
        if all(torch.equal(shard.tensor(), shards[first[number_of(tp)]].tensor()) for tp, shard in enumerate(shards)):
            return ShardDivision(spec, {tp: index for index, tp in sorted(first.items())})
    return None
