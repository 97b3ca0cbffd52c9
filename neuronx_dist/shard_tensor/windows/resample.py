"""`interpolate` of sharded tensors, in all its modes; as in `convolution.py`.

Along a sharded dim an output is a weighted sum of a few inputs, by the index map's taps; along the others torch's own
operator runs. All modes are products of one-dimensional ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from ...spmd.watching import active
from ...torch_internals.operators import upsample_bicubic2d_aa, upsample_bilinear2d_aa, upsample_nearest_exact
from ..device_mesh import with_values
from .index_maps import Interpolated
from .local_windows import LocalWindow, ShardedDim, as_tuple, bring_windows, owned_outputs, sharded_result, sizes_of
from .pooling import adaptive_avg_pool

__all__ = ["interpolate"]

Result = tuple[torch.Tensor, tuple[ShardedDim, ...]]
_ALONG_A_DIM = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}
_aten = torch.ops.aten
_NEAREST = (_aten.upsample_nearest1d, _aten.upsample_nearest2d, _aten.upsample_nearest3d)
_WEIGHTED = {
    ("linear", False): _aten.upsample_linear1d,
    ("bilinear", False): _aten.upsample_bilinear2d,
    ("trilinear", False): _aten.upsample_trilinear3d,
    ("bicubic", False): _aten.upsample_bicubic2d,
    ("bilinear", True): upsample_bilinear2d_aa,
    ("bicubic", True): upsample_bicubic2d_aa,
}


def interpolate(
    x: torch.Tensor,
    sharded: Sequence[ShardedDim],
    *,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Result:
    """Computes `torch.nn.functional.interpolate` of a shard: `[batch, channels, ..] -> [batch, channels, ..]`.

    Raises:
        ValueError: the options do not go together, as torch says it; or the result is empty.
    """
    shape, count = sizes_of(x, sharded), x.dim() - 2
    sizes, scales = _hashable(size), _hashable(scale_factor)
    outputs = _outputs(tuple(shape), sizes, scales, mode, align_corners, recompute_scale_factor, antialias)
    if mode == "area":
        return adaptive_avg_pool(x, outputs, sharded)
    steps: list[float | None] = [None] * count
    if scales is not None and not recompute_scale_factor:
        steps = [1.0 / scale for scale in (scales if isinstance(scales, tuple) else (scales,) * count)]
    maps = {
        shard.dim: Interpolated(
            shape[shard.dim],
            outputs[shard.dim - 2],
            _ALONG_A_DIM.get(mode, mode),
            bool(align_corners),
            steps[shard.dim - 2],
            antialias,
            torch.float64 if x.dtype == torch.float64 else torch.float32,
            count == 2,
        )
        for shard in sharded
        if shard.dim >= 2
    }
    x, windows = bring_windows(x, sharded, maps)
    for dim, window in windows.items():
        x = _weighted(x, dim, maps[dim], window)
    rest = [i for i in range(count) if i + 2 not in windows]
    if any(shape[i + 2] != outputs[i] or steps[i] not in (None, 1.0) for i in rest):
        factors = [None if steps[i] is None or i not in rest else 1.0 / steps[i] for i in range(count)]  # type: ignore[operator]

        def op(x: torch.Tensor) -> Any:
            out = [outputs[i] if i in rest else x.shape[i + 2] for i in range(count)]
            return _operator(mode, bool(align_corners), antialias, count)(x, out, factors)

        x = owned_outputs(op, x, {})
    return x, sharded_result(sharded, windows)


def _hashable(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float)) else tuple(value)


@lru_cache(maxsize=1024)
def _outputs(shape: tuple[int, ...], size: Any, scale: Any, *options: Any) -> tuple[int, ...]:
    """Returns the sizes of the result's spatial dims. Options that contradict one another are refused by torch."""
    mode, align_corners, recompute, antialias = options
    count = len(shape) - 2
    one = [None if x is None else 1 if not isinstance(x, tuple) else (1,) * len(x) for x in (size, scale)]
    F.interpolate(torch.zeros(1, 1, *[1] * count), one[0], one[1], mode, align_corners, recompute, antialias)
    if size is not None:
        outputs = as_tuple(size, count, "size")
    else:
        scales = scale if isinstance(scale, tuple) else (scale,) * count
        outputs = tuple(math.floor(float(n) * factor) for n, factor in zip(shape[2:], scales))
    if min(outputs) < 1:
        raise ValueError(
            f"interpolate of shape {shape} by size={size}, scale_factor={scale} gives an empty result of size {outputs}"
        )
    return outputs


def _weighted(x: torch.Tensor, dim: int, windows: Interpolated, window: LocalWindow) -> torch.Tensor:
    """Computes this rank's outputs along a dim from its window: `[.., inputs, ..] -> [.., outputs, ..]`."""
    indices, weights = _local_taps(windows, window, x.dtype, x.device)
    if active() is not None:  # a check knows the types of tensors that are made inside it
        indices, weights = _made_again(indices), _made_again(weights)
    if indices.shape[1] == 1:
        return x.index_select(dim, indices[:, 0])
    weights = weights.view(*weights.shape, *[1] * (x.dim() - 1 - dim))
    result = x.index_select(dim, indices[:, 0]) * weights[:, 0]
    for tap in range(1, indices.shape[1]):
        result = result + x.index_select(dim, indices[:, tap]) * weights[:, tap]
    return result


def _made_again(x: torch.Tensor) -> torch.Tensor:
    with with_values():
        numbers = x.tolist()
    return torch.tensor(numbers, dtype=x.dtype, device=x.device).view(x.shape)


@lru_cache(maxsize=1024)
def _local_taps(
    windows: Interpolated, window: LocalWindow, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the taps of this rank's outputs: positions in its window, and weights; `[outputs, taps]` both."""
    (begin, end), (low, high) = window.outputs, window.inputs
    with with_values():
        indices, weights = windows.taps
        indices = (indices[begin:end] - low).clamp(0, max(0, high - low - 1))  # of weight 0 outside of the window
        return indices.to(device), weights[begin:end].to(device, dtype)


def _operator(
    mode: str, align_corners: bool, antialias: bool, count: int
) -> Callable[[torch.Tensor, list[int], list[float | None]], Any]:
    """Calls torch's operator with sizes and, for each spatial dim, a scale factor or None."""
    if mode.startswith("nearest"):
        nearest = (upsample_nearest_exact if mode == "nearest-exact" else _NEAREST)[count - 1]
        return lambda x, sizes, factors: nearest(x, sizes, *factors)
    weighted = _WEIGHTED[mode, antialias]
    return lambda x, sizes, factors: weighted(x, sizes, align_corners, *factors)
