"""Two-dimensional convolutions that are sharded over their output or input channels.

    output   Y[N, out/t, ..] = conv(X[N, in, ..], W[out/t, in/g, ..])       dX is partial on tp: all-reduced
    input    Y[N, out, ..]   = conv(X[N, in/t, ..], W[out, in/t/g, ..])     partial on tp: all-reduced

With groups (g > 1) an output channel needs the input channels of its group alone. Sharded over output channels, a rank
takes those of its groups (g a multiple of t), or of the one group in which its channels are (t a multiple of g);
sharded over input channels, a rank takes its part of each group. Height and width are whole on each rank, so that every
padding mode is that of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from .. import comm, spmd
from ..spmd import I, P, R, S, ShardSpec, set_spec, spec_of
from .attributes import PaddedLayer
from .linear import InitMethod, draw

__all__ = ["BaseParallelConv", "InputChannelParallelConv2d", "OutputChannelParallelConv2d"]

Pair = int | tuple[int, int]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


class BaseParallelConv(PaddedLayer):
    """The base of both convolutions: sizes, parameters, and initial weights that do not depend on the layout."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    axis = "tp"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair,
        padding: Pair | str,
        dilation: Pair,
        groups: int,
        bias: bool,
        padding_mode: PaddingMode,
        partition_dim: int,
        dtype: torch.dtype,
        device: Any = None,
        init_method: InitMethod | None = None,
        keep_master_params: bool = False,
        partition_pad: bool = False,
        reduce_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        super().__init__()
        name, size = type(self).__name__, comm.size("tp")
        # Torch checks the arguments, and counts the padding of each mode.
        whole = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, "meta", dtype
        )
        self._margins: list[int] = list(whole._reversed_padding_repeated_twice)
        self.kernel_size, self.stride, self.dilation = _pair(kernel_size), _pair(stride), _pair(dilation)
        self.padding = padding if isinstance(padding, str) else _pair(padding)
        self.padding_mode: PaddingMode = padding_mode
        self.groups = groups
        self.partition_dim, self.partition_pad = partition_dim, partition_pad
        self.init_method, self.keep_master_params, self.reduce_dtype = init_method, keep_master_params, reduce_dtype
        if partition_pad and groups > 1:
            raise ValueError(f"{name}: partition_pad=True is not possible with groups={groups}")
        shape = tuple(whole.weight.shape)
        channels = shape[partition_dim]
        self.partition_pad_size = -channels % size if partition_pad else 0
        if (channels + self.partition_pad_size) % size:
            side = "out_channels" if partition_dim == 0 else "in_channels" if groups == 1 else "in_channels / groups"
            raise ValueError(
                f"{name}: {side} {channels} is not divisible by the tensor parallel size {size}; pass "
                "partition_pad=True, which adds channels of zeros, or choose another degree"
            )
        self.in_channels = in_channels + (self.partition_pad_size if partition_dim == 1 else 0)
        self.out_channels = out_channels + (self.partition_pad_size if partition_dim == 0 else 0)
        self.channels_per_partition = (channels + self.partition_pad_size) // size
        self._register("weight", shape, partition_dim, dtype, device)
        self.register_parameter("bias", None)
        if bias:
            self._register("bias", (out_channels,), 0 if partition_dim == 0 else None, dtype, device)
        self.master_weight: torch.Tensor | None = None
        self.master_bias: torch.Tensor | None = None
        if not self.weight.is_meta:
            self.init_weight_cpu()

    def _register(self, name: str, shape: tuple[int, ...], dim: int | None, dtype: torch.dtype, device: Any) -> None:
        spec = ShardSpec(full_shape=shape)
        if dim is not None:
            full = tuple(size + self.partition_pad_size * (i == dim) for i, size in enumerate(shape))
            spec = ShardSpec("tp", dim, 1, comm.size("tp"), full, shape[dim] if self.partition_pad_size else None)
        self.register_parameter(name, nn.Parameter(torch.empty(spec.local_shape, dtype=dtype, device=device)))
        set_spec(self, name, spec)

    @property
    def arg_init_method(self) -> InitMethod | None:
        return self.init_method

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def full_module(self, device: Any = "meta") -> nn.Conv2d:
        """The unsharded layer, without padding, for initialisers."""
        out_channels, in_channels = spec_of(self.weight).unpadded_shape[:2]
        return nn.Conv2d(
            in_channels * self.groups,
            out_channels,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.bias is not None,
            self.padding_mode,
            device,
            self.weight.dtype,
        )

    def init_weight_cpu(self) -> None:
        """Draws the unsharded parameters as `nn.Conv2d` does, and stores this rank's slices."""
        rank, shape = comm.rank("tp"), spec_of(self.weight).unpadded_shape
        fill: Callable[[torch.Tensor], Any] = self.init_method or partial(nn.init.kaiming_uniform_, a=math.sqrt(5))
        weight, bias = draw(self.weight, fill, rank), None
        if self.bias is not None:
            bound = 1 / math.sqrt(math.prod(shape[1:]))
            bias = draw(self.bias, partial(nn.init.uniform_, a=-bound, b=bound), rank)
        if self.keep_master_params:
            self.master_weight, self.master_bias = weight, bias

    def _conv(self, x: torch.Tensor, bias: torch.Tensor | None, groups: int) -> torch.Tensor:
        if self.padding_mode == "zeros":
            return F.conv2d(x, self.weight, bias, self.stride, self.padding, self.dilation, groups)
        x = F.pad(x, self._margins, mode=self.padding_mode)
        return F.conv2d(x, self.weight, bias, self.stride, 0, self.dilation, groups)

    def _check(self, x: torch.Tensor, channels: int) -> None:
        if x.dim() != 4 or x.shape[1] != channels:
            raise ValueError(
                f"{type(self).__name__}: the input {list(x.shape)} is not [batch, channels, height, width] with "
                f"{channels} channels, which this layer takes at a tensor parallel size of {comm.size('tp')}"
            )

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, groups={self.groups}, local_weight={list(self.weight.shape)}"
        )


class OutputChannelParallelConv2d(BaseParallelConv):
    """`nn.Conv2d` sharded over its output channels: `[N, in, H, W] -> [N, out/tp, H', W']`.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: of the whole
            layer, as in `nn.Conv2d`.
        gather_output: return `[N, out, H', W']` on every rank instead of this rank's channels.
        init_method: fills the whole weight `[out, in/groups, kh, kw]` in place; None: as `nn.Conv2d`.
        keep_master_weight: store the whole parameters as `master_weight` and `master_bias`.
        partition_pad: add channels of zeros until tp divides the output channels. A gathered output has none of them.
        reduce_dtype: input gradients are summed in `promote_types(dtype, reduce_dtype)`.

    Raises:
        ValueError: tp does not divide `out_channels`; tp neither divides `groups` nor is divided by them.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        init_method: InitMethod | None = None,
        keep_master_weight: bool = False,
        partition_pad: bool = False,
        *,
        reduce_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        size = comm.size("tp")
        if groups % size and size % groups:
            raise ValueError(
                f"OutputChannelParallelConv2d: {groups} groups do not divide the tensor parallel size {size}, and are "
                "not divided by it: choose another degree"
            )
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            0,
            dtype,
            device,
            init_method,
            keep_master_weight,
            partition_pad,
            reduce_dtype,
        )
        self.gather_output = gather_output
        self._ranks_per_group = max(1, size // groups)
        if 1 < self._ranks_per_group < size:
            for part in "/%":  # while all ranks are here
                comm.communicator(f"tp{part}{self._ranks_per_group}")

    def forward(self, in_tensor: torch.Tensor) -> torch.Tensor:
        """`[N, in, H, W] -> [N, out/tp, H', W']`, or `[N, out, H', W']` with gather_output."""
        self._check(in_tensor, self.in_channels)
        size, count = comm.size("tp"), self._ranks_per_group
        x = in_tensor
        if count > 1:  # these ranks share their input channels
            x = spmd.convert(x, "tp" if count == size else f"tp%{count}", src=I, dst=R, reduce_dtype=self.reduce_dtype)
        if count < size:
            x = spmd.convert(x, "tp" if count == 1 else f"tp/{count}", src=I, dst=S(1))
        out = self._conv(x, self.bias, max(1, self.groups // size))
        if not self.gather_output or size == 1:
            return out
        out = spmd.all_gather(out, "tp", src=S(1), dst=I)
        return out.narrow(1, 0, self.out_channels - self.partition_pad_size) if self.partition_pad_size else out


class InputChannelParallelConv2d(BaseParallelConv):
    """`nn.Conv2d` sharded over its input channels: `[N, in/tp, H, W] -> [N, out, H', W']`.

    Args:
        input_is_parallel: the input is this rank's channels `[N, in/tp, H, W]`; otherwise it is whole and is split
            here.
        partition_pad: add channels of zeros until tp divides the input channels; an input that is not parallel has none
            of them.
        reduce_dtype: outputs are summed in `promote_types(dtype, reduce_dtype)`.
        (others as in OutputChannelParallelConv2d)

    Raises:
        ValueError: tp does not divide the input channels (of each group); `input_is_parallel` with groups, each of
            which is divided: the output of another layer is not divided so.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        init_method: InitMethod | None = None,
        keep_master_weight: bool = False,
        partition_pad: bool = False,
        *,
        reduce_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        if input_is_parallel and groups > 1:
            raise ValueError(
                f"InputChannelParallelConv2d: input_is_parallel=True is not possible with groups={groups}; pass the "
                "whole input, or use OutputChannelParallelConv2d, which divides the groups"
            )
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            1,
            dtype,
            device,
            init_method,
            keep_master_weight,
            partition_pad,
            reduce_dtype,
        )
        self.input_is_parallel = input_is_parallel

    def forward(self, in_tensor: torch.Tensor) -> torch.Tensor:
        """`[N, in/tp, H, W]` (or `[N, in, H, W]`) `-> [N, out, H', W']`."""
        x, size = in_tensor, comm.size("tp")
        self._check(
            x, self.channels_per_partition if self.input_is_parallel else self.in_channels - self.partition_pad_size
        )
        if not self.input_is_parallel and size > 1:
            if self.partition_pad_size:
                x = F.pad(x, (0, 0, 0, 0, 0, self.partition_pad_size))
            if self.groups > 1:  # of each group its part
                x = spmd.convert(x.unflatten(1, (self.groups, -1)), "tp", src=I, dst=S(2)).flatten(1, 2)
            else:
                x = spmd.convert(x, "tp", src=I, dst=S(1))
        if size == 1:
            return self._conv(x, self.bias, self.groups)
        out = spmd.all_reduce(
            self._conv(x, None, self.groups), "tp", src=P, dst=I, reduce_dtype=self.reduce_dtype, inplace=True
        )
        return out if self.bias is None else out + self.bias[:, None, None]
