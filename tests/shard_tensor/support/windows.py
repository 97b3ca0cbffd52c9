"""Convolutions, pooling, padding and interpolation: one line each, which `ops/test_spatial.py` runs at all layouts."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from tests.shard_tensor.support.cases import Case

N = 16
IMAGE = (2, 2, N, 6)
CASES = [
    Case("conv1d", F.conv1d, [(2, 3, N), (4, 3, 3), (4,)], whole=((1, 2),)),
    Case("conv1d stride 2", partial(F.conv1d, stride=2, padding=1), [(2, 3, N), (4, 3, 3), (4,)]),
    Case("conv1d without a batch", partial(F.conv1d, padding=2), [(3, N), (4, 3, 4)]),
    Case("conv2d", partial(F.conv2d, padding=1), [IMAGE, (4, 2, 3, 3), (4,)]),
    Case("conv2d same, even kernel", partial(F.conv2d, padding="same", dilation=(2, 1)), [IMAGE, (4, 2, 4, 2)]),
    Case("conv2d groups", partial(F.conv2d, groups=2, stride=(3, 2)), [IMAGE, (4, 1, 3, 3), (4,)]),
    Case("conv1d depthwise", partial(F.conv1d, groups=N, padding=1), [(2, N, 8), (N, 1, 3), (N,)]),
    Case("conv2d wide groups", partial(F.conv2d, groups=4, stride=(2, 1)), [(2, 8, N, 3), (N, 2, 3, 3), (N,)]),
    Case("conv3d", partial(F.conv3d, padding=(1, 0, 1)), [(1, 2, N, 3, 4), (2, 2, 3, 2, 3), (2,)]),
    Case("conv_transpose1d", partial(F.conv_transpose1d, stride=2, padding=1, output_padding=1),
         [(2, 3, N), (3, 4, 3), (4,)]),
    Case("conv_transpose2d groups", partial(F.conv_transpose2d, groups=2, stride=3), [IMAGE, (2, 2, 2, 2), (4,)]),
    Case("conv_transpose1d wide groups", partial(F.conv_transpose1d, groups=4, stride=2),
         [(2, N, 8), (N, 3, 3), (12,)]),
    Case("conv_transpose3d", F.conv_transpose3d, [(1, 2, N, 3, 2), (2, 2, 3, 1, 2)]),
    Case("max_pool1d", lambda x: F.max_pool1d(x, 3, 2, 1), [(2, 3, N)]),
    Case("max_pool2d with positions", lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), [IMAGE]),
    Case("max_pool3d", lambda x: F.max_pool3d(x, 2, ceil_mode=True), [(1, 2, N, 3, 4)]),
    Case("avg_pool1d", lambda x: F.avg_pool1d(x, 3, 2, 1, count_include_pad=False), [(2, 3, N)]),
    Case("avg_pool2d", lambda x: F.avg_pool2d(x, (3, 2), ceil_mode=True), [IMAGE]),
    Case("avg_pool3d", lambda x: F.avg_pool3d(x, 2, divisor_override=3), [(1, 2, N, 3, 4)]),
    Case("lp_pool1d", lambda x: F.lp_pool1d(x, 2, 3, 2, ceil_mode=True), [(2, 3, N)], positive=True),
    Case("lp_pool2d", lambda x: F.lp_pool2d(x, 3, 2), [IMAGE], positive=True),
    Case("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 5), [(2, 3, N)]),
    Case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (4, None)), [IMAGE]),
    Case("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, 1), [(1, 2, N, 3, 4)]),
    Case("adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 7), [(2, 3, N)]),
    Case("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, (5, 4), return_indices=True), [IMAGE]),
    Case("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x, 2), [(1, 2, N, 3, 4)]),
    Case("interpolate nearest", lambda x: F.interpolate(x, scale_factor=1.7), [(2, 3, N)]),
    Case("interpolate linear", lambda x: F.interpolate(x, 7, mode="linear", align_corners=True), [(2, 3, N)]),
    Case("interpolate bilinear", lambda x: F.interpolate(x, scale_factor=(2, 0.5), mode="bilinear"), [IMAGE]),
    Case("interpolate bicubic", lambda x: F.interpolate(x, (9, 9), mode="bicubic", antialias=True), [IMAGE]),
    Case("interpolate trilinear", lambda x: F.interpolate(x, (20, 3, 8), mode="trilinear"), [(1, 2, N, 3, 4)]),
    Case("interpolate area", lambda x: F.interpolate(x, (5, 3), mode="area"), [IMAGE]),
    Case("pad", lambda x: F.pad(x, (1, 2, -3, 4), value=1.5), [IMAGE]),
    Case("pad reflect", lambda x: F.pad(x, (1, 2, 3, 4), mode="reflect"), [IMAGE]),
    Case("pad replicate", lambda x: F.pad(x, (20, 5), mode="replicate"), [(2, 3, N)]),
    Case("pad circular", lambda x: F.pad(x, (3, 16), mode="circular"), [(2, 3, N)]),
    Case("Conv2d reflect", lambda x, w: REFLECTING._conv_forward(x, w, None), [IMAGE, (2, 2, 3, 3)]),
]  # fmt: skip
REFLECTING = torch.nn.Conv2d(2, 2, 3, padding=2, padding_mode="reflect", bias=False)
