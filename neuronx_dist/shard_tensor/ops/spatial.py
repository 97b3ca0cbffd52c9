"""The handlers of convolutions, pooling, padding and interpolation, over the functions of `windows/`.

Any of the spatial dims, the batch and the channels may be sharded, in shards of any sizes. Contracted channels make the
result Partial. Groups of channels are independent: where channels are sharded, their dim is split into groups and the
channels of one group (`_grouped`), whose shards are bounded as views bound them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from ...spmd import S
from ..handlers import sharded
from ..labels import Labels, New, inside, planned
from ..moves.intervals import bounds_of
from ..spec import ShardTensorSpec, make_spec
from ..tensor import ShardTensor, wrap
from ..typed import on_own_shard
from ..windows import convolution, pooling, resample
from ..windows.local_windows import ShardedDim, nonempty
from .one_exchange import Chain, refusal, takes_chains

__all__: list[str] = []

_T = torch.Tensor


def _convolution(x: torch.Size, weight: torch.Size, bias: torch.Size | None, groups: int, transposed: bool) -> Labels:
    count = len(weight) - 2
    batch, spatial = ("b",) * (len(x) - count - 1), tuple(range(count))
    kernels = tuple(f"k{i}" for i in range(count))
    data = (*batch, "c", *spatial)
    if groups == 1:
        channels = ("c", "o") if transposed else ("o", "c")
        operands = [data, (*channels, *kernels), ("o",)]
        return Labels(operands, (*batch, "o", *spatial), frozenset(kernels), frozenset((2,)), linear=bias is None)
    channels = ("c", "g") if transposed else ("o", "g")
    out = New(groups * weight[1]) if transposed else "o"
    operands = [data, (*channels, *kernels), ("o",)]
    return Labels(operands, (*batch, out, *spatial), frozenset(("c", "o", "g", *kernels)), linear=bias is None)


def _groups(x: torch.Size, weight: torch.Size, bias: torch.Size | None, transposed: bool) -> Labels:
    """Returns the labels of a convolution whose operands have a dim of groups before their channels."""
    count = len(weight) - 3
    batch, spatial = ("b",) * (len(x) - count - 2), tuple(range(count))
    kernels = tuple(f"k{i}" for i in range(count))
    channels = ("g", "c", "o") if transposed else ("g", "o", "c")
    operands = [(*batch, "g", "c", *spatial), (*channels, *kernels), ("g", "o")]
    return Labels(operands, (*batch, "g", "o", *spatial), frozenset(kernels), frozenset((2,)), linear=bias is None)


def _cuts_channels(x: Any, weight: Any, bias: Any) -> bool:
    """Returns whether the weight or the bias is sharded, or the input along its channels."""
    at = x.dim() - weight.dim() + 1
    return any(
        isinstance(operand, ShardTensor) and any(operand is not x or dim == at for _, dim in operand._spec.sharded)
        for operand in (x, weight, bias)
    )


def _grouped(
    x: Any, weight: Any, bias: Any, groups: int, compute: Callable[..., convolution.Result], transposed: bool
) -> Any:
    """Computes a convolution of groups by `compute(x, weight, bias, sharded dims, groups)`, on each rank's groups."""
    count = weight.dim() - 2
    at = x.dim() - count - 1
    x, weight = x.unflatten(at, (groups, -1)), weight.unflatten(0, (groups, -1))
    bias = None if bias is None else bias.unflatten(0, (groups, -1))
    (local, w, b), spec = inside(_groups, (x, weight, bias), transposed)
    here, channels = w.shape[0], w.shape[2 if transposed else 1]
    for dim in range(3):  # of sharded groups, or channels, this rank may have none
        w = nonempty(w, dim)
    local = nonempty(nonempty(local, at), at + 1)
    b = None if b is None else nonempty(nonempty(b, 0), 1).flatten()

    def op(x: torch.Tensor, dims: Any) -> Any:
        dims = [shard._replace(dim=shard.dim - 1) for shard in dims]
        y, shards = compute(x.flatten(at, at + 1), w.flatten(0, 1), b, dims, w.shape[0])
        y = y.unflatten(at, (w.shape[0], -1)).narrow(at, 0, here).narrow(at + 1, 0, channels)
        return y, tuple(shard._replace(dim=shard.dim + 1) for shard in shards)

    return _computed(local, spec, count, op)[0].flatten(at, at + 1)


def _spatial(x: torch.Size, count: int) -> Labels:
    if len(x) < count:
        raise ValueError(f"a tensor of shape {tuple(x)} has fewer than {count} spatial dims")
    return Labels([tuple(range(len(x)))], tuple(range(len(x))))


@planned
def _sharded_dims(spec: ShardTensorSpec, first: int) -> tuple[ShardedDim, ...]:
    return tuple(
        ShardedDim(dim, bounds_of(spec.sizes[m] or ()), spec.mesh.communicator(m))
        for m, dim in spec.sharded
        if dim >= first
    )


def _computed(local: torch.Tensor, spec: ShardTensorSpec, count: int, op: Callable[..., Any]) -> list[ShardTensor]:
    """Computes `op(local, sharded dims)`; results have the layout of `spec`, but for the last `count` dims."""
    first = len(spec.shape) - count
    sharded = _sharded_dims(spec, first)
    *results, shards = on_own_shard(op, {shard.axis: S(shard.dim) for shard in sharded})(local, sharded)
    shape = [*spec.shape[:first], *results[0].shape[first:]]
    sizes = list(spec.sizes)
    for (m, _), (dim, bounds, _) in zip([entry for entry in spec.sharded if entry[1] >= first], shards, strict=True):
        shape[dim] = bounds[-1]
        sizes[m] = tuple(high - low for low, high in pairwise(bounds))
    out = make_spec(spec.mesh, spec.placements, shape, tuple(sizes))
    return [wrap(result, out) for result in results]


@sharded(F.conv1d, F.conv2d, F.conv3d)
@takes_chains
def conv(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        if isinstance(input, Chain):
            dim = input.window_dim(weight.dim() - 2, (weight, bias))
            (_, w, b), spec = inside(_convolution, (input.outline(), weight, bias), groups, False)
            return input.then(func.__name__, convolution.convolution(input.shape, w, b, [dim], **options), spec)
        if groups > 1 and _cuts_channels(input, weight, bias):
            return _grouped(
                *(input, weight, bias, groups),
                lambda x, w, b, dims, groups: convolution.conv(x, w, b, dims, **options | {"groups": groups}),
                False,
            )
        (x, w, b), spec = inside(_convolution, (input, weight, bias), groups, False)
        return _computed(x, spec, w.dim() - 2, lambda x, dims: convolution.conv(x, w, b, dims, **options))[0]

    return call(*args, **kwargs)


@sharded(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def conv_transpose(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        options = {"stride": stride, "padding": padding, "output_padding": output_padding}
        options |= {"groups": groups, "dilation": dilation}
        if groups > 1 and _cuts_channels(input, weight, bias):
            return _grouped(
                *(input, weight, bias, groups),
                lambda x, w, b, dims, groups: convolution.conv_transpose(x, w, b, dims, **options | {"groups": groups}),
                True,
            )
        (x, w, b), spec = inside(_convolution, (input, weight, bias), groups, True)
        return _computed(x, spec, w.dim() - 2, lambda x, dims: convolution.conv_transpose(x, w, b, dims, **options))[0]

    return call(*args, **kwargs)


def _kernel(size: Any, count: int) -> tuple[int, ...]:
    return (size,) * count if isinstance(size, int) else tuple(size) * (count if len(size) == 1 else 1)


def _max_pool(count: int, with_indices: bool) -> Callable[..., Any]:
    @takes_chains
    def handler(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        def call(
            input: Any,
            kernel_size: Any,
            stride: Any = None,
            padding: Any = 0,
            dilation: Any = 1,
            ceil_mode: bool = False,
            return_indices: bool = False,
        ) -> Any:
            options = {"stride": stride or None, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}
            kernel = _kernel(kernel_size, count)
            if isinstance(input, Chain):
                if with_indices or return_indices:
                    raise refusal(f"{func.__name__} with indices")
                windows = pooling.maxima(input.shape, kernel, [input.window_dim(count)], input.dtype, **options)
                return input.then(func.__name__, windows._replace(op=lambda x: windows.op(x)[0]), input.spec)
            (x,), spec = inside(_spatial, (input,), count)
            values, indices = _computed(x, spec, count, lambda x, dims: pooling.max_pool(x, kernel, dims, **options))
            return (values, indices) if with_indices or return_indices else values

        return call(*args, **kwargs)

    return handler


def _avg_pool(count: int) -> Callable[..., Any]:
    @takes_chains
    def handler(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        def call(input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, *flags: Any, **named: Any) -> Any:
            options = dict(zip(("ceil_mode", "count_include_pad", "divisor_override"), flags)) | named
            options |= {"stride": stride or None, "padding": padding}
            kernel = _kernel(kernel_size, count)
            if isinstance(input, Chain):
                counted = options.pop("count_include_pad", True), options.pop("divisor_override", None)
                windows = pooling.sums(input.shape, kernel, [input.window_dim(count)], **options)
                common = pooling.divisor(windows.maps, *counted)
                if common is None:
                    raise refusal(f"{func.__name__} with divisors that differ")
                averages = windows._replace(op=lambda x: windows.op(x) / common)
                return input.then(func.__name__, averages, input.spec)
            (x,), spec = inside(_spatial, (input,), count)
            return _computed(x, spec, count, lambda x, dims: pooling.avg_pool(x, kernel, dims, **options))[0]

        return call(*args, **kwargs)

    return handler


def _lp_pool(count: int) -> Callable[..., Any]:
    def handler(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        def call(input: Any, norm_type: Any, kernel_size: Any, stride: Any = None, ceil_mode: bool = False) -> Any:
            (x,), spec = inside(_spatial, (input,), count)
            kernel = _kernel(kernel_size, count)
            options: dict[str, Any] = {"stride": stride or None, "ceil_mode": ceil_mode}
            return _computed(x, spec, count, lambda x, dims: pooling.lp_pool(x, norm_type, kernel, dims, **options))[0]

        return call(*args, **kwargs)

    return handler


def _adaptive_pool(count: int, pool: Callable[..., Any], with_indices: bool | None = None) -> Callable[..., Any]:
    def handler(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        def call(input: Any, output_size: Any, return_indices: bool = False) -> Any:
            (x,), spec = inside(_spatial, (input,), count)
            sizes = _kernel(output_size, count)
            results = _computed(x, spec, count, lambda x, dims: pool(x, sizes, dims))
            return tuple(results) if with_indices or return_indices else results[0]

        return call(*args, **kwargs)

    return handler


for _count, _name in enumerate(("1d", "2d", "3d"), 1):
    sharded(getattr(F, f"max_pool{_name}"), getattr(torch, f"max_pool{_name}"))(_max_pool(_count, False))
    sharded(getattr(F, f"max_pool{_name}_with_indices"))(_max_pool(_count, True))
    sharded(getattr(F, f"avg_pool{_name}"))(_avg_pool(_count))
    sharded(getattr(F, f"lp_pool{_name}"))(_lp_pool(_count))
    sharded(getattr(F, f"adaptive_avg_pool{_name}"))(_adaptive_pool(_count, pooling.adaptive_avg_pool))
    sharded(getattr(F, f"adaptive_max_pool{_name}"))(_adaptive_pool(_count, pooling.adaptive_max_pool))
    sharded(getattr(F, f"adaptive_max_pool{_name}_with_indices"))(
        _adaptive_pool(_count, pooling.adaptive_max_pool, True)
    )


@sharded(F.interpolate)
def interpolate(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    names = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
    options = dict(zip(names, args[1:])) | kwargs
    x = options.pop("input", None) if not args else args[0]
    (local,), spec = inside(_spatial, (x,), 0)
    return _computed(local, spec, x.dim() - 2, lambda x, dims: resample.interpolate(x, dims, **options))[0]


@sharded(F.pad)
@takes_chains
def pad(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
        value = 0.0 if value is None else value
        if isinstance(input, Chain):
            windows = convolution.padding(input.shape, pad, [input.window_dim(len(pad) // 2)], mode, value)
            return input.then(func.__name__, windows, input.spec)
        (x,), spec = inside(_spatial, (input,), len(pad) // 2)
        options = {"mode": mode, "value": value}
        return _computed(x, spec, len(pad) // 2, lambda x, dims: convolution.pad(x, pad, dims, **options))[0]

    return call(*args, **kwargs)


@sharded(F.local_response_norm)
def local_response_norm(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Any:
        if input.dim() < 3:
            raise ValueError(f"local_response_norm needs at least 3 dims, got shape {tuple(input.shape)}")
        squares = input.square()
        (x,), spec = inside(_spatial, (squares,), input.dim() - 1)
        means = _computed(x, spec, input.dim() - 1, lambda x, dims: pooling.mean_of_windows(x, 1, size, dims))[0]
        return input / (means * alpha + k) ** beta

    return call(*args, **kwargs)
