"""Small functions that scripts written for NxD import from `parallel_layers.utils`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from .. import comm
from ..comm.host import as_inputs, on_host, upload
from ..torch_internals.tensors import has_compatible_type, pytree
from ..weights.partial_model import buffer_slots, install_parameter, parameter_names, parameter_slots, partial_model
from .autograd_linear import cast_if_autocast_enabled
from .signatures import refuse

__all__ = [
    "EmbeddingUtility",
    "cast_all",
    "cast_tensor",
    "get_local_world_size",
    "indices_split_along_dim",
    "initialize_fallback_parallel_state",
    "is_pjrt_device",
    "is_torch_version_greater_than_2",
    "requires_init_pg_override",
    "verify_casted_dtype",
    "cast_if_autocast_enabled",
    "copy_tensor_model_parallel_attributes",
    "divide",
    "ensure_divisibility",
    "get_padding_length",
    "load_optimizer_state_dict",
    "move_all_tensor_to_cpu",
    "move_model_to_device",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
    "split_tensor_along_dim",
    "split_tensor_along_last_dim",
    "split_tensor_along_second_dim",
]

T = TypeVar("T")

_DEFAULTS: dict[str, Any] = {
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
    "num_partitions": -1,
}


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raises a ValueError if `denominator` does not divide `numerator`."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """`numerator / denominator`, which must leave no remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def get_padding_length(numerator: int, denominator: int) -> int:
    """The difference to the next multiple of `denominator`."""
    return -numerator % denominator


def split_tensor_along_dim(
    tensor: torch.Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Splits a tensor into `num_partitions` equal parts of a dim: views, or copies with `contiguous_split_chunks`."""
    size = divide(tensor.shape[dim], num_partitions)
    pieces = torch.split(tensor, size, dim=dim)
    return tuple(piece.contiguous() for piece in pieces) if contiguous_split_chunks else pieces


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Splits a tensor into equal parts of its last dim, as `split_tensor_along_dim`."""
    return split_tensor_along_dim(tensor, tensor.dim() - 1, num_partitions, contiguous_split_chunks)


def split_tensor_along_second_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Splits a tensor into equal parts of dim 1, as `split_tensor_along_dim`."""
    return split_tensor_along_dim(tensor, 1, num_partitions, contiguous_split_chunks)


def param_is_not_tensor_parallel_duplicate(param: torch.Tensor) -> bool:
    """Returns whether this rank's copy counts: a shard, or the copy of tensor-parallel rank 0."""
    return bool(getattr(param, "tensor_model_parallel", False)) or comm.rank("tp") == 0


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor,
    is_parallel: bool,
    dim: int,
    stride: int = 1,
    num_partitions: int = -1,
    rank_ordering: Sequence[int] | None = None,
) -> None:
    """Marks a tensor as sharded, in NxD's way. `num_partitions=-1` means the tensor-parallel size.

    Raises:
        ValueError: the tensor is marked already; or a `rank_ordering` is passed: the order is the mesh's here.
    """
    refuse("set_tensor_model_parallel_attributes", "rank_ordering", rank_ordering)
    for name in _DEFAULTS:
        if hasattr(tensor, name):
            raise ValueError(f"tensor of shape {tuple(tensor.shape)} already has the attribute {name}")
    values = {
        "tensor_model_parallel": is_parallel,
        "partition_dim": dim,
        "partition_stride": stride,
        "num_partitions": num_partitions,
    }
    for name, value in values.items():
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: torch.Tensor) -> None:
    """Sets NxD's attributes of a parameter to those of one that is not sharded, where they are missing."""
    for name, value in _DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: torch.Tensor, source_tensor: torch.Tensor) -> None:
    """Copies every mark of a parameter that NxD or this package reads: sharding, sequence and expert parallelism."""
    for name in (*_DEFAULTS, "sequence_parallel_enabled", "expert_model_parallel", "shared", "_shard_spec"):
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def cast_tensor(
    tensor: torch.Tensor, from_dtype: torch.dtype = torch.float32, to_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Casts a tensor of `from_dtype`; returns any other one as it is."""
    return tensor.to(to_dtype) if tensor.dtype == from_dtype else tensor


def cast_all(state: T, from_dtype: torch.dtype = torch.float32, to_dtype: torch.dtype = torch.bfloat16) -> T:
    """Copies nested containers with every tensor of `from_dtype` cast."""
    return pytree.tree_map_only(torch.Tensor, lambda x: cast_tensor(x, from_dtype, to_dtype), state)


def verify_casted_dtype(value: Any) -> None:
    """Raises TypeError if a tensor of nested containers is not in the dtype of autocast, where that is on."""
    for x in pytree.tree_leaves(value):
        if isinstance(x, torch.Tensor) and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            if x.dtype != dtype:
                raise TypeError(f"a tensor {list(x.shape)} of {x.dtype} is used under autocast to {dtype}")


def get_local_world_size() -> int:
    """Returns the number of ranks on this node: `LOCAL_WORLD_SIZE`, as torchrun sets it, else all ranks."""
    text = os.environ.get("LOCAL_WORLD_SIZE")
    return int(text) if text else comm.size("world") if comm.is_initialized() else comm.launch.world()[0]


def requires_init_pg_override() -> bool:
    """Returns False: only torch 2.0 needs another way to initialise process groups on XLA."""
    return False


def is_torch_version_greater_than_2() -> bool:
    """Returns True: this package needs a torch above 2."""
    return True


def is_pjrt_device() -> bool:
    """Returns whether torch_xla's runtime is that of Neuron devices."""
    return os.environ.get("PJRT_DEVICE") == "NEURON"


def indices_split_along_dim(
    tensor: torch.Tensor | None, dim: int, rank: int, num_partitions: int
) -> torch.Tensor | None:
    """Returns the positions along a dim that are partition `rank`; None for None."""
    if tensor is None:
        return None
    size = divide(tensor.shape[dim], num_partitions)
    return torch.arange(rank * size, (rank + 1) * size, device=tensor.device)


def initialize_fallback_parallel_state(device: Any = None) -> None:
    """Raises RuntimeError: no layer starts a job of one rank on the side."""
    raise RuntimeError(
        "model parallel is not initialized: call neuronx_dist.init_distributed() and initialize_model_parallel(), "
        "which take one process without torchrun as well"
    )


class EmbeddingUtility:
    """The range of the vocabulary's rows that a tensor-parallel rank holds."""

    @staticmethod
    def range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        return EmbeddingUtility.range_from_per_partition_vocab_size(
            divide(global_vocab_size, world_size), rank, world_size
        )


def move_all_tensor_to_cpu(data: T, convert: bool = True) -> T:
    """Copies nested containers with every tensor on the CPU, to save a model or an optimizer of any device.

    The host waits for the device once, whatever the number of tensors. On XLA one program computes the tensors; if it
    has collectives, all ranks must call this function together, as in a training step.

    Args:
        data: containers that torch's pytrees know (dict, list, tuple, ...). Tensors on the CPU are not copied.
        convert: False does not copy tensors, and only waits until their values are computed, so that ranks can take
            turns at copying.
    """
    on_cpu = on_host([x for x in pytree.tree_leaves(data) if isinstance(x, torch.Tensor)], copy=convert)
    copies = iter(on_cpu)
    return pytree.tree_map_only(torch.Tensor, lambda _: next(copies), data) if convert else data


_OF_THE_DEVICE = ("capturable", "foreach", "fused", "differentiable")


def load_optimizer_state_dict(
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    load: Callable[[dict[str, Any]], Any] | None = None,
) -> None:
    """`optimizer.load_state_dict(state_dict)`, for a state that was saved on any device.

    Options for the computation of a step (`capturable`, `foreach`, `fused`, `differentiable`) are those of `optimizer`,
    not the saved ones: torch refuses `capturable` of an XLA run on the CPU, and on XLA without it the host reads the
    number of the step at each step. A learning rate that is a tensor stays the same tensor, with the saved value. The
    ZeRO-1 optimizer does all this by itself.

    Args:
        load: function that loads; None: the optimizer's `load_state_dict`.
    """
    before = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group, here in zip(groups, before):
        group.update({name: here[name] for name in _OF_THE_DEVICE if name in here})
    (load or optimizer.load_state_dict)({**state_dict, "param_groups": groups})
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, saved in state_dict["state"].items():
        # torch casts all but `step` to the parameter's dtype: a running product (NAdam's) would go on in another one.
        for name, x in saved.items():
            values = optimizer.state[params[index]]
            if isinstance(x, torch.Tensor) and not x.dim() and x.dtype != values[name].dtype:
                values[name] = x.to(values[name].device)
    for values in optimizer.state.values():
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        values.update(zip(tensors, as_inputs(list(tensors.values()))))
    for group, here in zip(optimizer.param_groups, before):
        for name in here.keys() & group.keys():
            ours, loaded = here[name], group[name]
            if isinstance(ours, torch.Tensor):
                (value,) = as_inputs([torch.as_tensor(loaded, dtype=ours.dtype, device=ours.device)])
                with torch.no_grad():
                    ours.copy_(value)
                group[name] = ours
            elif isinstance(loaded, torch.Tensor):
                group[name] = loaded.item()


def move_model_to_device(model: nn.Module, device: Any) -> nn.Module:
    """Moves a model to a device, in place.

    Every parameter stays the same object: tied parameters stay tied, and have their attributes and gradients. A buffer
    that several modules share stays one buffer.

    (`.to` makes new parameters when the kind of device changes, as from the CPU to XLA, and a weight tied to another
    becomes two.) A torch optimizer that was made before holds the same parameters, but must not have made a step:
    its state stays where it is. Sharded optimizers and hooks on parameters are made after the move.

    Raises:
        RuntimeError: a parameter or buffer has no value yet, or is part of a graph whose backward has not run.
    """
    names = parameter_names(model)
    if torch.device(device).type != "meta":
        _refuse_meta(model, device)
    registered = [
        (module, name, param, dict(param.__dict__))
        for module in model.modules()
        for name, param in module._parameters.items()
        if param is not None
    ]
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    on_host([*model.parameters(), *model.buffers(), *grads], copy=False)  # what is still to be computed, at once
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # buffers, and what became of them

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            _move_parameter(tensor, device, names.get(id(tensor), ["?"])[0])
            return tensor
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor, upload(tensor, device)
        return moved[id(tensor)][1]

    model._apply(move)
    # torch's settings for conversions (`torch.__future__`) may have put other parameters there, without attributes.
    for module, name, param, attributes in registered:
        module._parameters[name] = param
        param.__dict__.update(attributes)
    return model


def _move_parameter(param: nn.Parameter, device: Any, name: str) -> None:
    grad, param.grad = param.grad, None
    value = upload(param.detach(), device)
    if has_compatible_type(param, value):
        param.data = value
    else:
        try:
            install_parameter(param, value)
        except RuntimeError as error:
            param.grad = grad
            raise RuntimeError(
                f"move_model_to_device: parameter {name} is referenced by a graph that waits for backward or by a "
                f"weak reference ({error}): move the model before it is called, compiled or wrapped"
            ) from error
    if grad is not None:
        param.grad = upload(grad.detach(), device)


def _refuse_meta(model: nn.Module, device: Any) -> None:
    for slot in (*parameter_slots(model), *buffer_slots(model)):
        if slot.tensor.is_meta:
            name = type(partial_model(model).original_module).__name__
            raise RuntimeError(
                f"move_model_to_device: {slot.name} of {name} is on the meta device and has no value to "
                f"move to {device}: use neuronx_dist.materialize(model, seed, device=...) or load weights"
            )
