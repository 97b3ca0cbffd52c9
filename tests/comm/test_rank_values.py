"""Rank values: what counts as looking at the rank, and what does not."""

from __future__ import annotations

import copy
import math
import operator
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from neuronx_dist import Mesh, comm
from neuronx_dist.comm.ranks.rank_numbers import concrete, is_member
from neuronx_dist.comm.ranks.rank_values import value_on
from neuronx_dist.parallel_layers import parallel_state
from tests.comm.observed_run import MESH, ObservedRun, SeesRankValues, axes_of

ORDERED = [Mesh(16, tp=4, pp=2, topology=name, ranks_per_node=8) for name in ("trn1", "trn2")]


@pytest.mark.parametrize("mesh", [MESH, Mesh(8, tp=2, ep=2), Mesh(12, tp=3, ep=2, cp=1), *ORDERED])
def test_every_way_to_ask_for_the_rank_gives_its_number_and_its_axes(mesh):
    for rank in range(mesh.world_size):
        with ObservedRun(mesh, rank) as seen:
            here = comm.current().rank
            for axis in ("tp", "pp", "dp", "cp", "ep", "edp", ("dp", "cp"), ("pp", "tp"), ("edp", "ep"), "world", ()):
                atoms = {axis} if isinstance(axis, str) else set(axis)
                if axis == "world":
                    atoms = {"pp", "dp", "cp", "tp"}
                atoms = {name for name in atoms if getattr(mesh, name) > 1}
                group = mesh.group_of(axis, rank)
                asked = [comm.rank(axis), comm.communicator(axis).rank, mesh.coordinate(axis, here)]
                for index in asked:
                    assert concrete(index) == mesh.coordinate(axis, rank) == group.index(rank)
                    assert axes_of(index) == atoms
                for ranks in (comm.communicator(axis).ranks, mesh.group_of(axis, here)):
                    assert tuple(map(concrete, ranks)) == group
                    assert not any(axes_of(r) & atoms for r in ranks)
                    assert ranks.index(here) == comm.rank(axis) and here in ranks
                    assert concrete(ranks[comm.rank(axis)]) == rank  # an index of one's own into one's own group
                assert comm.communicator(axis).size == len(group)
            for name, index in mesh.coordinates(here).items():
                assert concrete(index) == mesh.coordinates(rank)[name]
            assert concrete(comm.communicator("tp").global_rank) == rank
        assert not seen.calls


def test_the_getters_of_parallel_state():
    names = {*dir(parallel_state), *" ".join(parallel_state._LAZY.values()).split()}
    for rank in range(16):
        with comm.as_rank(MESH, rank):
            getters = [name for name in names if name.startswith("get_") and name.endswith("_rank")]
            getters = [name for name in getters if "expert_parallel_rank" not in name]
            expected = {name: getattr(parallel_state, name)() for name in getters}
        with ObservedRun(rank=rank) as seen:
            found = {name: getattr(parallel_state, name)() for name in expected}
            assert not seen.calls, seen.backend.reads
            assert {name: concrete(value) for name, value in found.items()} == expected
            assert axes_of(found["get_tensor_model_parallel_rank"]) == {"tp"}
            assert axes_of(found["get_tensor_model_parallel_src_rank"]) == {"pp", "dp", "cp"}
            assert axes_of(found["get_pipeline_model_parallel_next_rank"]) == {"pp", "dp", "cp", "tp"}
            parallel_state.is_global_rank_zero()
            assert seen.axes == {"pp", "dp", "cp", "tp"}


OPERATORS = [
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.and_, operator.or_,
    operator.xor, operator.lshift, pow, divmod, min, max,
]  # fmt: skip


@pytest.mark.parametrize("function", OPERATORS, ids=lambda f: f.__name__)
def test_arithmetic_is_that_of_ints_on_every_rank_and_reads_nothing(function):
    for rank in range(16):
        with ObservedRun(rank=rank) as seen:
            tp, world = comm.rank("tp"), comm.rank("world")
            for a, b in ((tp, 3), (3, tp + 1), (world, 7), (tp, world + 1), (tp + 5, comm.rank("pp") + 2)):
                found = function(a, b)
                assert not seen.calls or function in (min, max)
                value = tuple(map(concrete, found)) if function is divmod else concrete(found)
                assert value == function(concrete(a), concrete(b))
                if function not in (divmod, min, max):
                    for other in range(16):
                        assert value_on(found, other) == function(value_on(a, other), value_on(b, other))
            for unary in (operator.neg, operator.pos, abs, operator.invert, round, math.floor, math.trunc):
                assert value_on(unary(world - 3), 2) == unary(2 - 3)


def test_results_know_only_the_axes_along_which_they_differ():
    with ObservedRun() as seen:
        world = comm.rank("world")
        assert axes_of(world % 2) == {"tp"} and axes_of(world // 2 % 2) == {"cp"} and axes_of(world // 8) == {"pp"}
        assert type(world // 16) is int and type(world * 0) is int and type(world - world) is int
        assert axes_of(comm.rank("tp") + 2 * comm.rank("dp")) == {"tp", "dp"}
        assert axes_of(sum([comm.rank("tp"), comm.rank("pp")])) == {"tp", "pp"}
    assert not seen.calls


@pytest.mark.parametrize(
    "look",
    [
        lambda r: r == 0, lambda r: r > 0, lambda r: r != 1, bool, int, float, hash, str, repr, lambda r: f"{r:02d}",
        lambda r: r / 2, lambda r: 2 / (r + 1), lambda r: r * 0.5, lambda r: [0] * r, lambda r: {0: "a", 1: "b"}[r],
        lambda r: r in (0, 5), lambda r: pow(r, 2, 7), lambda r: math.sqrt(r), lambda r: r.bit_length(),
        lambda r: 1 % r if r else 0, copy.copy(lambda r: r ** -1 if r else 0), lambda r: r < 0.5, lambda r: r and 3,
        lambda r: sorted([r, 1 - r])[0] + int(r), lambda r: int(r.real),
    ],
)  # fmt: skip
def test_reads_are_told(look):
    found = {}
    for rank in (0, 1):
        with ObservedRun(Mesh(2, tp=2), rank) as seen:
            value = look(comm.rank("tp"))
            assert seen.axes == {"tp"}
            assert not seen.backend.same_program(1 - rank) and seen.backend.same_program(rank)
            assert seen.backend.reads[0].where.startswith(__file__)
            found[rank] = value
        assert found[rank] == look(rank)


def test_questions_with_one_answer_are_no_reads():
    with ObservedRun() as seen:
        tp, world = comm.rank("tp"), comm.rank("world")
        assert 0 <= tp < 2 and tp != 2 and not tp == -1 and world < 16 and world == comm.current().rank and tp != "x"
        assert bool(tp + 1) and min(tp * 4, 8) == tp * 4 and tp is not None and copy.deepcopy(tp) is tp
        with comm.record() as calls:
            comm.all_reduce(torch.ones(1), "tp")
        assert len(calls) == 1
    assert not seen.calls


def test_a_read_separates_only_the_ranks_with_another_answer():
    mesh = Mesh(8, tp=8)
    with ObservedRun(mesh, 3) as seen:
        assert comm.rank("tp") > 0
        assert [seen.backend.same_program(r) for r in range(8)] == [False] + [True] * 7
        assert comm.rank("tp") % 2 == 1
        assert [r for r in range(8) if seen.backend.same_program(r)] == [1, 3, 5, 7]
        (first, second) = seen.backend.reads
        assert first.axes == {"tp"} and [first.answer({"tp": i}) for i in range(3)] == [False, True, True]
        int(comm.rank("tp"))
        assert [r for r in range(8) if seen.backend.same_program(r)] == [3]


TORCH_CALLS = [
    lambda x, c: x - c, lambda x, c: c - x, lambda x, c: c * x, lambda x, c: x // (c + 1), lambda x, c: x == c,
    lambda x, c: x.narrow(0, c, 2), lambda x, c: x[c], lambda x, c: x[c : c + 2], lambda x, c: x[:, c],
    lambda x, c: torch.tensor(c), lambda x, c: torch.tensor([c, 1]), lambda x, c: torch.full((2,), c),
    lambda x, c: x.select(1, c), lambda x, c: torch.where(x > c, x, c), lambda x, c: x.masked_fill(x > 1, c),
    lambda x, c: torch.arange(4) * c + c, lambda x, c: x.index_select(0, torch.tensor([c])), lambda x, c: x.roll(c, 0),
    lambda x, c: torch.add(x, x, alpha=c), lambda x, c: nn.functional.one_hot(torch.tensor(c), 4),
]  # fmt: skip


@pytest.mark.parametrize("call", TORCH_CALLS)
def test_torch_takes_a_coordinate_as_a_number_and_a_mode_sees_it(call):
    for x in (torch.arange(12.0).view(4, 3), torch.arange(12.0, dtype=torch.float64).view(4, 3)):
        with ObservedRun() as seen:
            c = comm.rank("tp")
            expected = call(x, concrete(c))
            assert torch.equal(call(x, c), expected) and call(x, c).dtype == expected.dtype
            with SeesRankValues() as mode:
                assert torch.equal(call(x, c), expected)
            assert {"tp"} in mode.axes
            with FakeTensorMode() as fake:
                assert call(fake.from_tensor(x), c).shape == expected.shape
        assert not seen.calls


def test_a_rank_value_is_one_number_whatever_is_done_to_it():
    with ObservedRun(Mesh(4, tp=4), 3) as seen:
        rank = comm.rank("tp")
        for same in (rank.real, rank.numerator, rank.conjugate(), round(rank), math.trunc(rank), math.ceil(rank)):
            assert same is rank
        assert copy.copy(rank) is rank and copy.deepcopy([rank])[0] is rank and not seen.calls
        assert rank.to_bytes(2, "big") == b"\x00\x03" and rank.bit_length() == 2 and len(seen.calls) == 2
        assert pow(rank, 2, 5) == 4 and divmod(7, rank) == (2, 1) and rank / 2 == 1.5 and 6 / rank == 2
        assert (f"{rank:03d}", str(rank), repr(rank)) == ("003", "3", "3") and pickle.loads(pickle.dumps(rank)) == 3
        assert rank.value_on(1) == 1 and rank.names == ("tp",) and rank.axes == {"tp"}
        assert rank.mesh_coordinates(Mesh(4, tp=4)) is None is rank.mesh_group(Mesh(4, tp=4), "tp")
        world = comm.current().rank
        assert world.mesh_coordinates(Mesh(4, tp=4))["tp"] == rank and world.mesh_coordinates(Mesh(4)) is None
        assert world.mesh_group(Mesh(4, tp=4), "tp") == (0, 1, 2, 3) and world.mesh_group(Mesh(4), "tp") is None


def test_membership_is_one_read():
    with ObservedRun(Mesh(8, tp=8), 3) as seen:
        rank = comm.rank("tp")
        assert is_member(rank, [1, 3]) and is_member(3, (3,)) and not is_member(2, (3,)) and len(seen.calls) == 1
        assert [r for r in range(8) if seen.backend.same_program(r)] == [1, 3]


def test_values_of_two_meshes_are_read_where_they_meet():
    with ObservedRun(Mesh(2, tp=2), 1) as one:
        first = comm.rank("tp")
    with ObservedRun(Mesh(4, tp=4), 3) as other:
        total = first + comm.rank("tp")
        assert type(total) is int and total == 4 and one.calls and other.calls
        assert first < comm.rank("tp")
