"""`Cluster`: collectives against closed forms and NCCL's published bandwidths, files, and numbers that are refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from neuronx_dist.planner.cluster import PRESETS, Cluster, ClusterError, Link

MIB, GIB = 1 << 20, 1 << 30
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


def two_levels(devices: int = 32) -> Cluster:
    """Hosts of 8 with 100 GB/s inside and 10 GB/s a rank between them."""
    links = (Link(8, 100e9, 1e-6, 3e-6), Link(devices, 10e9, 10e-6, 20e-6))
    return Cluster("test", devices, 8, GIB, {"float32": 1e12}, {"float32": 2e12}, 1e12, 0.0, links)


def test_collectives_equal_their_closed_forms() -> None:
    cluster, size = two_levels(), 1e9
    inside = {
        "all_gather": 3 / 4 * size / 100e9 + 3 * 1e-6,
        "all_reduce": 2 * 3 / 4 * size / 100e9 + 2 * 1e-6,
        "all_to_all": 3 / 4 * size / 100e9 + 3 * 1e-6,
        "send": size / 100e9 + 1e-6,
    }
    for kind, seconds in inside.items():
        assert cluster.collective(kind, size, 4, 2, between_products=False) == pytest.approx(seconds, rel=1e-12)
    between = {
        "all_gather": 3 / 4 * size / 10e9 + 3 * 10e-6 + 20e-6,  # one rank of each host
        "all_reduce": 2 * 3 / 4 * size / 10e9 + 2 * 10e-6 + 20e-6,
        "all_to_all": 3 / 4 * size / 10e9 + 3 * 10e-6 + 20e-6,
        "send": size / 10e9 + 10e-6 + 20e-6,
    }
    for kind, seconds in between.items():
        assert cluster.collective(kind, size, 4, 8) == pytest.approx(seconds, rel=1e-12)
    ring = 28 * 1e-6 + 3 * 10e-6 + 20e-6  # of 32 ranks on 4 hosts: 31 hops, 3 between hosts
    assert cluster.collective("all_gather", size, 32) == pytest.approx(31 / 32 * size / 8 / 10e9 + ring)
    assert cluster.collective("all_gather", size, 8, 4) == pytest.approx(7 / 8 * size / 2 / 10e9 + 54e-6)  # 2 of a host
    assert cluster.collective("all_to_all", size, 32) == pytest.approx(3 / 4 * size / 10e9 + ring)
    tree = 3 * 1e-6 + 2 * 10e-6 + 20e-6  # each of 8 ranks sends an eighth of the sum of its host
    assert cluster.collective("all_reduce", size, 32) == pytest.approx(
        2 * max(31 / 32 / 100e9, 3 / 4 / 8 / 10e9) * size + tree
    )
    assert cluster.collective("all_reduce", size, 1) == 0
    between = [{"send": 2e-6, "all_reduce": 3e-6}, {"send": 5e-6, "all_reduce": 7e-6}]
    measured = replace(
        cluster, links=tuple(replace(link, between=seconds) for link, seconds in zip(cluster.links, between))
    )
    assert measured.collective("permute", size, 4, 8) == pytest.approx(size / 10e9 + 5e-6, rel=1e-12)
    assert measured.collective("all_reduce", size, 4, 8) == pytest.approx(2 * 3 / 4 * size / 10e9 + 2 * 7e-6)
    assert measured.collective("all_reduce", 0, 32) == pytest.approx(3 * 3e-6 + 2 * 7e-6)
    assert measured.collective("all_reduce", size, 32, between_products=False) == cluster.collective(
        "all_reduce", size, 32, between_products=False
    )
    assert measured.collective("all_gather", size, 32) == cluster.collective("all_gather", size, 32)


@pytest.mark.parametrize("name", PRESETS)
def test_collectives_of_presets_are_monotone(name: str) -> None:
    """More bytes, more ranks, ranks farther apart and slower links never make a collective faster."""
    devices = PRESETS[name].per_host * 16
    cluster = Cluster.preset(name, devices=devices)
    links = tuple(replace(link, bandwidth=2 * link.bandwidth, latency=link.latency / 2) for link in cluster.links)
    faster = replace(cluster, links=links, bandwidth=2 * cluster.bandwidth)
    sizes = [n for n in (2, 4, 8, 16, 32, 64) if n <= devices]
    for kind in KINDS:
        for stride in (1, 2, 8, PRESETS[name].per_host):
            fitting = [n for n in sizes if n * stride <= devices]
            seconds = [cluster.collective(kind, 64 * MIB, n, stride) for n in fitting]
            assert seconds == sorted(seconds)
            for n in fitting:
                assert cluster.collective(kind, 64 * MIB, n) <= cluster.collective(kind, 64 * MIB, n, stride)
                assert cluster.collective(kind, 2 * MIB, n, stride) < cluster.collective(kind, 4 * MIB, n, stride)
                assert faster.collective(kind, MIB, n, stride) < cluster.collective(kind, MIB, n, stride)


def test_a_preset_is_a_whole_number_of_hosts() -> None:
    assert Cluster.preset("trn2").devices == 64 and Cluster.preset("TPU-v5p", devices=2).devices_per_host == 2
    with pytest.raises(ClusterError, match="12 devices are no whole number of hosts of 8: use 8 or 16"):
        Cluster.preset("h100", devices=12)
    with pytest.raises(ClusterError, match=r"no cluster 'h10': use one of a100, .* \(nearest: h100"):
        Cluster.preset("h10")
    larger = two_levels().of(64)
    assert larger.links == (two_levels().links[0], replace(two_levels().links[1], span=64))
    assert two_levels().of(4).links == (two_levels().links[0],)


def test_a_file_returns_the_cluster(tmp_path: Path) -> None:
    cluster = replace(Cluster.preset("trn2", devices=128), fingerprint={"torch": "2.13.0"})
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster


def test_numbers_that_are_missing_negative_or_contradictory_are_refused_by_name(tmp_path: Path) -> None:
    content = {"format": "neuronx_dist.cluster", "version": 2, **asdict(two_levels())}
    link = content["links"][0]
    wrong = {
        "bandwidth is missing": {key: value for key, value in content.items() if key != "bandwidth"},
        "there is no 'band_width'; did you mean bandwidth": {**content, "band_width": 1.0},
        "links[0]: latency is missing": {**content, "links": [{"span": 8, "bandwidth": 1e9}]},
        "links[0].latency must be a number of at least 0, got -1": {**content, "links": [{**link, "latency": -1}]},
        "flops[float32] must be more than 0": {**content, "flops": {"float32": 0}},
        "flops[float32] = 3e+12 is more than peak[float32] = 2e+12": {**content, "flops": {"float32": 3e12}},
        "flops has bfloat16, peak has not": {**content, "flops": {"bfloat16": 1.0}},
        "memory must be a number of at least 0, got nan": {**content, "memory": float("nan")},
        "launch must be a number of at least 0, got '2'": {**content, "launch": "2"},
        "devices must be a positive integer, got 8.0": {**content, "devices": 8.0},
        "the outermost link joins 8 of 32 devices": {**content, "links": [link]},
        "by ascending spans, got [8, 8]": {**content, "links": [link, link]},
        "links must have at least one link": {**content, "links": []},
        "links must be a list of objects": {**content, "links": {"span": 8}},
        "links[1].bandwidth = 1e+13 is more than bandwidth = 1e+12": {
            **content,
            "links": [link, {**content["links"][1], "bandwidth": 1e13}],
        },
        "a cluster of version 7": {**content, "version": 7},
        "version 1; this package reads version 2: measure it again": {**content, "version": 1},
        'it has no "format"': {"tp": 8},
    }
    path = tmp_path / "cluster.json"
    for message, edited in wrong.items():
        path.write_text(json.dumps(edited))
        with pytest.raises(ClusterError) as error:
            Cluster.load(path)
        assert message in str(error.value) and str(path) in str(error.value)
    path.write_text("{")
    with pytest.raises(ClusterError, match="it is not JSON"):
        Cluster.load(path)


def test_groups_and_dtypes_that_the_cluster_lacks_are_refused() -> None:
    cluster = Cluster.preset("trn1", devices=64)
    with pytest.raises(ClusterError, match="a group of 8 ranks 16 apart has no place on the 64 devices of trn1"):
        cluster.collective("all_gather", 1, 8, 16)
    with pytest.raises(ClusterError, match="there is no collective 'gather': use all_gather"):
        cluster.collective("gather", 1, 8)
    with pytest.raises(
        ClusterError, match="trn1 has no flops of float8: plan with the dtype bfloat16 or float16 or float32"
    ):
        cluster.speed("float8")
    assert cluster.costs(2, 32, dtype="bfloat16").link_bandwidth == cluster.links[1].bandwidth


@pytest.mark.parametrize(
    ("between", "words"),
    [
        ({"allgather": 1e-6}, r"links\[0\].between has 'allgather', which nothing reads: use all_gather, "),
        ({"permute": 1e-6}, "'permute', which nothing reads: .*, send$"),
        (5, r"links\[0\].between must have seconds by verb"),
    ],
)
def test_seconds_between_products_that_nothing_reads_are_refused(between: Any, words: str) -> None:
    content = Cluster.preset("h100", 8).as_dict()
    content["links"][0]["between"] = between
    with pytest.raises(ClusterError, match=words):
        Cluster.of_dict(content)


def test_equal_links_have_equal_hashes() -> None:
    pairs = [("send", 1.0), ("all_reduce", 2.0)]
    one, other = Link(8, 1.0, 1.0, between=dict(pairs)), Link(8, 1.0, 1.0, between=dict(pairs[::-1]))
    assert one == other and hash(one) == hash(other)
