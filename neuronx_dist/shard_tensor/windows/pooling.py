"""Max, average, power and adaptive pooling of sharded tensors; as in `convolution.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from ...comm.rank_selection import in_one_program
from .index_maps import Adaptive, Range, Sliding
from .local_windows import (
    LocalWindow,
    ShardedDim,
    Windows,
    as_tuple,
    bring_windows,
    owned_outputs,
    sharded_result,
    sizes_of,
)

__all__ = [
    "adaptive_avg_pool",
    "adaptive_max_pool",
    "avg_pool",
    "divisor",
    "lp_pool",
    "max_pool",
    "maxima",
    "mean_of_windows",
    "sums",
]

Ints = int | Sequence[int]
Result = tuple[torch.Tensor, tuple[ShardedDim, ...]]
MaxResult = tuple[torch.Tensor, torch.Tensor, tuple[ShardedDim, ...]]
_MAX: list[Callable[..., Any]] = [F.max_pool1d, F.max_pool2d, F.max_pool3d]
_AVG: list[Callable[..., Any]] = [F.avg_pool1d, F.avg_pool2d, F.avg_pool3d]
_ADAPTIVE: list[Callable[..., Any]] = [F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d]
_ADAPTIVE_MAX: list[Callable[..., Any]] = [F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d]


def maxima(
    shape: Sequence[int],
    kernel: Sequence[int],
    sharded: Collection[int],
    dtype: torch.dtype,
    *,
    stride: Ints | None = None,
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
) -> Windows:
    """Returns the windows of `max_pool`; `op` returns maxima, and their positions in its input."""
    count = len(kernel)
    first = len(shape) - count
    strides, paddings = _options(kernel, stride, padding)
    dilations = as_tuple(dilation, count, "dilation")
    maps = _sliding(shape, kernel, strides, paddings, dilations, ceil_mode)
    both = [0 if first + i in sharded else paddings[i] for i in range(count)]
    lowest = float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min

    def op(x: torch.Tensor) -> Any:
        return _MAX[count - 1](x, tuple(kernel), strides, both, dilations, ceil_mode, True)

    return Windows(maps, op, lowest)


def max_pool(x: torch.Tensor, kernel: Sequence[int], sharded: Sequence[ShardedDim], **options: Any) -> MaxResult:
    """Computes max_pool1d to max_pool3d of a shard, by the number of entries of `kernel`; and the maxima's positions.

    Positions are those of `return_indices=True`: in the whole tensor's spatial dims, flattened.

    Args:
        options: `stride`, `padding`, `dilation`, `ceil_mode`, as torch's.

    Raises:
        ValueError: the options do not go together.
    """
    first, shape = x.dim() - len(kernel), sizes_of(x, sharded)
    maps, op, lowest = maxima(shape, kernel, [shard.dim for shard in sharded], x.dtype, **options)
    x, windows = bring_windows(x, sharded, maps, lowest)
    inner: list[tuple[int, ...]] = []

    def noted(x: torch.Tensor) -> Any:
        inner.append(tuple(x.shape[first:]))
        return op(x)

    values, indices = owned_outputs(noted, x, {dim: maps[dim].extent for dim in windows})
    steps = [maps[dim].dilation if dim in windows else 1 for dim in maps]
    return values, _global(indices, inner[0], shape[first:], windows, first, steps), sharded_result(sharded, windows)


def sums(
    shape: Sequence[int],
    kernel: Sequence[int],
    sharded: Collection[int],
    *,
    stride: Ints | None = None,
    padding: Ints = 0,
    ceil_mode: bool = False,
) -> Windows:
    """Returns the windows of `avg_pool`; `op` returns their sums."""
    count = len(kernel)
    first = len(shape) - count
    strides, paddings = _options(kernel, stride, padding)
    both = [0 if first + i in sharded else paddings[i] for i in range(count)]
    maps = _sliding(shape, kernel, strides, paddings, (1,) * count, ceil_mode)
    return Windows(maps, lambda x: _sums(x, kernel, strides, both, ceil_mode))


def divisor(maps: Mapping[int, Sliding], count_include_pad: bool = True, override: int | None = None) -> int | None:
    """Returns the divisor of the windows' sums; None if windows have different divisors.

    Raises:
        ValueError: zero is given.
    """
    if override == 0:
        raise ValueError("divisor_override must not be zero")
    if override is not None:
        return override
    divisors = [set(_divisors(window_map, (0, window_map.outputs), count_include_pad)) for window_map in maps.values()]
    return (
        math.prod(next(iter(values)) for values in divisors) if all(len(values) == 1 for values in divisors) else None
    )


def avg_pool(
    x: torch.Tensor,
    kernel: Sequence[int],
    sharded: Sequence[ShardedDim],
    *,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    **options: Any,
) -> Result:
    """Computes avg_pool1d to avg_pool3d of a shard, by the number of entries of `kernel`.

    Args:
        options: `stride`, `padding`, `ceil_mode`, as torch's.

    Raises:
        ValueError: the options do not go together.
    """
    maps, op, _ = sums(sizes_of(x, sharded), kernel, [shard.dim for shard in sharded], **options)
    common = divisor(maps, count_include_pad, divisor_override)
    x, windows = bring_windows(x, sharded, maps)
    result = owned_outputs(op, x, {dim: maps[dim].extent for dim in windows})
    if common is not None:
        return result / common, sharded_result(sharded, windows)
    for dim, window_map in maps.items():
        outputs = windows[dim].outputs if dim in windows else (0, window_map.outputs)
        divisors = result.new_tensor(_divisors(window_map, outputs, count_include_pad))
        result = result / divisors.view(-1, *[1] * (x.dim() - 1 - dim))
    return result, sharded_result(sharded, windows)


def lp_pool(
    x: torch.Tensor,
    power: float,
    kernel: Sequence[int],
    sharded: Sequence[ShardedDim],
    *,
    stride: Ints | None = None,
    ceil_mode: bool = False,
) -> Result:
    """Computes lp_pool1d to lp_pool3d of a shard: `(sum of x**power)**(1/power)`, by torch's formula, of averages.

    Raises:
        ValueError: the options do not go together.
    """
    result, sharded = avg_pool(x.pow(power), kernel, sharded, stride=stride, ceil_mode=ceil_mode)
    return (torch.sign(result) * F.relu(torch.abs(result))).mul(math.prod(kernel)).pow(1.0 / power), tuple(sharded)


def adaptive_avg_pool(x: torch.Tensor, output_size: Sequence[int | None], sharded: Sequence[ShardedDim]) -> Result:
    """Computes adaptive_avg_pool1d to adaptive_avg_pool3d of a shard, by the number of entries of `output_size`."""
    x, windows, _, op = _adaptive(x, output_size, sharded, _ADAPTIVE)
    return op(x), sharded_result(sharded, windows)


def adaptive_max_pool(x: torch.Tensor, output_size: Sequence[int | None], sharded: Sequence[ShardedDim]) -> MaxResult:
    """Computes adaptive_max_pool1d to adaptive_max_pool3d of a shard, and the maxima's positions as in `max_pool`."""
    count = len(output_size)
    first = x.dim() - count
    shape = sizes_of(x, sharded)
    pools = [lambda x, size, pool=pool: pool(x, size, return_indices=True) for pool in _ADAPTIVE_MAX]
    x, windows, inner, op = _adaptive(x, output_size, sharded, pools)
    values, indices = op(x)
    return values, _global(indices, inner, shape[first:], windows, first, [1] * count), sharded_result(sharded, windows)


def _adaptive(
    x: torch.Tensor,
    output_size: Sequence[int | None],
    sharded: Sequence[ShardedDim],
    pools: Sequence[Callable[..., Any]],
) -> tuple[torch.Tensor, dict[int, LocalWindow], tuple[int, ...], Callable[[torch.Tensor], Any]]:
    """Exchanges the windows; returns them, their positions by dim, spatial sizes, and the function that pools them."""
    count = len(output_size)
    first = x.dim() - count
    shape = sizes_of(x, sharded)
    outputs = [shape[first + i] if size is None else size for i, size in enumerate(output_size)]
    maps = {
        shard.dim: Adaptive(shape[shard.dim], outputs[shard.dim - first]) for shard in sharded if shard.dim >= first
    }
    x, windows = bring_windows(x, sharded, maps)
    inner = tuple(max(1, n) for n in x.shape[first:])
    uneven = [dim for dim, window_map in maps.items() if window_map.outputs and window_map.size % window_map.outputs]

    def op(x: torch.Tensor) -> Any:
        sizes = [
            outputs[i] if first + i not in windows else windows[first + i].outputs[1] - windows[first + i].outputs[0]
            for i in range(count)
        ]
        return _by_output(x, [max(1, size) for size in sizes], uneven)

    def _by_output(x: torch.Tensor, sizes: list[int], dims: Sequence[int]) -> Any:
        """Pools windows of one dim that differ in size one by one."""
        dims = [dim for dim in dims if windows[dim].outputs[0] < windows[dim].outputs[1]]
        if not dims:
            return pools[count - 1](x, sizes)
        dim, rest = dims[0], dims[1:]
        (low, _), (begin, end) = windows[dim].inputs, windows[dim].outputs
        sizes = [1 if first + i == dim else size for i, size in enumerate(sizes)]
        parts = []
        for output in range(begin, end):
            a, b = maps[dim].window(output, output + 1)
            parts.append(_moved(_by_output(x.narrow(dim, a - low, b - a), sizes, rest), x, dim, a - low, b - a, first))
        if isinstance(parts[0], tuple):
            return tuple(torch.cat(column, dim) for column in zip(*parts))
        return torch.cat(parts, dim)

    return x, windows, inner, lambda x: owned_outputs(op, x, {})


def _moved(result: Any, x: torch.Tensor, dim: int, start: int, length: int, first: int) -> Any:
    """Converts positions of maxima in a part of `x` along `dim` to positions in `x`."""
    if not isinstance(result, tuple):
        return result
    values, indices = result
    sizes = list(x.shape[first:])
    part = [length if first + i == dim else size for i, size in enumerate(sizes)]
    coordinates = _unflattened(indices, part)
    coordinates[dim - first] = coordinates[dim - first] + start
    return values, _flattened(coordinates, sizes)


def _options(kernel: Sequence[int], stride: Ints | None, padding: Ints) -> tuple[tuple[int, ...], tuple[int, ...]]:
    count = len(kernel)
    strides = tuple(kernel) if stride is None or stride == () else as_tuple(stride, count, "stride")
    paddings = as_tuple(padding, count, "padding")
    for size, pad in zip(kernel, paddings):
        if not 0 <= pad <= size // 2:
            raise ValueError(f"padding {pad} of a pool must be from 0 to half of its kernel size {size}")
    return strides, paddings


def _sliding(
    shape: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    paddings: Sequence[int],
    dilations: Sequence[int],
    ceil_mode: bool,
) -> dict[int, Sliding]:
    first = len(shape) - len(kernel)
    options = zip(shape[first:], kernel, strides, paddings, dilations, strict=True)
    return {first + i: Sliding(n, k, s, p, p, d, ceil_mode) for i, (n, k, s, p, d) in enumerate(options)}


def _sums(
    x: torch.Tensor, kernel: Sequence[int], strides: Sequence[int], paddings: Sequence[int], ceil_mode: bool
) -> torch.Tensor:
    """Computes the sum over each window."""
    if in_one_program(x) and not ceil_mode:  # XLA has no divisor_override: torch_xla would compute it on the host
        mean = _AVG[len(kernel) - 1](x, tuple(kernel), tuple(strides), tuple(paddings))
        return mean * math.prod(kernel)
    if len(kernel) == 1:  # avg_pool1d has no divisor_override
        pool = F.avg_pool2d(
            x.unsqueeze(-2), (1, *kernel), (1, *strides), (0, *paddings), ceil_mode, True, divisor_override=1
        )
        return pool.squeeze(-2)
    pools = {2: F.avg_pool2d, 3: F.avg_pool3d}
    return pools[len(kernel)](x, tuple(kernel), tuple(strides), tuple(paddings), ceil_mode, True, divisor_override=1)


@lru_cache(maxsize=1024)
def _divisors(windows: Sliding, outputs: Range, include_padding: bool) -> list[int]:
    """Counts the inputs that the window of each output averages."""
    counts = []
    for output in range(*outputs):
        begin = output * windows.stride - windows.left
        if include_padding:
            counts.append(min(begin + windows.kernel, windows.size + windows.right) - begin)
        else:
            counts.append(min(begin + windows.kernel, windows.size) - max(begin, 0))
    return counts


def _global(
    indices: torch.Tensor,
    inner: Sequence[int],
    sizes: Sequence[int],
    windows: Mapping[int, LocalWindow],
    first: int,
    steps: Sequence[int],
) -> torch.Tensor:
    """Converts flattened positions in windows of sizes `inner` to flattened positions in spatial dims of `sizes`."""
    if not windows:
        return indices
    coordinates = _unflattened(indices, inner)
    for dim, window in windows.items():
        at = coordinates[dim - first] + window.inputs[0]
        step = steps[dim - first]
        # A window of nothing but -inf has its maximum at its first place, which torch takes to be inside.
        coordinates[dim - first] = torch.where(at < 0, at + (step - 1 - at) // step * step, at)
    return _flattened(coordinates, sizes)


def _unflattened(indices: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    coordinates: list[torch.Tensor] = []
    for size in reversed(sizes):
        coordinates.insert(0, indices % size)
        indices = indices // size
    return coordinates


def _flattened(coordinates: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    result = coordinates[0]
    for coordinate, size in zip(coordinates[1:], sizes[1:]):
        result = result * size + coordinate
    return result


def mean_of_windows(x: torch.Tensor, dim: int, size: int, sharded: Sequence[ShardedDim]) -> Result:
    """Computes the mean of the `size` positions around each position of one dim, zeros outside."""
    sides = (size // 2, (size - 1) // 2)
    windows_of_dim = Sliding(sizes_of(x, sharded)[dim], size, 1, *sides)
    maps = {shard.dim: windows_of_dim for shard in sharded if shard.dim == dim}
    x, windows = bring_windows(x, sharded, maps)
    if dim not in windows:
        x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + sides)

    def op(x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(x.shape[:dim].numel(), 1, x.shape[dim], -1)
        # As torch: under autocast the one computes in single precision, and the other does not.
        means = F.avg_pool2d(flat, (size, 1), 1) if x.dim() == 3 else F.avg_pool3d(flat[..., None], (size, 1, 1), 1)
        return means.view(*x.shape[:dim], means.shape[2], *x.shape[dim + 1 :])

    y = owned_outputs(op, x, {dim: size})
    return y, sharded_result(sharded, windows)
