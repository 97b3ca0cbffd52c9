"""Rules of the functions of torch.nn.functional that mix positions: norms, attention, padding, pooling, resampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..torch_internals.operators import upsample_bicubic2d_aa, upsample_bilinear2d_aa
from ..torch_internals.tensors import native_nn
from .spec import Spec, elementwise, labels, nonzero, operands, rule
from .views import FIRST, ViewLabels, as_int

__all__: list[str] = []

Dim = tuple[int, ...]


# --- norms ---


def _normalised(name: str) -> Callable[..., Spec]:
    def spec(input: Tensor, normalized_shape: Any, *args: Any, **kwargs: Any) -> Spec:
        """Spec of a norm over as many last dims as `normalized_shape` has; weight and bias have these dims."""
        count = len(normalized_shape) if isinstance(normalized_shape, (tuple, list, torch.Size)) else 1
        dims = labels(input.dim())
        rest = len(operands(args, kwargs))
        why = f"{name} normalises over it"
        fixed = dict.fromkeys(range(input.dim() - count, input.dim()), why)
        return Spec((dims, *(dims[input.dim() - count :],) * rest), (dims,), dict(enumerate(input.shape)), fixed=fixed)

    return spec


rule(F.layer_norm, torch.layer_norm)(_normalised("layer_norm"))
rule(F.rms_norm, torch.rms_norm)(_normalised("rms_norm"))


@rule(F.group_norm, torch.group_norm)
def group_norm(input: Tensor, num_groups: int, *args: Any, **kwargs: Any) -> Spec:
    builder = ViewLabels()
    why = "group_norm normalises over it"
    samples = (builder.new(input.shape[0]),)
    groups = as_int(num_groups)
    channels = (builder.new(groups), builder.new(input.shape[1] // groups, why))
    dims = [samples, channels, *((builder.new(size, why),) for size in input.shape[2:])]
    return builder.spec([dims, *[[channels]] * len(operands(args, kwargs))], [dims])


def _over_batch(input: Tensor, rest: list[Tensor], fixed: Sequence[int], why: str) -> Spec:
    """Spec of statistics over the batch: the other operands have one value per channel (dim 1)."""
    dims = labels(input.dim())
    ins = (dims, *((dims[1],),) * len(rest))
    return Spec(ins, (dims,), dict(enumerate(input.shape)), fixed=dict.fromkeys(fixed, why))


@rule(F.batch_norm)
def batch_norm(
    input: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Spec:
    fixed = [dim for dim in range(input.dim()) if dim != 1] if training else []
    rest = operands((running_mean, running_var, weight, bias), {})
    return _over_batch(input, rest, fixed, "batch_norm takes its statistics over it")


@rule(F.instance_norm)
def instance_norm(
    input: Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    *args: Any,
    **kwargs: Any,
) -> Spec:
    fixed = range(2, input.dim()) if use_input_stats else []
    rest = operands((running_mean, running_var, weight, bias), {})
    return _over_batch(input, rest, fixed, "instance_norm normalises over it")


# --- attention ---


def _attention_draws(*args: Any, **kwargs: Any) -> bool:
    return kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) != 0


@rule(F.scaled_dot_product_attention, linear=((2,),), random=_attention_draws)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Spec:
    """Spec of attention on `[..., heads, positions, width]`: heads (or groups of heads) and queries are free."""
    builder = ViewLabels()
    heads_q, heads_kv = (x.shape[-3] if x.dim() > 2 else 1 for x in (query, key))
    grouped = enable_gqa and heads_q != heads_kv
    lead = elementwise(*(x.shape[: -3 if grouped else -2] for x in (query, key, value)))
    builder.dims(lead.sizes[label] for label in range(len(lead.sizes)))
    batch: list[list[Dim]] = [list(dims or ()) for dims in lead.ins]
    out: list[Dim] = list(lead.outs[0])
    if grouped:
        heads, group = (builder.new(heads_kv),), (builder.new(heads_q // heads_kv),)
        batch = [[*batch[0], heads + group], [*batch[1], heads], [*batch[2], heads]]
        out.append(heads + group)
    causal = "the causal mask counts its positions from 0" if is_causal else None
    queries = (builder.new(query.shape[-2], causal),)
    keys = (builder.new(key.shape[-2], "attention normalises over the positions of the keys"),)
    width = (builder.new(query.shape[-1], "the scores are summed over it before the softmax"),)
    values = (builder.new(value.shape[-1]),)
    ins = [[*batch[0], queries, width], [*batch[1], keys, width], [*batch[2], keys, values]]
    if attn_mask is not None:
        full = [*out, queries, keys]
        last = full[len(full) - attn_mask.dim() :]
        ins.append(
            [
                () if size == 1 and prod(builder.sizes[label] for label in dim) != 1 else dim
                for size, dim in zip(attn_mask.shape, last)
            ]
        )
    return builder.spec(ins, [[*out, queries, values]])


# --- padding ---


def _pads_value(*args: Any, **kwargs: Any) -> bool:
    named = {**dict(zip(("input", "pad", "mode", "value"), args)), **kwargs}
    return named.get("mode", "constant") == "constant" and nonzero(named.get("value"))


@rule(F.pad, native_nn.pad, linear=FIRST, affine=_pads_value, aliases=True)
def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Spec:
    builder = ViewLabels()
    dims = builder.dims(input.shape)
    out = list(dims)
    for number in range(len(pad) // 2):
        before, after = as_int(pad[2 * number]), as_int(pad[2 * number + 1])
        at = input.dim() - 1 - number
        if before or after:
            builder.fixed[at] = f"pad({before}, {after}) adds to the ends of it"
            out[at] = (builder.new(input.shape[at] + before + after),)
    return builder.spec([dims], [out])


@rule(torch.constant_pad_nd, linear=FIRST, affine=lambda input, pad, value=0: nonzero(value))
def constant_pad_nd(input: Tensor, pad_: Any = None, value: Any = 0, **kwargs: Any) -> Spec:
    return pad(input, kwargs.get("pad", pad_))


# --- windows: pooling, resampling, images ---


def _each(value: Any, count: int, default: Any) -> list[int]:
    """Returns an option as one number for each dim; the option may be one number, several, or missing."""
    if value is None or value == ():
        value = default
    listed = list(value) if isinstance(value, (tuple, list)) else [value]
    return [as_int(number) for number in (listed * count if len(listed) == 1 else listed)]


def _windows(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (span + (stride - 1 if ceil else 0)) // stride + 1
    return count - 1 if ceil and (count - 1) * stride >= size + padding else count


def _pooled(count: int, names: str, outs: int = 1) -> Callable[..., Spec]:
    def spec(input: Tensor, *args: Any, **kwargs: Any) -> Spec:
        named = {**dict(zip(names.split(), args)), **kwargs}
        kernel = _each(named["kernel_size"], count, None)
        stride = _each(named.get("stride"), count, kernel)
        padding = _each(named.get("padding"), count, 0)
        dilation = _each(named.get("dilation"), count, 1)
        builder = ViewLabels()
        lead = builder.dims(input.shape[:-count])
        ins, out = list(lead), list(lead)
        why = "the windows of a pool go over it"
        for size, k, s, p, d in zip(input.shape[-count:], kernel, stride, padding, dilation):
            if k == s and p == 0 and d == 1 and size % k == 0 and outs == 1:  # windows side by side
                windows = (builder.new(size // k),)
                ins.append((*windows, builder.new(k, why)))
            else:
                ins.append((builder.new(size, why),))
                count_out = _windows(size, k, s, p, d, bool(named.get("ceil_mode")))
                windows = (builder.new(count_out),)
            out.append(windows)
        return builder.spec([ins], [out] * outs)

    return spec


_MAX = "kernel_size stride padding dilation ceil_mode return_indices"
_AVG = "kernel_size stride padding ceil_mode count_include_pad divisor_override"
for _count in (1, 2, 3):
    _max = getattr(F, f"max_pool{_count}d")
    rule(_max, getattr(torch, f"max_pool{_count}d"))(_pooled(_count, _MAX))
    rule(getattr(F, f"max_pool{_count}d_with_indices"))(_pooled(_count, _MAX, outs=2))
    rule(getattr(F, f"avg_pool{_count}d"), linear=FIRST)(_pooled(_count, _AVG))


def _resized(count: int, outs: int = 1) -> Callable[..., Spec]:
    def spec(input: Tensor, output_size: Any, *args: Any, **kwargs: Any) -> Spec:
        sizes = list(output_size) if isinstance(output_size, (tuple, list)) else [output_size] * count
        builder = ViewLabels()
        lead = builder.dims(input.shape[:-count])
        ins = [*lead, *((builder.new(size, "it is resized as a whole"),) for size in input.shape[-count:])]
        out = [(builder.new(old if new is None else as_int(new)),) for old, new in zip(input.shape[-count:], sizes)]
        return builder.spec([ins], [[*lead, *out]] * outs)

    return spec


for _count in (1, 2, 3):
    rule(getattr(F, f"adaptive_avg_pool{_count}d"), linear=FIRST)(_resized(_count))
    rule(getattr(F, f"adaptive_max_pool{_count}d"))(_resized(_count))
    rule(getattr(F, f"adaptive_max_pool{_count}d_with_indices"))(_resized(_count, outs=2))


@rule(F.interpolate, linear=FIRST)
def interpolate(input: Tensor, size: Any = None, scale_factor: Any = None, *args: Any, **kwargs: Any) -> Spec:
    count = input.dim() - 2
    if size is None:
        factors = list(scale_factor) if isinstance(scale_factor, (tuple, list)) else [scale_factor] * count
        size = [int(length * factor) for length, factor in zip(input.shape[2:], factors)]
    return _resized(count)(input, size)


@rule(F.pixel_shuffle, linear=FIRST, aliases=True)
def pixel_shuffle(input: Tensor, upscale_factor: int) -> Spec:
    builder = ViewLabels()
    r = as_int(upscale_factor)
    *lead, channels, height, width = input.shape
    dims = builder.dims(lead)
    c, h, w, down, across = (builder.new(size) for size in (channels // (r * r), height, width, r, r))
    return builder.spec([[*dims, (c, down, across), (h,), (w,)]], [[*dims, (c,), (h, down), (w, across)]])


@rule(F.pixel_unshuffle, linear=FIRST, aliases=True)
def pixel_unshuffle(input: Tensor, downscale_factor: int) -> Spec:
    builder = ViewLabels()
    r = as_int(downscale_factor)
    *lead, channels, height, width = input.shape
    dims = builder.dims(lead)
    c, h, w, down, across = (builder.new(size) for size in (channels, height // r, width // r, r, r))
    return builder.spec([[*dims, (c,), (h, down), (w, across)]], [[*dims, (c, down, across), (h,), (w,)]])


@rule(F.channel_shuffle, F.native_channel_shuffle, linear=FIRST, aliases=True)
def channel_shuffle(input: Tensor, groups: int) -> Spec:
    builder = ViewLabels()
    samples, channels, *rest = input.shape
    dims = builder.dims((samples, *rest))
    groups = as_int(groups)
    outer, inner = builder.new(groups), builder.new(channels // groups)
    return builder.spec([[dims[0], (outer, inner), *dims[1:]]], [[dims[0], (inner, outer), *dims[1:]]])


@rule(F.unfold, linear=FIRST)
def im2col(input: Tensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Spec:
    builder = ViewLabels()
    lead = builder.dims(input.shape[:-2])
    kernel, dilations, paddings, strides = (_each(v, 2, None) for v in (kernel_size, dilation, padding, stride))
    ins = [*lead, *((builder.new(size, "unfold takes windows of it"),) for size in input.shape[-2:])]
    blocks = prod(
        _windows(size, k, s, p, d, False)
        for size, k, d, p, s in zip(input.shape[-2:], kernel, dilations, paddings, strides)
    )
    return builder.spec([ins], [[*lead[:-1], (*lead[-1], builder.new(prod(kernel))), (builder.new(blocks),)]])


@rule(F.fold, linear=FIRST)
def col2im(input: Tensor, output_size: Any, kernel_size: Any, *args: Any, **kwargs: Any) -> Spec:
    builder = ViewLabels()
    lead = builder.dims(input.shape[:-2])
    inside = prod(_each(kernel_size, 2, None))
    channels = builder.new(input.shape[-2] // inside)
    why = "fold adds its windows up"
    ins = [*lead, (channels, builder.new(inside, why)), (builder.new(input.shape[-1], why),)]
    return builder.spec([ins], [[*lead, (channels,), *builder.dims(_each(output_size, 2, None))]])


def _unpooled(count: int) -> Callable[..., Spec]:
    def spec(input: Tensor, indices: Tensor, output_size: Any, *args: Any, **kwargs: Any) -> Spec:
        builder = ViewLabels()
        lead = builder.dims(input.shape[:-count])
        ins = [*lead, *((builder.new(size, "indices place its values"),) for size in input.shape[-count:])]
        return builder.spec([ins, ins], [[*lead, *builder.dims(map(as_int, output_size[-count:]))]])

    return spec


for _count in (2, 3):
    rule(getattr(native_nn, f"max_unpool{_count}d"), linear=FIRST)(_unpooled(_count))


_pool_backward = torch.ops.aten.max_pool2d_with_indices_backward


@rule(_pool_backward, _pool_backward.default)
def max_pool2d_backward(grad: Tensor, x: Tensor, *options: Any) -> Spec:
    """Images and channels are independent."""
    builder = ViewLabels()
    lead = builder.dims(x.shape[:-2])
    pooled = [(builder.new(size, "pooled"),) for size in grad.shape[-2:]]
    whole = [(builder.new(size, "windows go over it"),) for size in x.shape[-2:]]
    return builder.spec([[*lead, *pooled], [*lead, *whole], [*lead, *pooled]], [[*lead, *whole]])


@rule(upsample_bilinear2d_aa, upsample_bicubic2d_aa)
def antialiased(x: Tensor, output_size: Any, *options: Any, **named: Any) -> Spec:
    """Images and channels are independent."""
    factors = named.get("scale_factors") or ()
    sizes = output_size or [int(size * factor) for size, factor in zip(x.shape[-2:], factors)]
    builder = ViewLabels()
    lead = builder.dims(x.shape[:-2])
    whole = [(builder.new(size, "it is resized as a whole"),) for size in x.shape[-2:]]
    return builder.spec([[*lead, *whole]], [[*lead, *builder.dims(sizes)]])
