"""Normalisations: layer, rms, group, instance, batch norm, and their relatives.

Where a dim that is normalised over is sharded, `sharded_functions/norms.py` computes it from the ranks' moments;
elsewhere torch's own function runs on the shard.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ...sharded_functions.norms import affine, for_shards, merged_moments, scaled_by_rms, standardised
from ...sharded_functions.softmax import wide
from ...spmd import S, V
from ..handlers import check_promotion, sharded
from ..labels import Labels, inside, one_mesh
from ..moves.tangents import may_be_dual
from ..spec import ShardTensorSpec, make_spec
from ..tensor import ShardTensor, in_layout, wrap
from ..typed import on_own_shard
from .reduce import Reduced, moments, reduced

__all__: list[str] = []


def layer_norm(x: torch.Size, weight: torch.Size | None, bias: torch.Size | None) -> Labels:
    """`weight` and `bias` have the last dims of `x`."""
    names = tuple(range(-len(x), 0))
    return Labels([names, *(names[len(x) - len(param or ()) :] for param in (weight, bias))], names)


def channels(x: torch.Size, *parameters: torch.Size | None) -> Labels:
    """Parameters have one value for each channel, dim 1 of `x`."""
    names = tuple(range(len(x)))
    return Labels([names, *((1,) for _ in parameters)], names)


def _last_dims(x: torch.Tensor, normalized_shape: Any) -> tuple[int, ...]:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise RuntimeError(
            f"normalized_shape {list(shape)} does not match the last dims of a tensor of shape {list(x.shape)}"
        )
    return tuple(range(x.dim() - len(shape), x.dim()))


@sharded(F.layer_norm, torch.layer_norm)
def _layer_norm(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(
        input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: bool
    ) -> ShardTensor:
        dims = _last_dims(input, normalized_shape)
        (x, weight, bias), spec = inside(layer_norm, (input, weight, bias))
        plan = reduced(spec, dims, True)
        if not plan.groups:
            return wrap(torch.layer_norm(x, x.shape[dims[0] :], weight, bias, eps), spec)
        y = standardised(wide(x), *moments(wide(x), spec, plan), plan.groups, plan.elements, eps)
        return wrap(affine(y, weight, bias, x.dtype), spec)

    return call(*args, **kwargs)


def rms_norm(x: torch.Size, weight: torch.Size | None) -> Labels:
    return layer_norm(x, weight, None)._replace(operands=layer_norm(x, weight, None).operands[:2])


@sharded(F.rms_norm, torch.rms_norm)
def _rms_norm(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> ShardTensor:
        dims = _last_dims(input, normalized_shape)
        (x, weight), spec = inside(rms_norm, (input, weight))
        plan = reduced(spec, dims, True)
        if not plan.groups:
            return wrap(torch.rms_norm(x, x.shape[dims[0] :], weight, eps), spec)
        y = scaled_by_rms(wide(x), dims, plan.groups, plan.elements, eps)
        return wrap(affine(y, weight, None, x.dtype), spec)

    return call(*args, **kwargs)


# --- groups of channels


def group_norm(x: torch.Size, weight: torch.Size | None, bias: torch.Size | None) -> Labels:
    return channels(x, weight, bias)


@sharded(F.group_norm, torch.group_norm)
def _group_norm(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(
        input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: bool
    ) -> ShardTensor:
        shape = input.shape
        if len(shape) < 2 or shape[1] % num_groups:
            raise RuntimeError(
                f"group_norm: num_groups={num_groups} must divide the channels (dim 1) of the input, which has "
                f"shape {list(shape)}"
            )
        _check_several(prod(shape) // num_groups, shape)
        (x, weight, bias), spec = inside(group_norm, (input, weight, bias))
        width = shape[1] // num_groups
        plan = reduced(spec, tuple(range(1, len(shape))), True)
        local_groups = x.shape[1] // width
        cut = [
            m for m, dim in spec.sharded if dim > 1 or (dim == 1 and any(size % width for size in spec.sizes[m] or ()))
        ]
        if cut:
            y = _by_groups(wide(x), spec, plan, width, eps)
        elif local_groups:
            return wrap(torch.group_norm(x, local_groups, weight, bias, eps), spec)
        else:
            y = x  # empty
        return wrap(affine(y, weight, bias, x.dtype, len(shape) - 2), spec)

    return call(*args, **kwargs)


def _by_groups(x: torch.Tensor, spec: ShardTensorSpec, plan: Reduced, width: int, eps: float) -> torch.Tensor:
    """`x` standardised by groups of `width` channels, of which a rank may have a part."""
    groups = spec.shape[1] // width
    group_of = torch.div(torch.arange(x.shape[1], device=x.device) + spec.offsets[1], width, rounding_mode="floor")
    flat = x.reshape(x.shape[0], x.shape[1], prod(x.shape[2:]))

    def summed(y: torch.Tensor) -> torch.Tensor:
        return y.new_zeros(y.shape[0], groups).index_add(1, group_of, y)

    def local_moments(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        number = summed(flat.new_ones(1, flat.shape[1]))[0] * flat.shape[2]
        mean = summed(flat.sum(-1)) / number.clamp(min=1)
        return mean, summed((flat - mean[:, group_of, None]).square().sum(-1))

    sizes = list(x.shape)
    mean, squares = on_own_shard(local_moments, dict.fromkeys(plan.groups, V))(flat)
    # Channels first: after that each group has all of them, and dims behind differ by their sizes alone.
    for m in sorted(plan.mesh_dims, key=lambda m: spec.placements[m].dim):  # type: ignore[attr-defined]
        dim, along = spec.placements[m].dim, spec.sizes[m] or ()  # type: ignore[attr-defined]
        if dim == 1:
            counts = x.new_tensor(_channels_by_group(along, width, groups)) * flat.shape[2]
        else:
            others = prod(size for d, size in enumerate(sizes) if d not in (0, 1, dim))
            counts = x.new_tensor([[width * size * others] for size in along])
        sizes[dim] = spec.shape[dim]
        mean, squares = merged_moments(mean, squares, counts.unsqueeze(1), spec.mesh.communicator(m))
    both = torch.stack(for_shards(mean, squares, plan.groups))

    def standardised(x: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        mean, squares = both[:, :, group_of].view(2, *x.shape[:2], *[1] * (x.dim() - 2)).unbind(0)
        return (x - mean) * torch.rsqrt(squares / (width * prod(spec.shape[2:])) + eps)

    types = {spec.mesh.communicator(m): S(spec.placements[m].dim) for m in plan.mesh_dims}  # type: ignore[attr-defined]
    return on_own_shard(standardised, types)(x, both)


def _channels_by_group(along: tuple[int, ...], width: int, groups: int) -> list[list[int]]:
    """The number of channels of each group on each rank."""
    starts = [sum(along[:rank]) for rank in range(len(along))]
    return [
        [max(0, min(start + size, (g + 1) * width) - max(start, g * width)) for g in range(groups)]
        for start, size in zip(starts, along)
    ]


def _check_several(values: int, shape: torch.Size) -> None:
    if values == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(shape)}")


# --- with running statistics


def batch_norm(x: torch.Size, *parameters: torch.Size | None) -> Labels:
    return channels(x, *parameters)


@sharded(F.batch_norm)
def _batch_norm(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(
        input: Any,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> ShardTensor:
        if not training:
            locals_, spec = inside(batch_norm, (input, running_mean, running_var, weight, bias))
            return wrap(_by_running(eps, *locals_), spec)
        shape = input.shape
        _check_several(prod(shape) // max(shape[1], 1), shape)
        input = _where_statistics_are(input, running_mean, running_var)
        (x, weight, bias), spec = inside(batch_norm, (input, weight, bias))
        dims = (0, *range(2, len(shape)))
        plan = reduced(spec, dims, True)
        inner = wide(x)
        mean, squares = moments(inner, spec, plan)
        y = standardised(inner, mean, squares, plan.groups, plan.elements, eps)
        with torch.no_grad():
            statistics_spec = reduced(spec, dims, False).spec
            for running, value in ((running_mean, mean), (running_var, squares / max(plan.elements - 1, 1))):
                _update(running, wrap(value.reshape(statistics_spec.local_shape), statistics_spec), momentum)
        return wrap(affine(y, weight, bias, x.dtype, len(shape) - 2), spec)

    return call(*args, **kwargs)


def _by_running(eps: float, x: torch.Tensor, mean: Any, variance: Any, weight: Any, bias: Any) -> torch.Tensor:
    if x.numel() and not may_be_dual(x):
        return F.batch_norm(x, mean, variance, weight, bias, False, eps=eps)
    behind = (1,) * (x.dim() - 2)  # torch's function takes no tensor without elements, and no statistics with tangents
    y = (x - mean.view(-1, *behind)) * (variance.view(-1, *behind) + eps).rsqrt()
    return affine(y, weight, bias, x.dtype, len(behind))


def instance_norm(x: torch.Size, *parameters: torch.Size | None) -> Labels:
    return channels(x, *parameters)


@sharded(F.instance_norm)
def _instance_norm(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(
        input: Any,
        running_mean: Any = None,
        running_var: Any = None,
        weight: Any = None,
        bias: Any = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> ShardTensor:
        if not use_input_stats:
            return _batch_norm(func, types, (input, running_mean, running_var, weight, bias, False, momentum, eps), {})
        shape = input.shape
        if prod(shape[2:]) == 1:
            raise ValueError(f"Expected more than 1 spatial element when training, got input size {list(shape)}")
        input = _where_statistics_are(input, running_mean, running_var)
        (x, weight, bias), spec = inside(instance_norm, (input, weight, bias))
        dims = tuple(range(2, len(shape)))
        plan = reduced(spec, dims, True)
        inner = wide(x)
        mean, squares = moments(inner, spec, plan)
        y = standardised(inner, mean, squares, plan.groups, plan.elements, eps)
        with torch.no_grad():
            statistics_spec = reduced(spec, dims, False).spec
            for running, value in ((running_mean, mean), (running_var, squares / max(plan.elements - 1, 1))):
                if running is not None:
                    _update(
                        running, wrap(value.reshape(statistics_spec.local_shape), statistics_spec).mean(0), momentum
                    )
        return wrap(affine(y, weight, bias, x.dtype, len(shape) - 2), spec)

    return call(*args, **kwargs)


def _where_statistics_are(x: Any, *running: Any) -> Any:
    """A plain tensor as one on the mesh of running statistics, which may be all that is a ShardTensor."""
    if isinstance(x, ShardTensor) or not any(isinstance(buffer, ShardTensor) for buffer in running):
        return x
    return wrap(x, make_spec(one_mesh((x, *running), "batch_norm"), None, x.shape))


@sharded(torch.batch_norm, torch.instance_norm)
def _by_positions(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """torch's own forms, in which weight and bias come before the running statistics."""
    is_batch = func is torch.batch_norm

    def call(
        input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, *options: Any, **named: Any
    ) -> Any:
        names = ("training" if is_batch else "use_input_stats", "momentum", "eps", "cudnn_enabled")
        given = dict(zip(names, options)) | named
        given.pop("cudnn_enabled", None)
        norm: Any = F.batch_norm if is_batch else F.instance_norm
        return norm(input, running_mean, running_var, weight, bias, **given)

    return call(*args, **kwargs)


@sharded(torch.batch_norm_stats)
def _batch_norm_stats(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    raise NotImplementedError(
        "SyncBatchNorm does not take ShardTensors: use nn.BatchNorm1d to 3d, whose statistics are over all ranks of "
        "the mesh; shard the batch over a second mesh dim for statistics over more ranks"
    )


def _update(running: Any, value: Any, momentum: float) -> None:
    """Moves a running statistic, a plain tensor or one in any layout, towards this batch's value."""
    if running is None:
        return
    if isinstance(running, ShardTensor):
        local, target = running._local, running._spec
    else:
        check_promotion(running, "batch_norm")
        local, target = running, value._spec.replicated()
    local.mul_(1 - momentum).add_(in_layout(value, target).to(local.dtype), alpha=momentum)
