"""Random numbers are equal where the seed of their generator is, and vary where it depends on the rank."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import R, S, V, typecheck
from neuronx_dist.spmd.tensor_type import type_of

MESH = {"dp": 2, "tp": 2}


def seen(draw, *, mesh=MESH, build=None):
    """The types that random numbers have in a played step, by axis; and its report."""
    found = SimpleNamespace(types={}, report=None)

    def model_fn():
        model = nn.Linear(2, 1)
        model.generator = build() if build is not None else None
        return model

    def step(model, optimizer, batch):
        type_ = type_of(draw(model.generator, batch["x"]))
        found.types = {axis: type_.get(axis) for axis in ("dp", "tp")}

    found.report = spmd.check(model_fn, {"x": torch.zeros(4, 2)}, mesh=mesh, step=step)
    assert found.report.ok, found.report
    return found


def drawn(seed):
    return torch.rand(4, generator=torch.Generator().manual_seed(seed))


def test_a_generator_with_one_seed_gives_equal_numbers():
    assert seen(lambda generator, x: drawn(3)).types == {"dp": R, "tp": R}


@pytest.mark.parametrize("number", [lambda rank: rank, int], ids=["rank", "int(rank)"])
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_a_seed_by_rank_gives_numbers_that_vary_over_its_axis_alone(axis, number):
    found = seen(lambda generator, x: drawn(3 + number(comm.rank(axis)))).types
    assert found == {"dp": R, "tp": R, axis: V}


@pytest.mark.parametrize("number", [lambda rank: rank, int], ids=["rank", "int(rank)"])
def test_a_generator_that_the_model_made_keeps_its_seed(number):
    def build():
        return torch.Generator().manual_seed(3 + number(comm.rank("dp")))

    assert seen(lambda generator, x: torch.randn(4, generator=generator), build=build).types == {"dp": V, "tp": R}


def test_the_same_line_may_draw_from_both():
    def draw(generator, x):
        own, common = (drawn(seed) for seed in (10 + int(comm.rank("tp")), 3))
        return common

    assert seen(draw).types == {"dp": R, "tp": R}


def test_the_default_generator_as_it_is_found_is_equal_on_tp_and_unknown_on_the_other_axes():
    assert seen(lambda generator, x: torch.rand(4)).types == {"dp": V, "tp": R}


def test_the_default_generator_seeded_by_the_program_is_judged_by_its_seed():
    def seeded(seed):
        torch.manual_seed(seed())
        return torch.rand(4)

    assert seen(lambda generator, x: seeded(lambda: 5)).types == {"dp": R, "tp": R}
    assert seen(lambda generator, x: seeded(lambda: 1 + comm.rank("dp"))).types == {"dp": V, "tp": R}
    assert seen(lambda generator, x: seeded(lambda: 1 + comm.rank("tp"))).types == {"dp": R, "tp": V}


def test_a_model_that_seeds_by_tensor_parallel_rank_draws_other_dropout_masks_there():
    def model_fn():
        torch.manual_seed(1234 + int(comm.rank("tp")))
        return nn.Linear(4, 4)

    def step(model, optimizer, batch):
        F.dropout(model(batch["x"]), 0.5).square().mean().backward()

    report = spmd.check(model_fn, {"x": torch.zeros(2, 4)}, mesh={"tp": 2}, step=step)
    assert not report.ok and "dropout" in str(report)


def test_numbers_in_the_shape_of_this_ranks_part_of_the_batch_are_its_own():
    found = seen(lambda generator, x: x + torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
    assert found.types == {"dp": V, "tp": R}


def test_every_nth_number_of_one_permutation_is_a_shard_of_it():
    def draw(generator, x):
        return torch.randperm(8, generator=torch.Generator().manual_seed(1))[comm.rank("dp") :: comm.size("dp")]

    found = seen(draw)
    assert found.types == {"dp": S(0, 4), "tp": R} and not found.report.assumed


def test_parts_by_rank_of_permutations_that_differ_overlap():
    def step(model, optimizer, batch):
        drawn(int(comm.rank("dp")))[comm.rank("dp") :: comm.size("dp")]

    report = spmd.check(lambda: nn.Linear(2, 1), {"x": torch.zeros(4, 2)}, mesh={"dp": 2}, step=step)
    assert "do not make up one tensor" in str(report) and "one seed on all ranks of dp" in str(report)


def test_a_refusal_names_the_draw():
    def step(model, optimizer, batch):
        mask = torch.rand(4, 1, generator=torch.Generator().manual_seed(7 + comm.rank("tp"))) > 0.2
        (model(batch["x"]) * mask).mean().backward()

    report = spmd.check(lambda: nn.Linear(2, 1), {"x": torch.zeros(4, 2)}, mesh={"tp": 2}, step=step)
    assert "from a seed that differs by rank" in str(report)


def test_without_a_check_one_rank_cannot_compare_seeds():
    with comm.as_rank(Mesh(4, tp=2), 0, CheckBackend()), typecheck() as mode:
        assert type_of(drawn(3)).get("dp") is R
        assert any("has the same seed" in text for text, _ in mode.assumed)


def test_torchs_generator_is_put_back():
    plain = torch.Generator
    generators = []
    seen(lambda made_by_model, x: generators.append(torch.Generator()) or drawn(1))
    assert torch.Generator is plain and isinstance(generators[0], plain)


def test_what_varies_by_the_table_is_not_played_again():
    steps = []

    def model_fn():
        torch.manual_seed(1 + int(comm.rank("dp")))
        return nn.Linear(2, 1)

    def step(model, optimizer, batch):
        steps.append(type_of(torch.rand(2)).get("dp"))

    assert spmd.check(model_fn, {"x": torch.zeros(4, 2)}, mesh={"dp": 2}, step=step).ok
    assert steps == [V, V]
