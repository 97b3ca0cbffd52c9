"""Convolutions of sharded tensors: on a rank's shard, with the sizes of all shards, over any of the spatial dims.

Each function takes and gives local tensors; what is sharded, and how, is `sharded`, and comes back for the result.
Sharded dims other than the spatial ones (batch) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ..windows import Sliding, Transposed, same_padding
from .local_windows import ShardedDim, as_tuple, bring_windows, over_halo, owned_outputs, sharded_result, sizes_of

__all__ = ["conv", "conv_transpose"]

Ints = int | Sequence[int]
Result = tuple[torch.Tensor, tuple[ShardedDim, ...]]
_CONVS: list[Callable[..., Any]] = [F.conv1d, F.conv2d, F.conv3d]
_TRANSPOSED: list[Callable[..., Any]] = [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d]


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sharded: Sequence[ShardedDim],
    *,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Result:
    """conv1d to conv3d of a shard, by the number of the weight's dims: `[batch, in, ..] -> [batch, out, ..]`.

    Args:
        weight: whole, `[out, in/groups, ..]`, on every rank. Its gradient is this rank's summand.
        padding_mode: as that of `torch.nn.Conv2d`.

    Raises:
        ValueError: the options do not go together, or the padding reflects past the tensor.
    """
    count = weight.dim() - 2
    first = x.dim() - count
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
    shape = sizes_of(x, sharded)
    maps = {
        first + i: Sliding(
            shape[first + i], kernels[i], strides[i], *paddings[i], dilation=dilations[i], padding_mode=padding_mode
        )
        for i in range(count)
        if any(each.dim == first + i for each in sharded)
    }
    own = [each for each in sharded if each.dim in maps]
    x, windows = bring_windows(x, own[:-1], maps)
    local = [(0, 0) if first + i in maps else paddings[i] for i in range(count)]
    if padding_mode != "zeros" or any(left != right for left, right in local):
        sides = [side for pair in reversed(local) for side in pair]
        x = F.pad(x, sides, mode="constant" if padding_mode == "zeros" else padding_mode) if any(sides) else x
        local = [(0, 0)] * count
    both = tuple(left for left, _ in local)

    def op(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _CONVS[count - 1](x, weight, bias, strides, both, dilations, groups)
        return result

    if not own:
        return op(x), tuple(sharded)

    def op_along_last(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = owned_outputs(op, x, windows, {dim: maps[dim].extent for dim in windows})
        return result

    last = own[-1].dim
    result, window = over_halo(op_along_last, x, own[-1], maps[last])
    return result, sharded_result(sharded, {**windows, last: window})


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
    """conv_transpose1d to conv_transpose3d of a shard: `[batch, in, ..] -> [batch, out, ..]`.

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
            raise ValueError(f"output_padding {out} has to be smaller than stride {step} or dilation {spread}")
    shape = sizes_of(x, sharded)
    maps = {
        first + i: Transposed(shape[first + i], weight.shape[2 + i], strides[i], paddings[i], extra[i], dilations[i])
        for i in range(count)
        if any(each.dim == first + i for each in sharded)
    }
    x, windows = bring_windows(x, sharded, maps)
    own = [first + i in windows for i in range(count)]
    both = [0 if is_own else p for is_own, p in zip(own, paddings)]
    added = [0 if is_own else p for is_own, p in zip(own, extra)]

    def op(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _TRANSPOSED[count - 1](x, weight, None, strides, both, added, groups, dilations)
        return result

    result = owned_outputs(op, x, windows, dict.fromkeys(maps, 1))
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
        result = result + bias.view(-1, *[1] * count)
    return result, sharded_result(sharded, windows)
