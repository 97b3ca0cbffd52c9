"""Index maps: the inputs that each output of a window needs, for convolutions, pooling and interpolation.

A map belongs to one dim and knows sizes only. It answers how many outputs there are, which outputs belong to the rank
that owns certain inputs (those whose centre lies in its shard), and which inputs outputs `begin` to `end` need: virtual
ones, that may lie outside of the dim, where its padding mode says what is there. `plan_windows` makes of it a plan for
all ranks. The formulas are those of torch.nn's documentation.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from ..device_mesh import with_values
from ..moves.intervals import Bounds, ExchangePlan, Run, virtual_runs

__all__ = [
    "Adaptive",
    "Edges",
    "IndexMap",
    "Interpolated",
    "Range",
    "Sliding",
    "Transposed",
    "WindowPlan",
    "needed",
    "out_bounds_of",
    "plan_edges",
    "plan_windows",
    "same_padding",
]

Range = tuple[int, int]  # begin, end


class IndexMap(Hashable, Protocol):
    """Windows of one dim.

    Attributes:
        size: number of inputs.
        padding_mode: what is outside of them.
    """

    @property
    def size(self) -> int: ...

    @property
    def padding_mode(self) -> str: ...

    @property
    def outputs(self) -> int:
        """Number of outputs."""

    def output_bound(self, bound: int) -> int:
        """Returns the first output whose centre is not before input `bound`."""

    def window(self, begin: int, end: int) -> Range:
        """Returns the inputs, virtual ones, that the outputs `begin` to `end` need; there is at least one output."""


@dataclass(frozen=True)
class Sliding:
    """Convolution, pooling, unfold: output o reads `o*stride - left + [0, dilation, .., dilation*(kernel-1)]`."""

    size: int
    kernel: int
    stride: int = 1
    left: int = 0
    right: int = 0
    dilation: int = 1
    ceil_mode: bool = False
    padding_mode: str = "zeros"

    @property
    def extent(self) -> int:
        """Inputs from the first to the last of a window."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def outputs(self) -> int:
        room = self.size + self.left + self.right - self.extent
        if room < 0 and not self.ceil_mode:
            raise ValueError(
                f"a window of {self.extent} (kernel {self.kernel}, dilation {self.dilation}) does not fit into "
                f"{self.size} inputs padded by {self.left} and {self.right}"
            )
        if not self.ceil_mode:
            return room // self.stride + 1
        count = -(-room // self.stride) + 1
        count -= (count - 1) * self.stride >= self.size + self.left  # it would begin in the right padding
        if count < 1:
            raise ValueError(f"a window of {self.extent} does not fit into {self.size} inputs")
        return count

    def output_bound(self, bound: int) -> int:
        return (2 * (bound + self.left) - self.extent + 2 * self.stride) // (2 * self.stride)

    def window(self, begin: int, end: int) -> Range:
        return begin * self.stride - self.left, (end - 1) * self.stride - self.left + self.extent

    def inside(self, outputs: Range, owned: Range) -> Range:
        """Returns the outputs that read only the inputs `owned`."""
        first = -(-(owned[0] + self.left) // self.stride)
        last = (owned[1] - self.extent + self.left) // self.stride
        begin = min(max(outputs[0], first), outputs[1])
        return begin, max(begin, min(outputs[1], last + 1))


@dataclass(frozen=True)
class Transposed:
    """Transposed convolution: input i is added to the outputs `i*stride - padding + [0, dilation, ..]`."""

    size: int
    kernel: int
    stride: int = 1
    padding: int = 0
    output_padding: int = 0
    dilation: int = 1

    padding_mode = "zeros"

    @property
    def extent(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    @property
    def outputs(self) -> int:
        return (self.size - 1) * self.stride - 2 * self.padding + self.extent + self.output_padding

    def output_bound(self, bound: int) -> int:
        return bound * self.stride - self.padding + (self.extent - self.stride) // 2

    def window(self, begin: int, end: int) -> Range:
        low = max(0, -(-(begin + self.padding - self.extent + 1) // self.stride))
        high = min(self.size, (end - 1 + self.padding) // self.stride + 1)
        return low, max(low, high)


@dataclass(frozen=True)
class Adaptive:
    """Adaptive pooling: output o reads `floor(o*size/outputs)` up to `ceil((o+1)*size/outputs)`."""

    size: int
    outputs: int

    padding_mode = "zeros"

    def output_bound(self, bound: int) -> int:
        return _proportional(bound, self.size, self.outputs)

    def window(self, begin: int, end: int) -> Range:
        return begin * self.size // self.outputs, -(-end * self.size // self.outputs)


@dataclass(frozen=True)
class Interpolated:
    """`torch.nn.functional.interpolate` along one dim.

    Attributes:
        mode: nearest, nearest-exact, linear or cubic.
        step: inputs for an output, `1 / scale_factor`; None: `size / outputs`.
        dtype: that torch computes positions in: float32 or float64.
        shortcuts: nearest copies or doubles inputs where there are as many outputs, or twice as many, whatever the
            step: torch's operator of two dims does (the backward of all does, even where its forward does not).
    """

    size: int
    outputs: int
    mode: str
    align_corners: bool = False
    step: float | None = None
    antialias: bool = False
    dtype: torch.dtype = torch.float64
    shortcuts: bool = False

    padding_mode = "zeros"

    def output_bound(self, bound: int) -> int:
        return _proportional(bound, self.size, self.outputs)

    def window(self, begin: int, end: int) -> Range:
        with with_values():  # a report or a check may play the job on shapes alone
            indices, weights = self.taps
            used = indices[begin:end][weights[begin:end] != 0]
            return (int(used.min()), int(used.max()) + 1) if used.numel() else (0, 0)

    @property
    def taps(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs of each output, and their weights; `[outputs, taps]`, int64 and `dtype`, with values."""
        with with_values():
            return _taps(self)


def _proportional(bound: int, size: int, outputs: int) -> int:
    return (2 * bound * outputs + size) // (2 * size) if size else 0


@lru_cache(maxsize=256)
def _taps(windows: Interpolated) -> tuple[torch.Tensor, torch.Tensor]:
    size, outputs, dtype = windows.size, windows.outputs, windows.dtype
    nearest = windows.mode.startswith("nearest")
    dtype = torch.float32 if nearest else dtype
    o = torch.arange(outputs, dtype=dtype)
    if windows.align_corners and not nearest:
        step = torch.tensor(0.0, dtype=dtype) if outputs <= 1 else torch.tensor(size - 1, dtype=dtype) / (outputs - 1)
    elif windows.step is not None:
        step = torch.tensor(windows.step, dtype=torch.float64).to(dtype)
    else:
        step = torch.tensor(size, dtype=dtype) / outputs
    if nearest:
        if windows.mode == "nearest-exact":
            indices = torch.floor((o + 0.5) * step)
        elif windows.shortcuts and outputs in (size, 2 * size):
            indices = torch.arange(outputs) // (outputs // max(1, size))
        else:
            indices = torch.floor(o * step)
        return indices.long().clamp(max=size - 1)[:, None], torch.ones(outputs, 1, dtype=windows.dtype)
    if windows.antialias:
        return _antialiased(o, step, size, windows.mode)
    position = step * o if windows.align_corners else step * (o + 0.5) - 0.5
    if windows.mode == "linear":
        position = position.clamp(min=0)
    below = torch.floor(position)
    if windows.mode == "linear":
        below = below.clamp(max=size - 1)
    t = (position - below).clamp(0, 1)
    if windows.mode == "linear":
        offsets, weights = torch.arange(2), torch.stack([1 - t, t], 1)
    else:
        offsets = torch.arange(-1, 3)
        weights = _cubic((t[:, None] - offsets.to(dtype)).abs(), -0.75)
    return (below.long()[:, None] + offsets).clamp(0, size - 1), weights


def _cubic(x: torch.Tensor, a: float) -> torch.Tensor:
    """Keys' cubic convolution kernel (IEEE ASSP 29, 1981) at distances `x`."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def _antialiased(o: torch.Tensor, step: torch.Tensor, size: int, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    support = (1.0 if mode == "linear" else 2.0) * step.clamp(min=1)
    centre = step * (o + 0.5)
    low = (centre - support + 0.5).long().clamp(min=0)
    high = (centre + support + 0.5).long().clamp(max=size)
    offsets = torch.arange(int((high - low).max()) if len(o) else 0)
    indices = low[:, None] + offsets
    x = ((indices - centre[:, None] + 0.5) / step.clamp(min=1)).abs()
    weights = (1 - x).clamp(min=0) if mode == "linear" else _cubic(x, -0.5)
    weights = torch.where(indices < high[:, None], weights, torch.zeros_like(weights))
    return indices.clamp(max=size - 1), weights / weights.sum(1, keepdim=True)


def same_padding(kernel: int, dilation: int) -> tuple[int, int]:
    """Left and right padding of `padding="same"`."""
    total = dilation * (kernel - 1)
    return total // 2, total - total // 2


class WindowPlan(NamedTuple):
    """A map's windows on all ranks.

    Attributes:
        plan: brings each rank its window of the input.
        out_bounds: who owns which outputs.
        windows: for each rank the inputs, virtual ones, that its outputs need; `(0, 0)` for no outputs.
    """

    plan: ExchangePlan
    out_bounds: Bounds
    windows: tuple[Range, ...]

    def outputs(self, rank: int) -> Range:
        return self.out_bounds[rank], self.out_bounds[rank + 1]


@lru_cache(maxsize=4096)
def plan_windows(windows: IndexMap, bounds: Bounds) -> WindowPlan:
    """Returns the plan for a dim that is sharded by `bounds`.

    Raises:
        ValueError: the bounds are of another size than the map; a window does not fit, or reflects past the dim.
    """
    out_bounds = out_bounds_of(windows, bounds)
    ranges, needs = needed(windows, tuple(pairwise(out_bounds)))
    return WindowPlan(ExchangePlan(bounds, needs), out_bounds, ranges)


def needed(windows: IndexMap, outputs: Sequence[Range]) -> tuple[tuple[Range, ...], list[tuple[Run, ...]]]:
    """Returns the inputs that each rank's outputs need (virtual ones, padding included), and their runs."""
    ranges = tuple(windows.window(low, high) if low < high else (0, 0) for low, high in outputs)
    return ranges, [virtual_runs(low, high, windows.size, windows.padding_mode) for low, high in ranges]


def out_bounds_of(windows: IndexMap, bounds: Bounds) -> Bounds:
    """Returns the bounds of the outputs that each rank owns.

    They are those around its inputs. Where padding alone adds more than an equal share of the outputs (modes of a
    Fourier transform, padded to a field), all ranks have equal shares: else one rank would hold most of the result.

    Raises:
        ValueError: the bounds are of another size than the map.
    """
    if bounds[-1] != windows.size:
        raise ValueError(f"shards with a total of {bounds[-1]} positions do not match windows over {windows.size}")
    outputs, ranks = windows.outputs, len(bounds) - 1
    if isinstance(windows, Sliding) and windows.extent == windows.stride == 1 and windows.padding_mode == "zeros":
        share = -(-outputs // ranks)
        if min(windows.left, windows.right) >= 0 and windows.left + windows.right > share:
            return tuple(min(rank * share, outputs) for rank in range(ranks + 1))

    def owned(bound: int) -> int:
        if bound == 0 or bound == windows.size:
            return outputs if bound else 0
        return min(max(windows.output_bound(bound), 0), outputs)

    return (*map(owned, bounds[:-1]), outputs)


class Edges(NamedTuple):
    """A plan of the windows that reach out of a rank's inputs; the outputs between them need no exchange.

    Attributes:
        plan: brings each rank its left window and, after it, its right one; or all in the left one.
        inner: for each rank the outputs that its own inputs suffice for.
        left: for each rank the length of its left window.
    """

    plan: ExchangePlan
    inner: tuple[Range, ...]
    left: tuple[int, ...]


@lru_cache(maxsize=4096)
def plan_edges(windows: Sliding, bounds: Bounds) -> Edges:
    """Returns the plan of `plan_windows` without the rows that no window at an edge needs."""
    whole = plan_windows(windows, bounds)
    needs, inner, left = [], [], []
    for (begin, end), owned in zip(pairwise(whole.out_bounds), pairwise(bounds)):
        low, high = windows.inside((begin, end), owned)
        if low == high:
            low = high = end
        sides = [windows.window(*side) for side in ((begin, low), (high, end)) if side[0] < side[1]]
        needs.append([run for side in sides for run in virtual_runs(*side, windows.size, windows.padding_mode)])
        inner.append((low, high))
        left.append(sides[0][1] - sides[0][0] if begin < low else 0)
    return Edges(ExchangePlan(bounds, needs), tuple(inner), tuple(left))
