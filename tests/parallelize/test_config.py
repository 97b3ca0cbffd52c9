"""Sizes of a job, its mesh, and what is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from types import SimpleNamespace

import pytest

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallelize.config import BroadcastGenFilesStrategy, ComputeConfig, Pipeline, ReuseType


def test_defaults_are_the_guides():
    defaults = {entry.name: getattr(ComputeConfig(2, 4), entry.name) for entry in fields(ComputeConfig)}
    assert defaults == {
        "plan_ngpus": 2,
        "runtime_ngpus": 4,
        "constant_folding": False,
        "trace_strategy": "cuda_run_cpu_offload",
        "use_zero": False,
        "zero_ngroups": 1,
        "zero_use_reduce_scatter": False,
        "inference_only": False,
        "use_end2end": False,
        "use_async_reducer": False,
        "reducer_bucket_cap_mb": None,
        "pas_config": {},
        "user_config": {},
    }
    with pytest.raises(FrozenInstanceError):
        ComputeConfig(2, 4).plan_ngpus = 1


def test_the_job_is_the_mesh_the_environment_or_one_unit(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ComputeConfig(2).runtime_ngpus == 2
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert ComputeConfig(2).runtime_ngpus == 6
    with comm.as_rank(Mesh(8), 0):
        assert ComputeConfig(2).runtime_ngpus == 8


@pytest.mark.parametrize("stages, units", [(1, 1), (1, 3), (2, 2), (2, 3), (4, 2), (4, 1)])
def test_the_ranks_of_a_unit_are_adjacent(stages, units):
    config = ComputeConfig(4, 4 * units)
    mesh = config.mesh(stages)
    for rank in range(mesh.world_size):
        at = mesh.coordinates(rank)
        assert at["dp"] == rank // 4
        assert at["pp"] * mesh.tp + at["tp"] == rank % 4
        assert [*mesh.group_of("dp", rank)] == [*range(rank % 4, 4 * units, 4)]
    if stages == 1:
        assert mesh == Mesh(4 * units, tp=4)


def test_the_first_ranks_hold_everything_once():
    assert (ComputeConfig(2, 8).module_dedup_group_size, ComputeConfig(2, 8).optimizer_dedup_group_size) == (2, 2)
    assert ComputeConfig(2, 8, use_zero=True).optimizer_dedup_group_size == 8
    assert ComputeConfig(2, 8, use_zero=True, zero_ngroups=2).optimizer_dedup_group_size == 4
    assert ComputeConfig(2, 8, zero_ngroups=4).zero_ngroups == 1  # without ZeRO there are none


def test_groups_of_zero_and_of_synchronisation():
    config = ComputeConfig(2, 8, use_zero=True, zero_ngroups=2)
    assert config.zero_groups(config.mesh()) == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert ComputeConfig(2, 8, use_zero=True).zero_groups(config.mesh()) is None
    with comm.as_rank(config.mesh(), 3):
        ranks, group = config.get_sync_group()
    assert ranks == [1, 3, 5, 7] == [*group.ranks]


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ((3, 8), ["runtime_ngpus=8", "plan_ngpus=3", "6 and 9", "2 and 4"]),
        ((4, 2), ["runtime_ngpus=2", "plan_ngpus=4", "are 4", "plan_ngpus 2"]),
        ((0, 8), ["plan_ngpus", "0"]),
        ((2, -2), ["runtime_ngpus", "-2"]),
        ((2, 12, dict(use_zero=True, zero_ngroups=4)), ["zero_ngroups=4", "6 units", "3 and 6"]),
        ((2, 4, dict(use_zero=3)), ["use_zero=3", "stage 1"]),
        ((2, 4, dict(use_async_reducer=True)), ["use_async_reducer", "use_end2end"]),
        ((2, 4, dict(trace_strategy="gpu")), ["'gpu'", "'meta'"]),
        ((2, 4, dict(reducer_bucket_cap_mb=-1)), ["reducer_bucket_cap_mb", "-1"]),
        ((2, 4, dict(pas_config=["seed"])), ["pas_config", "['seed']"]),
        ((2, 4, dict(user_config={1: 2})), ["user_config", "{1: 2}"]),
        ((2, 4, dict(pas_config={"pipeline_nmicros": "4"})), ["pas_config['pipeline_nmicros']", "'4'"]),
        ((2, 4, dict(pas_config={"pipeline_scheduler": "chimera"})), ["'chimera'", "'chimera_direct'"]),
    ],
)
def test_what_does_not_fit_is_refused(arguments, parts):
    options = arguments[2] if len(arguments) > 2 else {}
    with pytest.raises((ValueError, TypeError)) as error:
        ComputeConfig(*arguments[:2], **options)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_a_schedule_is_set_on_the_graph():
    config, graph = ComputeConfig(4, 8, use_end2end=True), SimpleNamespace()
    assert config.apply_pipeline_scheduler(graph, 2, 8, "1f1b") is graph
    assert graph.pipeline == Pipeline(2, 8, "1f1b")
    config.apply_pipeline_scheduler(graph, 8, 8, "1f1b_interleaved")
    assert graph.pipeline == Pipeline(8, 8, "interleaved")
    for name in ("1f1b_plus", "chimera_direct", "interleaved"):  # the last one is this package's, as in a plan's file
        config.apply_pipeline_scheduler(graph, 4, 8, name)
        assert graph.pipeline == Pipeline(4, 8, name.removesuffix("_plus"))
    ComputeConfig(4, 8, use_end2end=True, inference_only=True).apply_pipeline_scheduler(graph, 2, 8, "infer_pipe")
    assert graph.pipeline == Pipeline(2, 8, "1f1b")
    with pytest.raises(ValueError, match="'infer_pipe' has no backwards: pass ComputeConfig.inference_only=True."):
        config.apply_pipeline_scheduler(graph, 2, 8, "infer_pipe")
    with pytest.raises(ValueError, match="3 pipeline stages do not divide plan_ngpus=4; .* 2 and 4"):
        config.apply_pipeline_scheduler(graph, 3, 8, "gpipe")
    with pytest.raises(ValueError, match="use_end2end=True"):
        ComputeConfig(4, 8).apply_pipeline_scheduler(graph, 2, 8, "1f1b")


def test_options_are_given_by_member_or_name():
    assert ReuseType.of("MOO") is ReuseType.of(ReuseType.MOO) is ReuseType.MOO
    assert [member.value for member in ReuseType] == ["match", "override", "moo", "graph"]
    assert BroadcastGenFilesStrategy.of("no_weights") is BroadcastGenFilesStrategy.NO_WEIGHTS
    assert [member.value for member in BroadcastGenFilesStrategy] == ["none", "all", "no_weights", "code"]
    with pytest.raises(ValueError, match="reuse='macht' is none of .*nearest: match"):
        ReuseType.of("macht")
    with pytest.raises(ValueError, match="broadcast_strategy=3 is none of 'none', 'all'"):
        BroadcastGenFilesStrategy.of(3)
