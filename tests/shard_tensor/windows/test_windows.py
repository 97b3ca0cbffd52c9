"""Every window of torch.nn on shards of any sizes, forward and backward, against torch in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor.moves.intervals import PADDING_MODES
from neuronx_dist.shard_tensor.windows import convolution, pooling, resample
from neuronx_dist.shard_tensor.windows.chains import plan_chain
from neuronx_dist.shard_tensor.windows.index_maps import Sliding
from neuronx_dist.shard_tensor.windows.local_windows import ShardedDim, chained, set_interior_threshold
from tests.shard_tensor.sharding import assert_like_one_process, own_part, split_of

pytestmark = pytest.mark.slow

FULL = os.environ.get("NXD_FULL") == "1"
EXAMPLES = 350 if FULL else 50  # of each of eight properties: 2,800, or 400
given_cases = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=not FULL, suppress_health_check=[HealthCheck.filter_too_much]
)


@st.composite
def shards(draw: st.DrawFn, count: int = 1, most: int = 14) -> tuple[torch.Tensor, tuple[ShardedDim, ...], Mesh]:
    """`[2, 2, n, 5]` or, for one dim, `[2, 2, n]`, with dim 2 in 2 to 4 shards of any sizes."""
    n, ranks = draw(st.integers(1, most)), draw(st.integers(2, 4))
    cuts = draw(st.lists(st.floats(0, 1), min_size=ranks - 1, max_size=ranks - 1))
    shape = (2, 2, n) if count == 1 else (2, 2, n, 5)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    return x, (ShardedDim(2, split_of(n, cuts), "tp"),), Mesh(ranks, tp=ranks)


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def refused_by_torch(call: Any) -> bool:
    try:
        call()
    except (RuntimeError, ValueError):
        return True
    return False


@pytest.fixture(params=["whole", "interiors first"], scope="module")
def interiors(request: pytest.FixtureRequest) -> Iterator[None]:
    previous = set_interior_threshold(None if request.param == "whole" else 24)  # some ranks, others not
    yield
    set_interior_threshold(previous)


@pytest.mark.usefixtures("interiors")
@given_cases
@given(
    shards(), st.integers(1, 5), st.integers(1, 4), st.integers(0, 4), st.integers(1, 3), st.sampled_from(PADDING_MODES)
)
def test_convolutions(case: Any, kernel: int, stride: int, padding: int, dilation: int, mode: str) -> None:
    x, sharded, mesh = case
    w, b = weight(4, 1, kernel), weight(4)
    options: dict[str, Any] = dict(stride=stride, dilation=dilation, groups=2)

    def whole(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if mode == "zeros":
            return F.conv1d(x, w, b, padding=padding, **options)
        return F.conv1d(F.pad(x, (padding, padding), mode=mode), w, b, **options)

    assume(not refused_by_torch(lambda: whole(x, w, b)))

    def local(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, sharded: Any) -> Any:
        return convolution.conv(x, w, b, sharded, padding=padding, padding_mode=mode, **options)

    assert_like_one_process(whole, local, x, [w, b], sharded, mesh)


@given_cases
@given(shards(count=2), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.integers(1, 3))
def test_transposed_convolutions(
    case: Any, kernel: int, stride: int, padding: int, output_padding: int, dilation: int
) -> None:
    x, sharded, mesh = case
    w, b = weight(2, 2, kernel, 2), weight(4)
    options: dict[str, Any] = dict(
        stride=(stride, 2), padding=(padding, 1), output_padding=(output_padding, 1), dilation=(dilation, 1), groups=2
    )
    assume(not refused_by_torch(lambda: F.conv_transpose2d(x, w, b, **options)))

    def local(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, sharded: Any) -> Any:
        return convolution.conv_transpose(x, w, b, sharded, **options)

    assert_like_one_process(lambda x, w, b: F.conv_transpose2d(x, w, b, **options), local, x, [w, b], sharded, mesh)


@given_cases
@given(shards(count=2), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2), st.integers(1, 3), st.booleans())
def test_max_pooling_with_positions(
    case: Any, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> None:
    x, sharded, mesh = case
    options: dict[str, Any] = dict(
        stride=(stride, 2), padding=(padding, 1), dilation=(dilation, 1), ceil_mode=ceil_mode
    )
    assume(not refused_by_torch(lambda: F.max_pool2d(x, (kernel, 3), **options)))
    # Of a dilated window of nothing but padding torch 2.13 says that its maximum is outside, and aborts in backward.
    places = F.max_pool2d(x, (kernel, 3), return_indices=True, **options)[1]
    assume(places.min() >= 0 and places.max() < x[0, 0].numel())
    assert_like_one_process(
        lambda x: F.max_pool2d(x, (kernel, 3), return_indices=True, **options),
        lambda x, sharded: pooling.max_pool(x, (kernel, 3), sharded, **options),
        x, [], sharded, mesh,
    )  # fmt: skip


@given_cases
@given(
    shards(count=2), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2), st.booleans(), st.booleans(),
    st.sampled_from([None, 3, -2]),
)  # fmt: skip
def test_average_pooling(
    case: Any, kernel: int, stride: int, padding: int, ceil_mode: bool, include: bool, divisor: int | None
) -> None:
    x, sharded, mesh = case
    options: dict[str, Any] = dict(
        stride=(stride, 2), padding=(padding, 1), ceil_mode=ceil_mode, count_include_pad=include
    )
    assume(not refused_by_torch(lambda: F.avg_pool2d(x, (kernel, 2), **options)))
    options["divisor_override"] = divisor
    assert_like_one_process(
        lambda x: F.avg_pool2d(x, (kernel, 2), **options),
        lambda x, sharded: pooling.avg_pool(x, (kernel, 2), sharded, **options),
        x, [], sharded, mesh,
    )  # fmt: skip


@given_cases
@given(shards(count=2), st.integers(1, 9), st.booleans())
def test_adaptive_pooling(case: Any, outputs: int, is_max: bool) -> None:
    x, sharded, mesh = case
    if is_max:
        assert_like_one_process(
            lambda x: F.adaptive_max_pool2d(x, (outputs, 2), return_indices=True),
            lambda x, sharded: pooling.adaptive_max_pool(x, (outputs, 2), sharded),
            x, [], sharded, mesh,
        )  # fmt: skip
    else:
        assert_like_one_process(
            lambda x: F.adaptive_avg_pool2d(x, (outputs, None)),
            lambda x, sharded: pooling.adaptive_avg_pool(x, (outputs, None), sharded),
            x, [], sharded, mesh,
        )  # fmt: skip


@st.composite
def interpolations(draw: st.DrawFn) -> dict[str, Any]:
    mode = draw(st.sampled_from(["nearest", "nearest-exact", "bilinear", "bicubic", "area"]))
    options: dict[str, Any] = dict(mode=mode)
    if draw(st.booleans()):
        options["size"] = (draw(st.integers(1, 30)), draw(st.sampled_from([5, 7])))
    else:
        options["scale_factor"] = (draw(st.floats(0.3, 3.1)), draw(st.sampled_from([1.0, 1.7])))
        options["recompute_scale_factor"] = draw(st.sampled_from([None, True]))
    if mode in ("bilinear", "bicubic"):
        options["align_corners"] = draw(st.booleans())
        options["antialias"] = draw(st.booleans())
    return options


def test_a_window_of_nothing_but_minus_infinity_has_the_position_that_torch_gives() -> None:
    x = torch.full((1, 1, 9), -torch.inf, dtype=torch.float64)
    for dilation in (1, 2):
        options: dict[str, Any] = dict(stride=2, padding=1, dilation=dilation)
        _, expected = F.max_pool1d(x, 3, return_indices=True, **options)

        def rank_main(options: dict[str, Any] = options, expected: torch.Tensor = expected) -> None:
            sharded = (ShardedDim(2, (0, 4, 9), "tp"),)
            _, positions, shards = pooling.max_pool(own_part(x, sharded), (3,), sharded, **options)
            assert torch.equal(positions, own_part(expected, shards))

        threads.run(Mesh(2, tp=2), rank_main, timeout=60.0)


@pytest.mark.parametrize("factor, mode", [(2.05, "nearest"), (2.05, "nearest-exact"), (1.04, "nearest")])
def test_scale_factors_near_those_that_torch_shortcuts(factor: float, mode: str) -> None:
    """In two dims. In one and three torch takes none forward, and takes it backward: that is no adjoint."""
    sharded, mesh = (ShardedDim(2, (0, 5, 18), "tp"),), Mesh(2, tp=2)
    for shape in ((1, 1, 18), (1, 1, 18, 2), (1, 1, 18, 2, 1)):
        x = torch.randn(shape, dtype=torch.float64)
        options: dict[str, Any] = dict(scale_factor=(factor, *[1.0] * (len(shape) - 3)), mode=mode)
        if len(shape) == 4:
            assert_like_one_process(
                lambda x, options=options: F.interpolate(x, **options),
                lambda x, sharded, options=options: resample.interpolate(x, sharded, **options),
                x, [], sharded, mesh,
            )  # fmt: skip
        expected = F.interpolate(x, **options)

        def rank_main(x: torch.Tensor = x, expected: torch.Tensor = expected, options: Any = options) -> None:
            result, shards = resample.interpolate(own_part(x, sharded), sharded, **options)
            assert torch.equal(result, own_part(expected, shards))

        threads.run(mesh, rank_main, timeout=60.0)


@given_cases
@given(shards(count=2), interpolations())
def test_interpolation(case: Any, options: dict[str, Any]) -> None:
    x, sharded, mesh = case
    assume(not refused_by_torch(lambda: F.interpolate(x, **options)))
    assume(F.interpolate(x, **options).numel())  # torch gives an empty "area", and refuses its backward
    assert_like_one_process(
        lambda x: F.interpolate(x, **options),
        lambda x, sharded: resample.interpolate(x, sharded, **options),
        x, [], sharded, mesh,
    )  # fmt: skip


LAYERS = st.tuples(*[st.integers(1, most) for most in (4, 3, 3, 2)], st.sampled_from(PADDING_MODES))


@given_cases
@given(shards(), st.lists(LAYERS, min_size=1, max_size=3))
def test_consecutive_convolutions_after_one_exchange(case: Any, layers: Any) -> None:
    """Kernel, stride, padding + 1, dilation and padding mode of each."""
    x, sharded, mesh = case
    weights = [weight(2, 2, kernel) for kernel, *_ in layers]
    maps: list[Sliding] = []

    def whole(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
        maps.clear()
        for w, (kernel, stride, pad, dilation, mode) in zip(ws, layers):
            pad -= 1
            maps.append(Sliding(x.shape[-1], kernel, stride, pad, pad, dilation, padding_mode=mode))
            x = F.pad(x, (pad, pad), mode="constant" if mode == "zeros" else mode)
            x = F.conv1d(x, w, stride=stride, dilation=dilation).tanh()
        return x

    assume(not refused_by_torch(lambda: whole(x, *weights)))

    def local(x: torch.Tensor, *args: Any) -> Any:
        *ws, sharded = args

        def op(w: torch.Tensor, stride: int, dilation: int) -> Any:
            return lambda x: F.conv1d(x, w, stride=stride, dilation=dilation).tanh()

        ops = [op(w, stride, dilation) for w, (_, stride, _, dilation, _) in zip(ws, layers)]
        with comm.record() as calls:
            result, shards = chained(ops, x, sharded[0], maps, [0.0] * len(ops))
        assert [call.verb for call in calls] in ([], ["exchange"])
        return result, (shards,)

    assert_like_one_process(whole, local, x, weights, sharded, mesh)
    chain = plan_chain(tuple(maps), sharded[0].bounds)
    assert chain.redundant >= 0 and (len(maps) > 1 or chain.redundant == 0)
