"""Places of ranks: the numbers of the reference, and laws of every mesh."""

from __future__ import annotations

import itertools
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuronx_dist.mesh import DENSE_AXES, EXPERT_AXES, AxisPart, Mesh, part_of, rest_of


def test_tensor_parallel_ranks_are_neighbours_and_pipeline_ranks_far_apart():
    mesh = Mesh(16, tp=2, pp=4)
    assert mesh.dp == 2
    assert mesh.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]
    assert mesh.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert mesh.groups("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_context_ranks_lie_between_tensor_and_data():
    mesh = Mesh(16, tp=2, pp=2, cp=2)
    assert mesh.dp == 2
    assert mesh.groups("cp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert mesh.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert mesh.groups(("dp", "cp")) == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert mesh.groups(("pp", "tp")) == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]


def test_expert_view():
    mesh = Mesh(16, tp=2, pp=2, ep=2)
    assert mesh.edp == 2
    assert mesh.groups("ep") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert mesh.groups("edp") == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert mesh.groups(("edp", "ep")) == mesh.groups(("dp", "cp"))


def test_expert_data_parallel_spans_dp_and_cp_without_experts():
    mesh = Mesh(16, tp=2, cp=2)
    assert (mesh.dp, mesh.cp, mesh.edp) == (4, 2, 8)
    assert mesh.groups("edp") == mesh.groups(("dp", "cp"))


def test_the_order_of_merged_axes_is_the_order_of_the_group():
    mesh = Mesh(8, tp=2, pp=2)
    assert mesh.groups(("pp", "tp"))[0] == [0, 1, 4, 5]
    assert mesh.groups(("tp", "pp"))[0] == [0, 4, 1, 5]
    assert mesh.coordinate(("tp", "pp"), 4) == 1 and mesh.coordinate(("pp", "tp"), 4) == 2


def test_world_and_the_empty_axis():
    mesh = Mesh(4, tp=2)
    assert mesh.groups("world") == [[0, 1, 2, 3]] and mesh.size("world") == 4
    assert mesh.groups(()) == [[0], [1], [2], [3]] and mesh.size(()) == 1


def test_coordinates_by_hand():
    assert Mesh(24, tp=2, pp=3, cp=2).coordinates(13) == dict(pp=1, dp=1, cp=0, tp=1, edp=2, ep=0)


def test_mesh_is_a_value():
    assert Mesh(4, tp=2) == Mesh(4, tp=2) and hash(Mesh(4, tp=2)) == hash(Mesh(4, tp=2))
    assert Mesh(4, tp=2) != Mesh(4, pp=2)
    with pytest.raises(AttributeError):
        Mesh(4).tp = 2  # type: ignore[misc]
    assert str(Mesh(8, tp=2, pp=2)) == "Mesh(pp=2 × dp=2 × tp=2)"
    assert "cp=2" in str(Mesh(8, cp=2)) and "ep=2" in str(Mesh(8, ep=2))


meshes = st.tuples(*(st.integers(1, 4) for _ in range(5))).map(
    lambda s: Mesh(s[0] * s[1] * s[2] * s[3] * s[4], tp=s[0], pp=s[1], cp=s[2], ep=s[3] if s[4] % 2 else s[2])
)
AXES = [axis for view in (DENSE_AXES, EXPERT_AXES) for n in range(1, 4) for axis in itertools.permutations(view, n)]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(meshes, st.sampled_from([*AXES, *DENSE_AXES, *EXPERT_AXES, "world"]))
def test_groups_partition_the_world_and_agree_with_coordinates(mesh, axis):
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert {len(group) for group in groups} == {mesh.size(axis)}
    for group in groups:
        for index, rank in enumerate(group):
            assert mesh.coordinate(axis, rank) == index
            assert mesh.group_of(axis, rank) == tuple(group)
    # ranks of one group differ on the axes of the group only
    names = set(DENSE_AXES if axis == "world" else (axis,) if isinstance(axis, str) else axis)
    view = DENSE_AXES if names <= set(DENSE_AXES) else EXPERT_AXES
    for group in groups:
        assert len({tuple(mesh.coordinates(rank)[name] for name in view if name not in names) for rank in group}) == 1


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(meshes, st.data())
def test_parts_of_an_axis(mesh, data):
    """The name of a part is the coordinate along it; with the other part it is the axis."""
    axis = data.draw(st.sampled_from(list(dict.fromkeys((*DENSE_AXES, *EXPERT_AXES)))))
    count = data.draw(st.sampled_from([n for n in range(1, mesh.size(axis) + 1) if mesh.size(axis) % n == 0]))
    outer, inner = f"{axis}/{count}", f"{axis}%{count}"
    assert (mesh.size(outer), mesh.size(inner)) == (mesh.size(axis) // count, count)
    assert mesh.sizes((outer,)) == {outer: mesh.size(axis) // count}
    for rank in range(mesh.world_size):
        coordinate = mesh.coordinate(axis, rank)
        assert (mesh.coordinate(outer, rank), mesh.coordinate(inner, rank)) == divmod(coordinate, count)
        group = mesh.group_of(axis, rank)
        assert mesh.group_of(outer, rank) == group[coordinate % count :: count]
        first = coordinate // count * count
        assert mesh.group_of(inner, rank) == group[first : first + count]
    for part in (outer, inner):
        groups = mesh.groups(part)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        assert len(groups) * mesh.size(part) == mesh.world_size
        assert {*map(tuple, groups)} == {mesh.group_of(part, rank) for rank in range(mesh.world_size)}


def test_parts_with_other_axes_and_by_name():
    mesh = Mesh(16, tp=4, pp=2)
    assert mesh.groups("tp%2")[:2] == [[0, 1], [2, 3]] and mesh.groups("tp/2")[:2] == [[0, 2], [1, 3]]
    assert mesh.groups(("dp", "tp/2"))[0] == [0, 2, 4, 6] and mesh.groups(("tp%2", "dp"))[0] == [0, 4, 1, 5]
    assert part_of("tp%4") == AxisPart("tp", 1, 4) and part_of("tp/4") == AxisPart("tp", 4)
    assert part_of("tp") == AxisPart("tp") and part_of("cp/ep") == AxisPart("cp/ep")
    assert part_of("tp/4%2") == AxisPart("tp", 4, 2) and part_of("tp/4%2").cuts == (8, 4)
    split = Mesh(16, tp=4, pp=2, tp_replicas=2)
    assert split.axis_of([4, 5]) == ("tp%2",) and split.axis_of([5, 7]) == ("tp/2",) and mesh.axis_of([4, 5]) is None


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2), (2, 3, 2, 2)])
def test_parts_are_the_digits_of_a_coordinate(sizes):
    """Any parts in their order are an axis, and the others are the rest of tp."""
    count = math.prod(sizes)
    mesh = Mesh(2 * count, tp=count, tp_replicas=tuple(math.prod(sizes[n:]) for n in range(1, len(sizes))))
    parts = mesh.tp_parts
    assert tuple(mesh.sizes(parts).values()) == sizes
    for number in range(1, len(parts) + 1):
        for axis in itertools.combinations(parts, number):
            groups: dict[tuple[int, ...], list[int]] = {}
            for rank, (dp, *at) in enumerate(itertools.product(range(2), *map(range, sizes))):
                fixed = (digit for digit, part in zip(at, parts) if part not in axis)
                groups.setdefault((dp, *fixed), []).append(rank)
            assert sorted(mesh.groups(axis)) == sorted(groups.values())
            for group in groups.values():
                assert [mesh.coordinate(axis, rank) for rank in group] == [*range(len(group))]
                assert {mesh.group_of(axis, rank) for rank in group} == {tuple(group)}
                assert mesh.axis_of(group) == (axis if number < len(parts) else ("tp",))
            rest = rest_of(*axis)
            assert mesh.size(rest) * mesh.size(axis) == count
            assert not rest or mesh.size(rest_of(*((rest,) if isinstance(rest, str) else rest))) == mesh.size(axis)


@settings(max_examples=60, deadline=None)
@given(meshes, st.data())
def test_coordinates_are_the_inverse_of_the_grid(mesh, data):
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    at = mesh.coordinates(rank)
    for view in (DENSE_AXES, EXPERT_AXES):
        number = 0
        for name in view:
            assert 0 <= at[name] < mesh.size(name)
            number = number * mesh.size(name) + at[name]
        assert number == rank


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (dict(world_size=6, tp=4), ["6", "tp=4", "4", "data parallel"]),
        (dict(world_size=8, tp=2, pp=3), ["8", "pp=3", "6"]),
        (dict(world_size=8, tp=2, ep=3), ["expert data", "ep=3", "6"]),
        (dict(world_size=2, tp=3), ["2", "tp=3"]),  # nothing is clamped
        (
            dict(world_size=1, tp=2),
            ["multiple of 2 (neuronx-dist run --nproc-per-node 2 script.py), or smaller degrees"],
        ),
        (dict(world_size=4, tp=0), ["tp", "0"]),
        (dict(world_size=4, pp=-1), ["pp", "-1"]),
        (dict(world_size=4, cp=True), ["cp", "True"]),
        (dict(world_size=4, tp=2.0), ["tp", "2.0"]),
        (dict(world_size=4, tp=4, tp_replicas=3), ["tp_replicas=3", "tp=4"]),
        (dict(world_size=8, tp=8, tp_replicas=(4, 3)), ["tp_replicas=(4, 3)", "3 does not divide 4"]),
        (dict(world_size=8, tp=8, tp_replicas=(4, 0)), ["tp_replicas", "0"]),
    ],
)
def test_impossible_sizes_are_refused_with_the_numbers(arguments, parts):
    with pytest.raises(ValueError) as error:
        Mesh(**arguments)
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize("name", ["dp", "edp", "data"])
def test_a_size_that_a_mesh_does_not_have_is_refused_with_those_that_there_are(name):
    why = "is no size of a mesh" if name == "data" else "follows from the others"
    with pytest.raises(
        TypeError, match=rf"^Mesh\({name}=2\): {name} {why}; there are world_size, tp, pp, cp, ep, "
    ) as error:
        Mesh(4, **{name: 2})
    assert "dp is world_size / (tp * pp * cp)" in str(error.value)


@pytest.mark.parametrize(
    "call, parts",
    [
        (lambda mesh: mesh.groups("zz"), ["zz", "tp", "world"]),
        (lambda mesh: mesh.groups(("tp", "tp")), ["twice"]),
        (lambda mesh: mesh.groups(("tp%2", "tp")), ["twice"]),
        (lambda mesh: mesh.groups(("tp%2", "tp%1")), ["twice"]),
        (lambda mesh: mesh.groups("tp%3"), ["tp%3", "3 does not divide tp=2"]),
        (lambda mesh: mesh.groups("tp/0"), ["tp/0"]),
        (lambda mesh: mesh.groups("zz%2"), ["zz", "tp"]),
        (lambda mesh: mesh.groups(("dp", "ep")), ["mix"]),
        (lambda mesh: mesh.coordinates(4), ["4", "0..3"]),
        (lambda mesh: mesh.group_of("tp", -1), ["-1"]),
        (lambda mesh: mesh.coordinate("tp", 9), ["9"]),
    ],
)
def test_wrong_questions_are_refused(call, parts):
    with pytest.raises(ValueError) as error:
        call(Mesh(4, tp=2))
    assert all(part in str(error.value) for part in parts), str(error.value)


# --- many ranks


def test_a_mesh_of_many_ranks_costs_what_a_small_one_does():
    begin = time.process_time()
    mesh = Mesh(102_400, tp=8, pp=16)
    assert mesh.group_of("tp", 77_777) == tuple(range(77_776, 77_784)) and mesh.coordinate("dp", 77_777) == 122
    for axis in ("tp", "pp", ("dp", "cp"), "ep", "edp"):
        groups = mesh.groups(axis)
        assert 77_777 in groups.of(77_777) and len(groups) * mesh.size(axis) == 102_400
        assert groups[-1][-1] == 102_399 and groups[:2] == [groups[0], groups[1]]
    assert time.process_time() - begin < 0.02


def test_groups_are_a_sequence_that_equals_a_list():
    groups = Mesh(8, tp=2, pp=2).groups("tp")
    assert groups == [[0, 1], [2, 3], [4, 5], [6, 7]] and groups != [[0, 1]] and groups != ((0, 1),)
    assert groups != 4 and groups == Mesh(8, tp=2, pp=4).groups("tp") and groups != Mesh(8, tp=4).groups("tp")
    assert repr(groups) == "[[0, 1], [2, 3], [4, 5], [6, 7]]" and [2, 3] in groups
    assert groups[-1] == [6, 7] and groups[1:3] == [[2, 3], [4, 5]] and list(reversed(groups))[0] == [6, 7]
    with pytest.raises(IndexError):
        groups[4]


# --- names of groups, and of meshes


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(16, tp=2, pp=2, cp=2, ep=4),
        Mesh(24, tp=2, pp=3, ep=2),
        Mesh(16, tp=4, tp_replicas=2),
        Mesh(8, tp=8),
        Mesh(1),
    ],
    ids=str,
)
def test_a_group_of_ranks_is_that_of_the_first_axis_that_has_them(mesh):
    """The dense axes and what they merge to, from few to many; then the expert ones; then the parts of tp."""
    merged = [names for n in range(1, 5) for names in itertools.combinations(DENSE_AXES, n)]
    parts = [(f"tp/{mesh.tp_replicas}",), (f"tp%{mesh.tp_replicas}",)] if mesh.tp_replicas > 1 else []
    axes = [*merged, ("edp",), ("ep",), ("pp", "ep", "tp"), *parts]
    for axis in axes:
        for group in mesh.groups(axis):
            first = next(other for other in axes if any({*group} == {*ranks} for ranks in mesh.groups(other)))
            assert mesh.axis_of(group) == mesh.axis_of(group[::-1]) == first
    if mesh.world_size > 8:
        assert mesh.axis_of([0, 3]) is None and mesh.axis_of([0, 1, 2]) is None
    assert mesh.axis_of(range(mesh.world_size)) is not None


def test_a_mesh_says_its_sizes():
    for mesh, text in (
        (Mesh(1), "Mesh(pp=1 × dp=1 × tp=1)"),
        (Mesh(16, tp=2, cp=4), "Mesh(pp=1 × dp=2 × cp=4 × tp=2)"),
        (Mesh(16, tp=2, pp=2, ep=2), "Mesh(pp=2 × dp=4 × tp=2 × ep=2 × edp=2)"),
        (Mesh(4, ep=4), "Mesh(pp=1 × dp=4 × tp=1 × ep=4)"),
        (Mesh(32, tp=4, topology="trn1"), "Mesh(pp=1 × dp=8 × tp=4, trn1 order in nodes of 32)"),
        (Mesh(32, tp=16, topology="trn2", ranks_per_node=16), "Mesh(pp=1 × dp=2 × tp=16, trn2 order in nodes of 16)"),
    ):
        assert str(mesh) == text
