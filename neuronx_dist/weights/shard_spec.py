"""The layout of a parameter: a `ShardSpec`, stored by the parameter's module and mirrored in NxD's tensor attributes.

`set_spec` is the one place that writes it, `spec_of` the one that reads it back, for parameters which scripts marked
themselves too (`tensor_model_parallel`, `partition_dim`, `partition_stride`, `num_partitions`,
`sequence_parallel_enabled`: the names that NeuronX Distributed puts on tensors).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .. import comm, weights
from ..mesh import Axis, part_of, rest_of
from ..torch_internals.tensors import state_dict_metadata

__all__ = ["ShardSpec", "ShardedModule", "gather_full", "named_specs", "restamp", "set_spec", "spec_of"]

_ATTRIBUTE = "_shard_spec"
_TABLE = "_shard_specs"
_SHARDS = "neuronx_dist_shards"  # in the metadata of a state dict


@dataclass(frozen=True)
class ShardSpec:
    """Layout of one parameter over a mesh axis.

    Attributes:
        axis: the mesh axis it is sharded over; None: every rank holds all of it. Over a part of tp (`"tp/4"`) four
            adjacent ranks hold each shard.
        dim: the sharded dim.
        stride: the dim is made of `stride` fused blocks, each sharded by itself (gate and up: 2).
        num_partitions: number of shards.
        full_shape: shape of the whole parameter, padding included.
        unpadded: size of the sharded dim before zeros were added at its end (at the end of each block); None: no
            padding.
        group: the dim is made of groups (the query heads of one key/value head) with zeros at the end of each:
            `(size of a group without zeros, with them)`; what is missing behind the last group is zeros too. A shard
            lies in one group. None: the dim (each block) is one group.
        sequence_parallel: replicated, but used on a shard of the sequence: its gradients are partial over tp.
        experts: dim 0 has the experts of this ep rank; `full_shape` is that of their parameter, of which the other ep
            ranks hold other experts.
        holder: number of the one shard that has all positions of the dim; the others are empty. None: shards are equal.
    """

    axis: str | None = None
    dim: int | None = None
    stride: int = 1
    num_partitions: int = 1
    full_shape: tuple[int, ...] = ()
    unpadded: int | None = None
    sequence_parallel: bool = False
    group: tuple[int, int] | None = None
    experts: bool = False
    holder: int | None = None

    def __post_init__(self) -> None:
        if self.axis is None:
            return
        if self.dim is None or not 0 <= self.dim < len(self.full_shape):
            raise ValueError(f"ShardSpec: dim {self.dim} is not a dim of shape {self.full_shape}")
        if self.holder is not None:
            if not 0 <= self.holder < self.num_partitions or self.stride > 1 or self.unpadded or self.group:
                raise ValueError(f"ShardSpec: shard {self.holder} of {self.num_partitions} cannot have all positions")
            return
        blocks = self.stride * self.num_partitions
        if self.full_shape[self.dim] % blocks:
            raise ValueError(
                f"ShardSpec: dim {self.dim} of shape {self.full_shape} is not divisible by {self.num_partitions} "
                "partitions" + (f" of {self.stride} fused blocks" if self.stride > 1 else "")
            )
        if self.unpadded is not None and (self.unpadded > self.full_shape[self.dim] or self.unpadded % self.stride):
            raise ValueError(
                f"ShardSpec: unpadded size {self.unpadded} does not fit dim {self.dim} of shape {self.full_shape}"
            )
        if self.group is not None:
            (real, padded), size = self.group, self._shard_size
            unpadded = self.unpadded_shape[self.dim] // self.stride
            fits = 0 < real <= padded and not padded % size and not unpadded % real
            if not fits or unpadded // real * padded > size * self.num_partitions:
                raise ValueError(
                    f"ShardSpec: groups of {real}, padded to {padded}, do not fit shards of {size} of dim "
                    f"{self.dim} of shape {self.full_shape}, of which {unpadded} are not padding"
                )

    @property
    def is_sharded(self) -> bool:
        return self.axis is not None

    @property
    def replicated_over(self) -> Axis:
        """The tp ranks that hold the same values: `"tp"`, a part of it or two, or `()` where each has another shard."""
        if self.axis is None or part_of(self.axis).axis != "tp":
            return "tp"
        return rest_of(self.axis)

    def index_of(self, rank: int) -> int:
        """Returns the number of a rank's shard, from the rank's number along the complete axis ("tp" of `"tp/4"`)."""
        return part_of(self.axis or "").of(rank)

    def is_first(self, rank: int) -> bool:
        """Returns whether a rank is the first one, along the complete axis, that has its values."""
        return rank == (0 if self.axis is None else part_of(self.axis).stride * self.index_of(rank))

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.full_shape
        return self.shape_of(comm.rank(self.axis or ()) if self.holder is not None else 0)

    def shape_of(self, index: int) -> tuple[int, ...]:
        """Returns the shape of shard number `index`, padding included."""
        assert self.dim is not None
        shape = list(self.full_shape)
        shape[self.dim] = shape[self.dim] // self.num_partitions if self.holder is None else 0
        return self.full_shape if self.holder == index else tuple(shape)

    @property
    def unpadded_shape(self) -> tuple[int, ...]:
        """Shape of the complete parameter without padding, as in a checkpoint."""
        if self.dim is None or self.unpadded is None:
            return self.full_shape
        shape = list(self.full_shape)
        shape[self.dim] = self.unpadded
        return tuple(shape)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """`unpadded_shape`, with the experts of all ep ranks."""
        shape = self.unpadded_shape
        return (comm.size("ep") * shape[0], *shape[1:]) if self.experts else shape

    def local_part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a whole parameter `[whole_shape]`; raises a ValueError if it has another shape."""
        if self.experts:
            count = self.unpadded_shape[0]
            if tuple(whole.shape) != self.whole_shape:
                raise ValueError(f"expected the whole parameter {self.whole_shape}, got {tuple(whole.shape)}")
            whole = whole.narrow(0, comm.rank("ep") * count, count)
        return whole if self.axis is None else self.local_slice(whole, comm.rank(self.axis))

    def local_slice(self, full: torch.Tensor, index: int) -> torch.Tensor:
        """Shard number `index` of a whole parameter `[unpadded_shape]` (zeros where there is padding).

        Raises:
            ValueError: the tensor has another shape.
        """
        if self.dim is None:
            return full
        if tuple(full.shape) != self.unpadded_shape:
            raise ValueError(f"expected the whole parameter of shape {self.unpadded_shape}, got {tuple(full.shape)}")
        size = self._shard_size
        start, stop = self.positions(index)
        pieces = []
        for block in full.chunk(self.stride, self.dim):
            piece = block.narrow(self.dim, start, stop - start)
            if self.holder is None and piece.shape[self.dim] < size:
                missing = list(piece.shape)
                missing[self.dim] = size - piece.shape[self.dim]
                piece = torch.cat([piece, piece.new_zeros(missing)], self.dim)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def positions(self, index: int) -> tuple[int, int]:
        """Begin and end of shard number `index` in the unpadded dim (in each block); padding follows the end."""
        assert self.dim is not None
        if self.holder is not None:
            size = self.full_shape[self.dim]
            return (0 if index <= self.holder else size), (0 if index < self.holder else size)
        real, padded = self._group
        number, offset = divmod(index * self._shard_size, padded)
        unpadded = self.unpadded_shape[self.dim] // self.stride
        start, stop = (number * real + min(at, real) for at in (offset, offset + self._shard_size))
        return min(start, unpadded), min(stop, unpadded)

    @property
    def _shard_size(self) -> int:
        """Size of the sharded dim on one rank, in one block."""
        assert self.dim is not None
        return self.full_shape[self.dim] // (self.stride * self.num_partitions)

    @property
    def _group(self) -> tuple[int, int]:
        """The sizes of a group without and with its padding."""
        assert self.dim is not None
        whole = (self.unpadded_shape[self.dim] // self.stride, max(1, self.full_shape[self.dim] // self.stride))
        return self.group or whole

    def assemble(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole parameter, without its padding, from all shards in order: the inverse of `local_slice`."""
        if self.dim is None:
            return shards[0]
        pieces = []
        for block in range(self.stride):
            for index, shard in enumerate(shards):
                start, stop = self.positions(index)
                pieces.append(shard.chunk(self.stride, self.dim)[block].narrow(self.dim, 0, stop - start))
        return torch.cat(pieces, self.dim)


def set_spec(module: nn.Module, name: str, spec: ShardSpec) -> None:
    """Records the layout of parameter `name` of `module`: on the module, and as NxD's attributes on the tensor."""
    param = module._parameters[name] if name in module._parameters else getattr(module, name)
    module.__dict__.setdefault(_TABLE, {})[name] = spec
    if param is not None:
        _stamp(param, spec)


def spec_of(param: torch.Tensor) -> ShardSpec:
    """Returns the layout of a parameter: its `ShardSpec`, else one from NxD's attributes, else a replicated one."""
    spec = getattr(param, _ATTRIBUTE, None)
    sequence_parallel = bool(getattr(param, "sequence_parallel_enabled", False))
    if spec is None:
        if getattr(param, "tensor_model_parallel", False):
            dim, count = int(getattr(param, "partition_dim", 0)), int(getattr(param, "num_partitions", 1))
            if count < 1:  # NxD's default of -1 means: the tensor-parallel size
                count = comm.size("tp")
            shape = list(param.shape)
            shape[dim] *= count
            return ShardSpec(
                "tp", dim, int(getattr(param, "partition_stride", 1)), count, tuple(shape), None, sequence_parallel
            )
        return ShardSpec(full_shape=tuple(param.shape), sequence_parallel=sequence_parallel)
    if spec.sequence_parallel != sequence_parallel:  # scripts set this attribute by hand
        spec = replace(spec, sequence_parallel=sequence_parallel)
    return spec


def gather_full(tensor: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Gathers the shards `[spec.local_shape]` of all ranks into the unpadded tensor, on each; of experts, over ep too.

    A collective, not differentiable. For parameters and whatever is laid out like one (gradients, optimizer states).
    """
    full = tensor.detach()
    if spec.axis is not None and spec.holder is not None:
        full = full if comm.rank(spec.axis) == spec.holder else full.new_empty(spec.full_shape)
        full = comm.broadcast(full, spec.axis, src=spec.holder)
    elif spec.axis is not None:
        full = spec.assemble(list(comm.all_gather(full.unsqueeze(0), spec.axis, dim=0)))
    return comm.all_gather(full, "ep", dim=0) if spec.experts else full


def named_specs(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, ShardSpec]]:
    """`(qualified name, parameter, layout)` for every parameter, tied ones once, by what their modules recorded."""
    restamp(module)
    for name, param in module.named_parameters():
        yield name, param, spec_of(param)


def restamp(module: nn.Module) -> None:
    """Writes the attributes again on parameters that have lost them (re-wrapped, moved or copied tensors)."""
    for child in module.modules():
        for name, spec in child.__dict__.get(_TABLE, {}).items():
            param = child._parameters.get(name)
            if param is not None and getattr(param, _ATTRIBUTE, None) is None:
                _stamp(param, spec)
        if "parametrizations" in child._modules:
            weights.parametrized.stamp_originals(child)


class ShardedModule(nn.Module):
    """A module that stores the layout of its parameters.

    They keep it through `.to()`, `deepcopy`, `load_state_dict(assign=True)` and re-wrapping. Its entry in the metadata
    of a state dict, which `torch.save` writes, has the number of each shard: another rank's shards are refused.
    """

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedModule:
        super()._apply(fn, recurse)
        restamp(self)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self._adopt(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._adopt(name, param)

    def _adopt(self, name: str, value: Any) -> None:
        """Writes the layout on a parameter that was put in the place of another one."""
        spec = self.__dict__.get(_TABLE, {}).get(name) if isinstance(value, nn.Parameter) else None
        if spec is not None and getattr(value, _ATTRIBUTE, None) is None:
            if hasattr(value, "device_mesh"):
                weights.wrappers.check_mesh(value.device_mesh, name, spec)
            _stamp(value, spec)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        restamp(self)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        entry = state_dict_metadata(destination).get(prefix[:-1])
        shards = self._shard_numbers()
        if entry is not None and shards:
            entry[_SHARDS] = shards
        for name in shards.keys() & self._parameters.keys():
            weights.wrappers.note_saved(destination[prefix + name], prefix + name)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        saved, local = local_metadata.get(_SHARDS, {}), self._shard_numbers()
        for name in saved.keys() & local.keys():
            if saved[name] != local[name]:
                (number, count), (local_number, local_count) = saved[name], local[name]
                raise ValueError(
                    f"{prefix}{name} of the state dict is shard {number} of {count}, and rank {comm.current().rank} "
                    f"holds shard {local_number} of {local_count}: load the state dict that this rank saved, or save "
                    "and load by neuronx_dist.save_checkpoint and load_checkpoint, for any layout"
                )
        weights.wrappers.refuse_whole(state_dict, prefix, self._parameters, self.__dict__.get(_TABLE, {}))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)

    def _shard_numbers(self) -> dict[str, tuple[int, int]]:
        """Returns `(number of this rank's shard, number of shards)` by the parameter's name, where it is sharded."""
        specs: dict[str, ShardSpec] = self.__dict__.get(_TABLE, {})
        if not comm.is_initialized():
            return {}
        numbers = {}
        for name, spec in specs.items():
            axis = "ep" if spec.experts else ()  # () is an axis of one rank
            number = spec.index_of(comm.rank("tp")) * comm.size(axis) + comm.rank(axis)
            numbers[name] = number, spec.num_partitions * comm.size(axis)
        return {name: (number, count) for name, (number, count) in numbers.items() if count > 1}


def _stamp(param: torch.Tensor, spec: ShardSpec) -> None:
    setattr(param, _ATTRIBUTE, spec)
    if spec.is_sharded:
        param.tensor_model_parallel = True  # type: ignore[attr-defined]
        param.partition_dim = spec.dim  # type: ignore[attr-defined]
        param.partition_stride = spec.stride  # type: ignore[attr-defined]
        param.num_partitions = spec.num_partitions  # type: ignore[attr-defined]
    if spec.sequence_parallel:
        param.sequence_parallel_enabled = True  # type: ignore[attr-defined]
    if spec.experts:
        param.expert_model_parallel = True  # type: ignore[attr-defined]
