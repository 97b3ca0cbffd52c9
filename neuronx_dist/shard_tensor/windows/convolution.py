"""Convolutions of sharded tensors: on a rank's shard, with the sizes of all shards, over any of the spatial dims.

Each function takes and gives local tensors; what is sharded, and how, is `sharded`, and comes back for the result.
Sharded dims other than the spatial ones (batch) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from .index_maps import Sliding, Transposed, same_padding
from .local_windows import (
    ShardedDim,
    Windows,
    as_tuple,
    bring_windows,
    nonempty,
    over_halo,
    owned_outputs,
    sharded_result,
    sizes_of,
)

__all__ = ["conv", "conv_transpose", "convolution", "pad", "padding"]

Ints = int | Sequence[int]
Result = tuple[torch.Tensor, tuple[ShardedDim, ...]]
_CONVS: list[Callable[..., Any]] = [F.conv1d, F.conv2d, F.conv3d]
_TRANSPOSED: list[Callable[..., Any]] = [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d]


def convolution(
    shape: Sequence[int],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sharded: Collection[int],
    *,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Windows:
    """Returns the windows of a convolution of a tensor of the global `shape`; see `conv`.

    Args:
        sharded: dims that are.
    """
    count = weight.dim() - 2
    first = len(shape) - count
    kernels, strides = weight.shape[2:], as_tuple(stride, count, "stride")
    dilations = as_tuple(dilation, count, "dilation")
    if padding == "same" and set(strides) != {1}:
        raise ValueError(f"padding='same' needs stride 1, got {strides}")
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueError(f"padding {padding!r}: use 'same', 'valid' or numbers")
        is_same = padding == "same"
        paddings = [same_padding(k, d) if is_same else (0, 0) for k, d in zip(kernels, dilations)]
    else:
        paddings = [(p, p) for p in as_tuple(padding, count, "padding")]
    maps = {
        first + i: Sliding(
            shape[first + i], kernels[i], strides[i], *paddings[i], dilation=dilations[i], padding_mode=padding_mode
        )
        for i in range(count)
    }
    local = [(0, 0) if first + i in sharded else paddings[i] for i in range(count)]
    sides: list[int] = []
    if padding_mode != "zeros" or any(left != right for left, right in local):
        sides = [side for pair in reversed(local) for side in pair]
        local = [(0, 0)] * count
    mode = "constant" if padding_mode == "zeros" else padding_mode
    both = tuple(left for left, _ in local)

    def op(x: torch.Tensor) -> torch.Tensor:
        if any(sides):
            x = F.pad(x, sides, mode=mode)
        result: torch.Tensor = _CONVS[count - 1](x, weight, bias, strides, both, dilations, groups)
        return result

    return Windows(maps, op)


def conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sharded: Sequence[ShardedDim], **options: Any
) -> Result:
    """Computes conv1d to conv3d of a shard, by the weight's number of dims: `[batch, in, ..] -> [batch, out, ..]`.

    Args:
        weight: whole, `[out, in/groups, ..]`, on every rank. Its gradient is this rank's summand.
        options: `stride`, `padding`, `dilation`, `groups` as torch's, `padding_mode` as that of `torch.nn.Conv2d`.

    Raises:
        ValueError: the options do not go together, or the padding reflects past the tensor.
    """
    first, channels = x.dim() - weight.dim() + 2, weight.shape[0]
    spatial = [shard for shard in sharded if shard.dim >= first]
    shape = sizes_of(x, sharded)
    if 0 in weight.shape[:2]:  # of sharded channels this rank has none
        x, weight = nonempty(x, first - 1), nonempty(nonempty(weight, 0), 1)
        bias = None if bias is None else nonempty(bias, 0)
    maps, op, _ = convolution(shape, weight, bias, [shard.dim for shard in spatial], **options)
    x, windows = bring_windows(x, spatial[:-1], maps)
    if spatial:
        last = spatial[-1].dim
        extents = {shard.dim: maps[shard.dim].extent for shard in spatial}
        result, windows[last] = over_halo(op, x, spatial[-1], maps[last], extents, (first - 1,))
    else:
        result = owned_outputs(op, x, {}, (first - 1,))
    return (result if channels else result.narrow(first - 1, 0, 0)), sharded_result(sharded, windows)


def conv_transpose(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sharded: Sequence[ShardedDim],
    *,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Result:
    """Computes conv_transpose1d to conv_transpose3d of a shard: `[batch, in, ..] -> [batch, out, ..]`.

    Args:
        weight: whole, `[in, out/groups, ..]`, on every rank. Its gradient is this rank's summand.

    Raises:
        ValueError: the options do not go together.
    """
    count = weight.dim() - 2
    first = x.dim() - count
    strides, paddings = as_tuple(stride, count, "stride"), as_tuple(padding, count, "padding")
    extra, dilations = as_tuple(output_padding, count, "output_padding"), as_tuple(dilation, count, "dilation")
    for out, step, spread in zip(extra, strides, dilations):
        if out >= max(step, spread):
            raise ValueError(f"output_padding {out} must be smaller than stride {step} or dilation {spread}")
    shape = sizes_of(x, sharded)
    maps = {
        first + i: Transposed(shape[first + i], weight.shape[2 + i], strides[i], paddings[i], extra[i], dilations[i])
        for i in range(count)
        if any(shard.dim == first + i for shard in sharded)
    }
    x, windows = bring_windows(x, sharded, maps)
    is_exchanged = [first + i in windows for i in range(count)]
    both = [0 if exchanged else p for exchanged, p in zip(is_exchanged, paddings)]
    added = [0 if exchanged else p for exchanged, p in zip(is_exchanged, extra)]

    def op(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _TRANSPOSED[count - 1](x, weight, None, strides, both, added, groups, dilations)
        return result

    channels = weight.shape[1]
    if 0 in weight.shape[:2]:
        x, weight = nonempty(x, first - 1), nonempty(nonempty(weight, 0), 1)
    result = owned_outputs(op, x, {}, (first - 1,))
    if not channels:
        result = result.narrow(first - 1, 0, 0)
    sides = [0] * (2 * count)
    for dim, window in windows.items():  # what is computed begins, and ends, elsewhere than what is owned
        (low, high), (begin, end) = window.inputs, window.outputs
        i = dim - first
        offset = low * strides[i] - paddings[i] if low < high else begin
        at = 2 * (count - 1 - i)
        sides[at], sides[at + 1] = offset - begin, end - offset - result.shape[dim]
    if any(sides):
        result = F.pad(result, sides)
    if bias is not None:
        result = result + bias.view(-1, *[1] * count).to(result.dtype)  # under autocast they differ
    return result, sharded_result(sharded, windows)


def padding(
    shape: Sequence[int], sides: Sequence[int], sharded: Collection[int], mode: str = "constant", value: float = 0
) -> Windows:
    """Returns the windows, of one element each, of `pad`."""
    local = list(sides)
    padding_mode = "zeros" if mode == "constant" else mode
    maps: dict[int, Sliding] = {}
    for at in range(0, len(local), 2):
        dim = len(shape) - 1 - at // 2
        maps[dim] = Sliding(shape[dim], 1, 1, local[at], local[at + 1], padding_mode=padding_mode)
        if dim in sharded:
            local[at] = local[at + 1] = 0

    def op(x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, local, mode, value if mode == "constant" else None) if any(local) else x

    return Windows(maps, op, value)


def pad(
    x: torch.Tensor,
    sides: Sequence[int],
    sharded: Sequence[ShardedDim],
    *,
    mode: str = "constant",
    value: float | int | bool = 0,
) -> Result:
    """Computes `torch.nn.functional.pad` of a shard; negative sides crop.

    Args:
        sides: `(left, right)` of the last dim, then of the one before.

    Raises:
        ValueError: the padding reflects past the tensor, or leaves nothing.
    """
    maps, op, _ = padding(sizes_of(x, sharded), sides, [shard.dim for shard in sharded], mode, value)
    windowed, windows = bring_windows(x, sharded, maps, value)
    result = op(windowed) if mode == "constant" else owned_outputs(op, windowed, {})  # constants may pad no elements
    return (result.clone() if result is x else result), sharded_result(sharded, windows)
