"""`Cluster.measure` on ranks as threads, and statistics of predictions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.planner import measure
from neuronx_dist.planner.calibration import calibrated, mape, rank_correlation, regret
from neuronx_dist.planner.candidate import Candidate
from neuronx_dist.planner.cluster import Cluster, Link, measured_links
from neuronx_dist.planner.presets import hops
from neuronx_dist.planner.seconds import layer_seconds
from neuronx_dist.planner.workload import workload_of
from neuronx_dist.planning.layout import Layout


def test_all_ranks_measure_the_same_cluster() -> None:
    """Every rank has the slowest rank's speeds, a link for each group of the mesh, and the marks of this machine."""
    with mock.patch.dict(measure.SIZES, cpu=(16, 32)):
        clusters = comm.threads.run(Mesh(4, tp=2), partial(Cluster.measure, seconds=0.02))
    cluster = clusters[0]
    assert all(other == cluster for other in clusters)
    assert cluster.devices == cluster.devices_per_host == 4
    # tp: neighbours; dp: two apart; one link if they are equally fast
    assert [link.span for link in cluster.links] in ([2, 4], [4])
    assert all(len(link.between) == 5 and min(link.between.values()) >= 0 for link in cluster.links)
    assert set(cluster.flops) == {"float32", "float64"}
    assert all(cluster.flops[dtype] <= cluster.peak[dtype] for dtype in cluster.flops)
    assert cluster.fingerprint["torch"] == torch.__version__ and cluster.fingerprint["ranks"] == "4"


class LaunchedDevice:
    """A clock of a host that launches kernels in 8 us, and of a device that runs them; a wait takes 20 us more."""

    def __init__(self) -> None:
        self.now = self.idle_at = 0.0

    def kernel(self, seconds: float) -> None:
        self.now += 8e-6
        self.idle_at = max(self.now, self.idle_at) + seconds

    def wait(self, _: str) -> None:
        self.now = max(self.now, self.idle_at) + 20e-6


def test_a_host_that_launches_ahead_does_not_count() -> None:
    """A kernel of 10 us takes 10, not 38; a collective of 5 us takes no longer between products."""
    clock = LaunchedDevice()
    patches: dict[str, Any] = {
        "synchronize": clock.wait,
        "has_streams": lambda _: True,
        "comm": mock.Mock(gather_objects=lambda x: [x]),
    }
    patches["time"] = mock.Mock(perf_counter=lambda: clock.now)
    patches["_collective"] = lambda kind, axis, size, nbytes, _: partial(
        clock.kernel, 5e-6 * hops(kind, size, 1, size) + (1 + (kind == "all_reduce")) * nbytes * 7 / 8 / 300e9
    )
    patches["_message"] = lambda axis, size, nbytes, _: partial(clock.kernel, 4e-6 + nbytes / 300e9)
    with mock.patch.multiple(measure, **patches), mock.patch.object(torch, "mm", lambda *_, **__: clock.kernel(2e-4)):
        assert measure._seconds(partial(clock.kernel, 10e-6), torch.device("meta"), 0.1) == pytest.approx(
            10e-6, rel=0.03
        )
        group = measure._measure_group("tp", 8, 1, torch.device("meta"), 1.0)
    assert group.bandwidth == pytest.approx(300e9, rel=0.01)
    assert group.latency == pytest.approx(5e-6, rel=0.02) and group.in_step < 1e-7
    assert group.between.pop("send") == pytest.approx(4e-6, rel=0.02)
    assert len(group.between) == 4 and list(group.between.values()) == pytest.approx([5e-6] * 4, rel=0.05)


def test_groups_of_a_host_that_are_equally_fast_have_one_link() -> None:
    """Links that differ by a factor of 2 or more, and links between hosts, stay apart."""
    near, like, slow = Link(2, 8e9, 1e-4, 1e-4), Link(4, 2e9 * 2, 2e-4, 1e-4), Link(8, 1e9, 2e-4, 1e-4)
    merged = measured_links([near, like, slow], per_host=4)
    assert [link.span for link in merged] == [4, 8]
    assert merged[0].bandwidth == pytest.approx((8e9 * 4e9) ** 0.5) and merged[1] == slow
    assert measured_links([near, replace(like, bandwidth=3e9)], per_host=4) == [near, replace(like, bandwidth=3e9)]


def test_calls_of_the_measured_layer_are_those_that_a_prediction_counts() -> None:
    """With products, memory and attention of no seconds, a layer takes `launch` times its calls."""
    workload = workload_of("llama-1b")
    fast = Cluster("calls", 1, 1, 1e18, {"float32": 1e60}, {"float32": 1e60}, 1e60, 1.0, (Link(1, 1e60, 0.0),))
    sizes = Candidate(Layout(world_size=1, global_batch=1, seq_len=2, dtype="float32")).sizes
    layer = layer_seconds(workload, workload.blocks[0], sizes, fast, "", compiled=False)
    assert sum(layer.tasks) == pytest.approx(measure.LAYER_CALLS + 0.5)  # attention's backward counts as 2.5


def test_a_process_alone_measures_its_device() -> None:
    with mock.patch.dict(measure.SIZES, cpu=(16, 32)):
        cluster = Cluster.measure("here", seconds=0.02)
    assert (cluster.name, cluster.devices) == ("here", 1)
    assert cluster.of(2).collective("all_reduce", 1024, 2) > 0


def test_statistics_equal_values_by_hand() -> None:
    assert mape([1.1, 1.8], [1.0, 2.0]) == pytest.approx(0.1)
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert rank_correlation([1, 2, 3, 4], [40, 30, 20, 10]) == -1
    # d = (1, 1, 0, 0): 1 - 6 * 2 / (4 * 15)
    assert rank_correlation([2, 1, 3, 4], [10, 20, 30, 40]) == pytest.approx(0.8)
    # ranks 0, 1.5, 1.5, 3 and 0..3: covariance 4.5, variances 4.5 and 5
    assert rank_correlation([1, 2, 2, 3], [10, 20, 30, 40]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert regret([3, 1, 2], [5.0, 6.0, 4.0]) == pytest.approx(0.5)
    assert regret([3, 1, 2], [7.0, 4.0, 5.0]) == 0


def test_calibration_finds_the_speeds_that_made_the_steps() -> None:
    """Steps of a machine with other speeds correct a preset, and predict held-out steps; the peak bounds products."""

    def predict(cluster: Cluster, case: tuple[float, float, int]) -> float:
        flops, nbytes, size = case
        return flops / cluster.flops["float32"] + cluster.collective("all_reduce", nbytes, size)

    preset = Cluster.preset("cpu", devices=4)
    link = replace(preset.links[0], bandwidth=0.9e9, latency=300e-6, in_step=1000e-6)
    real = replace(preset, flops={**preset.flops, "float32": 80e9}, links=(link,))
    cases = [(flops, nbytes, size) for flops in (1e8, 1e9, 1e10) for nbytes in (1e4, 1e6, 1e7) for size in (1, 2, 4)]
    observed = [(case, predict(real, case)) for case in cases]
    fitted = calibrated(preset, predict, observed[::2])
    held_out = [entry for number, entry in enumerate(observed) if number % 2]
    errors = [predict(fitted, case) / seconds - 1 for case, seconds in held_out]
    assert max(map(abs, errors)) < 0.02
    assert fitted.flops["float32"] == pytest.approx(80e9, rel=0.02)
    assert fitted.launch == preset.launch  # no step shows it
    faster = calibrated(preset, predict, [(case, seconds / 4) for case, seconds in observed])
    assert faster.flops["float32"] == preset.peak["float32"]
