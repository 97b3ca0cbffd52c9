"""Ranks that stand for others: what is found among them is what is found among all ranks, one by one."""

from __future__ import annotations

import os
import random

import pytest
import torch

from neuronx_dist import Mesh, comm
from neuronx_dist.checking.programs import compare
from neuronx_dist.checking.programs.calls import Deadline
from neuronx_dist.checking.programs.cells import Cells
from neuronx_dist.checking.programs.explore import explore
from neuronx_dist.checking.programs.played import Subject
from tests.checking.programs import checked_models as models

pytestmark = pytest.mark.slow

SEEDS = 25 if os.environ.get("NXD_FULL") else 8

MESHES = [
    Mesh(16, tp=2, pp=2, cp=2),
    Mesh(24, tp=3, cp=2),
    Mesh(16, tp=2, ep=4),
    Mesh(32, tp=2, cp=2, ep=4),
    Mesh(32, tp=2, cp=4, ep=2),
    Mesh(24, tp=2, cp=3, ep=2),  # cp and ep have no common pieces
    Mesh(16, tp=4, pp=2),
    Mesh(16, tp=4, pp=2, tp_replicas=2),
    Mesh(32, tp=8, cp=2, tp_replicas=4),
    Mesh(32, tp=4, pp=2, topology="trn1", ranks_per_node=8),
    Mesh(32, tp=4, pp=2, topology="trn2", ranks_per_node=8),
]


class Program(torch.nn.Module):
    """Calls what it is given."""

    def __init__(self, communicate) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.communicate = communicate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.detach() * 2
        self.communicate(y)
        return (x * self.weight).sum()


def step(model, optimizer, x):
    model(x).backward()


def explored(communicate, mesh: Mesh, twice: bool = True):
    subject = Subject(lambda: Program(communicate), torch.ones(2), step=step)
    return explore(subject, mesh, Deadline(None), twice)


def verdicts(communicate, mesh: Mesh, monkeypatch) -> tuple[bool, bool]:
    """Whether something is wrong: as the check finds it, and among all ranks, none of which stands for another."""
    found = explored(communicate, mesh)
    assert found.finished and not [p.failure.error for p in found.distinct if p.failure is not None]
    quick = bool(compare.compare_events(found))
    with monkeypatch.context() as patch:
        every = list(range(mesh.world_size))
        patch.setattr(compare, "ranks_for_collectives", lambda found: every)
        patch.setattr(compare, "ranks_for_messages", lambda found: every)
        return quick, bool(compare.compare_events(found))


AXES = ["tp", "dp", "cp", "pp", "ep", "edp", ("dp", "cp"), "world"]
PARTS = {Mesh(16, tp=4, pp=2): 2, Mesh(16, tp=4, pp=2, tp_replicas=2): 2, Mesh(32, tp=8, cp=2, tp_replicas=4): 4}


def axes_of(mesh: Mesh) -> list:
    """The axes along which there are several ranks, parts of tp on some meshes."""
    count = PARTS.get(mesh)
    parts = [f"tp%{count}", f"tp/{count}", ("dp", f"tp/{count}")] if count else []
    return [axis for axis in AXES + parts if mesh.size(axis) > 1]


def lists_of_ranks(mesh: Mesh, random_: random.Random) -> list[list[int]]:
    """Disjoint lists of ranks: along no axis, in most cases."""
    ranks = list(range(mesh.world_size))
    if random_.random() < 0.5:
        random_.shuffle(ranks)
    size = random_.choice([2, 2, 4])
    lists = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    return lists[: random_.choice([1, len(lists), len(lists)])]


def random_program(mesh: Mesh, seed: int):
    """A few collectives, each by all ranks or by some, over an axis or over lists of ranks; and messages."""
    random_ = random.Random(seed)
    number = random_.randrange(mesh.world_size)
    conditions = [
        None,
        None,
        lambda: comm.rank(random_axis) == index,
        lambda: comm.current().rank == number,
        lambda: comm.current().rank % 5 == 1,
        lambda: ([0] * (mesh.world_size - 1) + [1])[comm.current().rank],  # which nobody sees
    ]
    calls = []
    for _ in range(random_.randint(1, 3)):
        random_axis = random_.choice(axes_of(mesh))
        index = random_.randrange(mesh.size(random_axis))
        condition = random_.choice(conditions)
        if condition is conditions[2]:
            condition = lambda axis=random_axis, index=index: comm.rank(axis) == index  # noqa: E731
        axis = random_.choice(axes_of(mesh))
        verb = random_.choice(["all_reduce", "all_reduce", "broadcast", "ring", "lists"])
        shift = random_.choice([1, 1, 2]) if mesh.size(axis) > 2 else 1
        lists = lists_of_ranks(mesh, random_)
        calls.append((condition, verb, axis, shift, lists, random_.choice([None, "dp", "tp"])))

    def communicate(y: torch.Tensor) -> None:
        for condition, verb, axis, shift, lists, source_axis in calls:
            if verb == "lists":
                group = comm.new_group(lists, "lists")
                if group is not None and (condition is None or condition()):
                    comm.all_reduce(y, group)
            elif condition is not None and not condition():
                continue
            elif verb == "ring":
                here, size = comm.rank(axis), comm.size(axis)
                comm.send(y, axis, dst=(here + 1) % size)
                comm.recv(y, axis, src=(here - shift) % size)
            elif verb == "broadcast":
                comm.broadcast(y, axis, src=comm.rank(source_axis) % comm.size(axis) if source_axis else 0)
            else:
                comm.all_reduce(y, axis)

    return communicate


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_random_programs_are_judged_as_if_all_ranks_were_compared(mesh, monkeypatch):
    found = [verdicts(random_program(mesh, seed), mesh, monkeypatch) for seed in range(SEEDS)]
    assert [quick for quick, _ in found] == [slow for _, slow in found]
    assert {slow for _, slow in found} == {True, False}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_is_told_of_a_cell_is_true_of_all_its_ranks(mesh):
    random_ = random.Random(3)
    for _ in range(10):
        cells, tables = Cells(mesh), []
        with comm.as_rank(mesh, 0, backend := comm.backends.observed.CheckBackend()):
            rank = comm.current().rank
            numbers = [rank % random_.randint(2, 7), rank // random_.randint(2, 7)]
            numbers += [comm.rank(axis) * 2 + comm.rank("tp") for axis in ("dp", "ep", "edp", "cp")]
            for number in random_.sample(numbers, 2):
                number == random_.randint(0, 3)  # noqa: B015 - a read
            tables = [read.answers for read in backend.reads]
        for table in tables:
            cells.cut(table)
        representatives = cells.representatives()
        assert sum(map(cells.count, representatives)) == mesh.world_size and len(set(representatives)) == len(
            representatives
        )
        for one in range(mesh.world_size):
            stand_in = cells.representative(one)
            assert stand_in in representatives and cells.representative(stand_in) == stand_in
            assert all(t.at(mesh.coordinates(one)) == t.at(mesh.coordinates(stand_in)) for t in tables)
            assert one in list(cells.backwards([stand_in]))
        places = [mesh.place(r) for r in cells.backwards(representatives)]
        assert places == list(reversed(range(mesh.world_size)))


BIG = Mesh(65536, tp=8, pp=4)  # dp 2048


@pytest.mark.parametrize(
    ("wrong", "ranks"),
    [
        (lambda y: comm.all_reduce(y, "dp") if comm.rank("dp") != 1031 else None, {1031}),
        (lambda y: [comm.all_reduce(y, "dp", op=op) for op in _swapped(("sum", "max"))], {1031}),
        (lambda y: comm.all_reduce(y if comm.rank("dp") != 1031 else y[:1], "dp"), {1031}),
        (lambda y: comm.all_reduce(y, "tp") if comm.current().rank != 40000 else None, {40000}),
        (lambda y: comm.all_reduce(y, "world") if comm.current().rank % 4096 != 5 else None, {5}),
    ],
)
def test_one_rank_among_many_that_does_something_else_is_found(wrong, ranks):
    found = explored(wrong, BIG, twice=False)
    (problem,) = compare.compare_events(found)
    assert ranks & ({BIG.coordinate("dp", rank) for rank in problem.ranks} | {*problem.ranks}), problem
    assert len(compare.ranks_for_collectives(found)) <= 128


def _swapped(axes):
    return axes[::-1] if comm.rank("dp") == 1031 else axes


def test_a_ring_over_many_ranks_whose_ends_do_not_meet_is_found():
    def ring(shift):
        def communicate(y):
            here, size = comm.rank("dp"), comm.size("dp")
            comm.send(y, "dp", dst=(here + 1) % size)
            comm.recv(y, "dp", src=(here - shift) % size)

        return communicate

    mesh = Mesh(256, tp=4, pp=2)
    assert compare.compare_events(explored(ring(1), mesh, twice=False)) == []
    problems = compare.compare_events(explored(ring(2), mesh, twice=False))
    assert problems and "has no" in problems[0].message


def test_a_source_that_differs_along_the_group_is_found_where_nobody_looked_at_the_rank():
    problems = compare.compare_events(explored(lambda y: comm.broadcast(y, "dp", src=comm.rank("dp")), Mesh(64, tp=4)))
    assert problems and "different sources" in problems[0].message


def test_groups_across_axes_are_compared_with_all_of_their_ranks():
    """Rank 0 and rank 3 are of other tp ranks and other dp ranks, and only one of them calls."""

    def communicate(y):
        group = comm.new_group([[0, 3], [1, 2]], "crossed")
        assert group is not None
        if comm.rank("tp") == 0:
            comm.all_reduce(y, group)

    problems = compare.compare_events(explored(communicate, Mesh(4, tp=2)))
    assert problems and "of the same group does not" in problems[0].message


# --- what does not grow with the world


def test_a_check_of_many_ranks_plays_what_a_check_of_few_plays():
    few, many = (
        explore(Subject(models.pipeline, models.pipeline_inputs), Mesh(dp * 4, tp=2, pp=2), Deadline(None), False)
        for dp in (2, 50_000)
    )
    assert (few.plays, len(few.distinct)) == (many.plays, len(many.distinct)) and len(many.programs) == 200_000
    assert compare.compare_events(many) == [] and len(compare.ranks_for_collectives(many)) == 2


def test_the_checkers_own_questions_are_none_of_the_programs_operators():
    subject = Subject(models.model_fn, models.example_inputs(), level="G")
    (program,) = explore(subject, Mesh(8, tp=4), Deadline(None), twice=False).distinct
    assert program.ops and not any("is_inference" in op.name for op in program.ops)
