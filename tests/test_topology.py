"""Rank orders of devices: the groups that NeuronX Distributed has there, and that every question fits the order."""

from __future__ import annotations

import itertools

import pytest

from neuronx_dist.mesh import DENSE_AXES, EXPERT_AXES, Mesh

NODE = 64  # ranks of a trn2 node at lnc_size=2
SINGLE = "one rank each"


def rows(*numbers: int, node: int = 0, row: int = 16) -> list[int]:
    """Rows of a torus of four, as ranks."""
    return [4 * row * node + number * row + column for number in numbers for column in range(row)]


def facing(nodes: int) -> list[list[int]]:
    """Ranks of equal index in the two tp groups of each trn2 node."""
    pairs = [[i, i + 16] for i in range(16)] + [[48 + i, 32 + i] for i in range(16)]
    return [[NODE * node + a, NODE * node + b] for node in range(nodes) for a, b in pairs]


def across(*nodes: int) -> list[list[int]]:
    """Equal ranks of several nodes."""
    return [[NODE * node + i for node in nodes] for i in range(NODE)]


def halves(nodes: int) -> list[list[int]]:
    return [rows(*pair, node=node) for node in range(nodes) for pair in ((0, 3), (1, 2))]


def same(found: list[list[int]], expected: list[list[int]] | str) -> None:
    """Equal groups, each in its order; the order of the groups is no one's business."""
    if expected == SINGLE:
        expected = [[rank] for rank in range(sum(map(len, found)))]
    assert sorted(found) == sorted(expected)


def test_trn1_tensor_parallel_groups_of_four_have_a_stride():
    assert Mesh(32, tp=4, topology="trn1").groups("tp") == [[i, i + 8, i + 16, i + 24] for i in range(8)]
    mesh = Mesh(64, tp=4, topology="trn1")
    assert mesh.groups("tp")[0] == [0, 8, 16, 24] and mesh.groups("tp")[1] == [1, 9, 17, 25]
    assert mesh.groups("tp")[8] == [32, 40, 48, 56] and mesh.groups("tp")[15] == [39, 47, 55, 63]
    assert mesh.groups("dp") == [[*range(i, i + 8), *range(32 + i, 40 + i)] for i in (0, 8, 16, 24)]
    same(mesh.groups("pp"), SINGLE)
    for mesh in (Mesh(64, tp=4, pp=2, topology="trn1"), Mesh(128, tp=4, pp=2, topology="trn1")):
        assert mesh.groups("pp")[0] == [0, mesh.world_size // 2]
        assert mesh.groups("dp")[0][:8] == list(range(8))
    mesh = Mesh(64, tp=4, cp=2, topology="trn1")
    assert mesh.groups("cp")[:5] == [[0, 1], [8, 9], [16, 17], [24, 25], [2, 3]]
    assert mesh.groups("dp")[0] == [0, 2, 4, 6, 32, 34, 36, 38] and mesh.groups("dp")[4] == [1, 3, 5, 7, 33, 35, 37, 39]


@pytest.mark.parametrize("ranks, groups", [(8, [[0, 2, 4, 6], [1, 3, 5, 7]]), (12, [[0, 3, 6, 9], [1, 4, 7, 10]])])
def test_trn1_order_in_smaller_nodes(ranks, groups):
    assert Mesh(2 * ranks, tp=4, topology="trn1", ranks_per_node=ranks).groups("tp")[:2] == groups


TRN2 = {  # world, sizes -> groups
    "64 tp64": (64, dict(tp=64), dict(tp=[rows(0, 3, 1, 2)], dp=SINGLE, pp=SINGLE, cp=SINGLE)),
    "64 tp32 pp2": (64, dict(tp=32, pp=2), dict(tp=halves(1), pp=facing(1), dp=SINGLE, cp=SINGLE)),
    "128 tp32 pp2 dp2": (
        128,
        dict(tp=32, pp=2),
        dict(tp=halves(2), dp=facing(2), pp=across(0, 1), cp=SINGLE),
    ),
    "256 tp32 pp4 dp2": (
        256,
        dict(tp=32, pp=4),
        dict(tp=halves(4), dp=facing(4), pp=across(0, 1, 2, 3), cp=SINGLE),
    ),
    "128 tp32 pp2 cp2": (
        128,
        dict(tp=32, pp=2, cp=2),
        dict(tp=halves(2), cp=facing(2), pp=across(0, 1), dp=SINGLE),
    ),
    "256 tp32 pp2 dp2 cp2": (
        256,
        dict(tp=32, pp=2, cp=2),
        dict(tp=halves(4), cp=facing(4), dp=across(0, 1) + across(2, 3), pp=across(0, 2) + across(1, 3)),
    ),
}


@pytest.mark.parametrize("case", TRN2)
def test_trn2_tensor_parallel_groups_are_rows_that_touch(case):
    world, sizes, expected = TRN2[case]
    mesh = Mesh(world, **sizes, topology="trn2")
    for axis, groups in expected.items():
        same(mesh.groups(axis), groups)


def test_trn2_groups_are_not_sorted_and_a_rank_is_where_its_group_has_it():
    mesh = Mesh(64, tp=32, pp=2, topology="trn2")
    assert mesh.group_of("pp", 48) == mesh.group_of("pp", 32) == (48, 32)
    assert (mesh.coordinate("pp", 48), mesh.coordinate("pp", 32)) == (0, 1)
    assert (mesh.coordinate("tp", 48), mesh.coordinate("tp", 32)) == (16, 16)


def test_trn2_with_one_core_to_a_rank_has_rows_of_32():
    mesh = Mesh(128, tp=64, topology="trn2", ranks_per_node=128)
    assert mesh.groups("tp") == [rows(0, 3, row=32), rows(1, 2, row=32)]
    assert mesh.group_of("dp", 127) == (127, 95)


def test_expert_data_parallel_groups_hold_equal_shards_on_trn2():
    """Upstream takes them from the linear order there: [0, 32], of tp ranks 0 and 16."""
    mesh = Mesh(128, tp=32, pp=2, topology="trn2")
    assert mesh.groups("edp") == mesh.groups(("dp", "cp")) == mesh.groups("dp")
    assert mesh.group_of("edp", 32) == (48, 32)
    same(mesh.groups("ep"), SINGLE)


def test_in_units_the_ranks_of_one_replica_are_adjacent():
    mesh = Mesh(8, tp=2, pp=2, topology="units")
    assert mesh.groups(("pp", "tp")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.groups("tp") == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert mesh.groups("pp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert Mesh(8, tp=4, topology="units").groups("tp") == Mesh(8, tp=4).groups("tp")
    assert str(mesh) == "Mesh(pp=2 × dp=2 × tp=2, units order)"


MESHES = [
    Mesh(8, tp=4, topology="trn1", ranks_per_node=8),
    Mesh(8, tp=4, pp=2, topology="trn1", ranks_per_node=8),
    Mesh(64, tp=4, pp=2, cp=2, topology="trn1"),
    Mesh(24, tp=4, cp=3, topology="trn1", ranks_per_node=12),
    Mesh(4, tp=2, topology="trn2", ranks_per_node=4),
    Mesh(8, tp=4, pp=2, topology="trn2", ranks_per_node=8),
    Mesh(16, tp=8, topology="trn2", ranks_per_node=8),
    Mesh(256, tp=32, pp=2, cp=2, topology="trn2"),
    Mesh(8, tp=2, pp=2, topology="units"),
    Mesh(36, tp=2, pp=3, cp=3, topology="units"),
]
AXES = [axes for view in (DENSE_AXES, EXPERT_AXES) for n in range(5) for axes in itertools.permutations(view, n)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_groups_and_coordinates_agree(mesh):
    grid = mesh.groups(DENSE_AXES)[0]
    assert sorted(grid) == list(range(mesh.world_size)) != grid and grid[0] == 0
    at = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    for axes in [*DENSE_AXES, *EXPERT_AXES, "world", *AXES]:
        groups = mesh.groups(axes)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        names = DENSE_AXES if axes == "world" else (axes,) if isinstance(axes, str) else axes
        view = DENSE_AXES if set(names) <= set(DENSE_AXES) else EXPERT_AXES
        for group in groups:
            assert len(group) == mesh.size(axes)
            assert len({tuple(at[rank][name] for name in view if name not in names) for rank in group}) == 1
            if axes != "world":  # the axes' own order, the last fastest
                assert group == sorted(group, key=lambda rank: [at[rank][name] for name in names])
            for index, rank in enumerate(group):
                assert mesh.coordinate(axes, rank) == index
        assert mesh.group_of(axes, groups[-1][0]) == tuple(groups[-1])
    assert mesh.groups("world") == [list(range(mesh.world_size))]


def test_a_topology_is_part_of_the_value():
    mesh = Mesh(32, tp=4, topology="trn1")
    assert mesh == Mesh(32, tp=4, topology="trn1", ranks_per_node=32) != Mesh(32, tp=4)
    assert mesh != Mesh(32, tp=4, topology="trn1", ranks_per_node=16)
    assert Mesh(8, tp=4) == Mesh(8, tp=4, topology="linear") == Mesh(8, tp=4, ranks_per_node=8)  # no use for it
    assert str(mesh) == "Mesh(pp=1 × dp=8 × tp=4, trn1 order in nodes of 32)"
    assert str(Mesh(8, tp=4)) == "Mesh(pp=1 × dp=2 × tp=4)"


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (dict(world_size=8, topology="ring"), ["'ring'", "linear, units, trn1, trn2"]),
        (dict(world_size=8, topology=None), ["None", "linear, units, trn1, trn2"]),
        (dict(world_size=32, tp=8, topology="trn1"), ["'trn1'", "tp=4", "got world size 32, tp=8"]),
        (dict(world_size=32, tp=4, ep=2, topology="trn1"), ["'trn1'", "ep=1", "ep=2"]),
        (dict(world_size=16, tp=4, topology="trn1"), ["nodes of 32", "world size 16", "ranks_per_node"]),
        (dict(world_size=64, tp=16, topology="trn2"), ["'trn2'", "tp=32 or 64", "tp=16"]),
        (dict(world_size=64, tp=32, ep=2, topology="trn2"), ["'trn2'", "ep=1", "ep=2"]),
        (dict(world_size=96, tp=32, topology="trn2"), ["nodes of 64", "world size 96"]),
        (dict(world_size=12, tp=3, topology="trn2", ranks_per_node=6), ["multiple of 4", "6"]),
        (dict(world_size=12, tp=4, topology="trn1", ranks_per_node=0), ["multiple of 4", "0"]),
        (dict(world_size=8, tp=4, topology="trn1", ranks_per_node="8"), ["multiple of 4", "'8'"]),
    ],
)
def test_what_a_topology_is_not_for_is_refused(arguments, parts):
    with pytest.raises(ValueError) as error:
        Mesh(**arguments)
    assert all(part in str(error.value) for part in parts), str(error.value)
