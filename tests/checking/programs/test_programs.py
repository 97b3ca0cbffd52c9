"""Ranks whose programs do not fit together are found without running them; those that fit are left in peace."""

from __future__ import annotations

import json
import linecache
import re

import pytest
import torch

import neuronx_dist as nxd
from neuronx_dist import Mesh, comm, spmd
from neuronx_dist.checking.programs.calls import Deadline
from neuronx_dist.checking.programs.compare import ranks_for_collectives
from neuronx_dist.checking.programs.explore import explore
from neuronx_dist.checking.programs.played import Subject
from tests.checking.programs import checked_models as models

MESH = {"dp": 2, "tp": 4}


def check(defect: str = "", level: str | None = None, **more):
    return spmd.check(models.model_fn, models.example_inputs(), MESH, options={"defect": defect}, level=level, **more)


def source(line: str) -> str:
    """The text of `file:line`."""
    file, number = line.rsplit(":", 1)
    return linecache.getline(file, int(number)).strip()


def test_a_right_model_is_ok_and_says_what_was_covered():
    report = check()
    assert report.ok and report.problems == []
    assert report.programs == 1 and report.world_size == 8
    assert report.collectives == 2  # the row layer's, and the gradients'
    assert str(report) == "check ok: 8 ranks, types not checked: collectives agree"
    assert re.search(r"\d+ operators, 2 collectives, 8 ranks with one program; played in \d+ runs", report.details())
    assert "axes of size 1, along which there is nothing to check: pp, cp" in report.details()


def test_nothing_of_the_process_changes():
    before, dtype = torch.get_rng_state(), torch.get_default_dtype()
    spmd.check(models.pipeline, models.pipeline_inputs(), {"pp": 2, "tp": 2}, level=None)
    torch.manual_seed(3)
    after = torch.get_rng_state()

    def seeding():
        nxd.model_parallel_manual_seed(1234)
        return models.model_fn()

    assert spmd.check(seeding, models.example_inputs(), MESH, level=None).ok
    assert torch.equal(torch.get_rng_state(), after) and not torch.equal(before, after)
    assert not comm.is_initialized() and torch.get_default_dtype() == dtype


@pytest.mark.parametrize(
    ("defect", "message", "ranks", "calls"),
    [
        ("missing", "rank 1 calls all_reduce(sum) of [2] float32 over tp, and rank 0 of the same group", {0, 1}, 1),
        ("unseen", "rank 2 calls all_reduce(sum) of [2] float32 over tp, and rank 0", {0, 2}, 1),
        ("order", "ranks 0 and 1 call two collectives over tp in different orders", {0, 1}, 2),
        ("deadlock", "ranks 0, 1, 5 and 4 wait for each other: they call collectives over", {0, 1, 4, 5}, 4),
        ("verb", "ranks 0 and 1 call different collectives over tp", {0, 1}, 2),
        ("op", "ranks 0 and 1 reduce by different operations over tp, sum and max", {0, 1}, 2),
        ("shape", "ranks 0 and 1 call all_reduce over tp with different shapes, [2] and [3]", {0, 1}, 2),
        ("dtype", "over tp with different dtypes, torch.float32 and torch.float64", {0, 1}, 2),
        ("source", "call broadcast over tp with different sources", {0, 2}, 2),
        ("send", "rank 1 calls send to rank 0 of [2] float32 over tp, and rank 0 has no receive for it", {0, 1}, 1),
        ("message", "rank 1 sends torch.float32 [2], and rank 0 expects torch.float32 [3]", {0, 1}, 2),
        ("message_dtype", "rank 1 sends torch.float32 [2], and rank 0 expects torch.bfloat16 [2]", {0, 1}, 2),
        ("pairs", "call permute over tp with different sources or pairs", {0, 2}, 2),
    ],
)  # fmt: skip
def test_ranks_that_do_not_communicate_alike(defect, message, ranks, calls):
    report = check(defect)
    assert not report.ok
    (problem,) = report.problems
    assert problem.kind == "collectives"
    assert message in problem.message, problem.message
    assert not ranks or set(problem.ranks) == ranks
    lines = [line for line in problem.lines if line.startswith(models.__file__)]
    assert len(lines) == calls, problem
    assert all("comm." in source(line) or "for op" in source(line) for line in lines), [source(line) for line in lines]
    for line in lines:
        assert line in problem.message  # both source lines are told


def test_what_a_rank_raises_is_told_with_its_coordinates_and_line():
    report = check("crash")
    assert 0.0 < report.seconds < 60.0
    (problem,) = report.problems
    assert problem.kind == "program"
    assert problem.message.startswith("ZeroDivisionError: only on some ranks")
    assert "in forward and backward of rank 4 (dp 1, tp 0)" in problem.message
    assert source(problem.lines[0]).startswith("raise ZeroDivisionError")
    report = spmd.check(models.model_fn, models.example_inputs(), {"tp": 3}, level=None)
    assert "output_size 32 is not divisible by the tensor parallel size 3" in str(report)
    assert "in building the model of rank 0" in str(report)


def test_a_program_that_asks_for_values_is_told_so():
    (problem,) = check("value").problems
    assert "the program asks for the value of a tensor" in problem.message
    assert source(problem.lines[0]) == "return y * y.sum().item()"


def test_types_of_an_exception_with_raise_errors():
    with pytest.raises(spmd.SpmdTypeError, match="in different orders"):
        check("order", raise_errors=True)
    with pytest.raises(spmd.SpmdTypeError) as caught:
        check("crash", raise_errors=True)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_json_holds_all_of_it():
    found = json.loads(check("shape").to_json())
    assert found["ok"] is False and found["mesh"] == {"pp": 1, "dp": 2, "cp": 1, "tp": 4}
    (problem,) = found["problems"]
    assert problem["kind"] == "collectives" and problem["ranks"] == [0, 1] and len(problem["lines"]) == 2
    assert found["programs"] == 4 and found["world_size"] == 8
    assert json.loads(check().to_json(indent=2))["ok"] is True


# --- which ranks are played ------------------------------------------------------------------------------------------


def played(model_fn, mesh, inputs=models.example_inputs, twice=False, **options):
    return explore(Subject(model_fn, inputs, options), mesh, Deadline(None), twice)


def test_one_rank_is_played_where_none_looks_at_its_coordinates():
    found = played(models.model_fn, Mesh(4096, tp=4))
    assert found.plays == 1 and len(found.programs) == 4096
    assert ranks_for_collectives(found) == [0]


def test_a_rank_is_played_for_each_answer_and_not_for_each_rank():
    found = played(models.model_fn, Mesh(64, tp=16), defect="missing")  # rank("tp") > 0
    assert found.plays == 2
    assert {found.programs[rank].rank for rank in range(64)} == {0, 1}
    found = played(models.model_fn, Mesh(8, tp=4), defect="shape")  # 2 + rank("tp")
    assert found.plays == 4


def test_stages_are_programs_of_their_own():
    found = played(models.pipeline, Mesh(16, tp=2, pp=4), models.pipeline_inputs)
    assert {program.schedule.num_microbatches for program in found.distinct} == {4}
    assert {program.rank for program in found.distinct} == {0, 4, 8, 12}
    assert ranks_for_collectives(found) == [0, 4, 8, 12]


def test_stages_that_do_the_same_line_by_line_are_played_a_second_time_once(monkeypatch):
    monkeypatch.setattr("neuronx_dist.checking.programs.explore.CONFIRMED_OPS", 0)
    found = played(models.pipeline, Mesh(16, tp=2, pp=4), models.pipeline_inputs, twice=True)
    first, second, third, last = found.distinct
    assert second.lines() == third.lines() and first.lines() != second.lines() != last.lines()
    assert found.plays == 4 + 3


def test_only_the_phase_that_looked_is_played_again():
    builds = []

    def model_fn():
        builds.append(comm.current().mesh)
        model = models.model_fn()
        return model, nxd.NeuronZero1Optimizer(list(model.parameters()), torch.optim.AdamW)

    found = played(model_fn, Mesh(8, tp=4))
    assert found.plays == 2 and len(builds) == 1  # the norm counts what is replicated on tp rank 0
    first, second = found.distinct
    assert first.phases["build"] is second.phases["build"] and first.phases["train"] is second.phases["train"]
    assert first.phases["step"] is not second.phases["step"]


def test_a_model_that_is_built_otherwise_is_built_again():
    def model_fn():
        class Uneven(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(4 if comm.rank("tp") < 2 else 6))

            def forward(self, x):
                return (x.sum() * self.weight).sum()

        return Uneven()

    found = played(model_fn, Mesh(4, tp=4))
    assert found.plays == 2
    assert [len(program.phases) for program in found.distinct] == [3, 3]
    assert found.distinct[0].phases["build"] is not found.distinct[1].phases["build"]


def test_what_two_ranks_build_alike_is_built_once():
    builds = []

    def model_fn():
        class Uneven(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(4 if comm.rank("tp") == 0 else 6))

            def forward(self, x):
                return (x.sum() * self.weight).sum() * (2 if comm.rank("tp") == 2 else 1)

        builds.append(Uneven())
        return builds[-1]

    found = played(model_fn, Mesh(4, tp=4))
    assert found.plays == 3 and len(builds) == 2  # rank 2 with the model of rank 1


def test_what_a_model_kept_of_its_rank_when_it_was_built_counts_when_it_is_used():
    def model_fn():
        model = models.model_fn()
        model.index = comm.rank("tp")
        model.register_forward_hook(
            lambda module, args, loss: comm.all_reduce(loss, "tp") * 0 + loss if module.index == 3 else loss
        )
        return model

    report = spmd.check(model_fn, models.example_inputs(), MESH, level=None)
    assert report.programs == 2
    assert "rank 3 calls all_reduce(sum) of [] float32 over tp, and rank 0" in report.problems[0].message


def test_differences_that_are_allowed_are_listed():
    def model_fn():
        model = models.model_fn()
        return model, nxd.NeuronZero1Optimizer(list(model.parameters()), torch.optim.AdamW)

    report = spmd.check(model_fn, models.example_inputs(), MESH, level=None)
    assert report.ok and report.programs == 2
    assert str(report).startswith("check ok: ") and "2 programs on 8 ranks" in report.details()
    (difference,) = report.differences
    assert difference.startswith("ranks 0 and 1 call _foreach_norm with different numbers or shapes at ")
    assert "what ranks do differently, and may:\n    ranks 0 and 1 call _foreach_norm" in report.details()


# --- what may be given -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_inputs_may_be_a_dict_a_tuple_a_tensor_or_a_function():
    x = models.example_inputs()
    for inputs in (x, (x,), [x], {"x": x}, lambda: x, lambda: {"x": x}, x.to("meta")):
        assert spmd.check(models.model_fn, inputs, MESH, level=None).ok
    (problem,) = spmd.check(models.model_fn, {"y": x}, MESH, level=None).problems
    assert "forward is called with the example inputs ['y']; its parameters are ['x']" in problem.message


def test_a_function_that_makes_inputs_may_communicate():
    def inputs():
        x = models.example_inputs()
        nxd.global_num_items(torch.zeros(2, 3, dtype=torch.long))
        return x

    assert spmd.check(models.model_fn, inputs, MESH, level=None).collectives == 3


@pytest.mark.parametrize(
    "result", [lambda loss: {"loss": loss}, lambda loss: (loss, None), lambda loss: {"other": loss}, lambda loss: loss]
)
def test_the_loss_is_found_in_what_the_model_returns(result):
    def model_fn():
        model = models.model_fn()
        model.register_forward_hook(lambda module, args, loss: result(loss))
        return model

    assert spmd.check(model_fn, models.example_inputs(), MESH, level=None).ok


def test_a_model_without_a_loss_is_told_what_to_do():
    def model_fn():
        return models.Block()

    (problem,) = spmd.check(model_fn, models.example_inputs(), MESH, level=None).problems
    assert "holds no loss but a tensor of shape [4, 8]" in problem.message and "pass step=" in problem.message

    def step(model, optimizer, x):
        model(x).sum().backward()
        nxd.reduce_gradients(model)
        optimizer.step()

    assert spmd.check(model_fn, models.example_inputs(), MESH, step=step, level=None).ok


def test_a_model_function_that_returns_something_else():
    (problem,) = spmd.check(lambda: 3, models.example_inputs(), MESH, level=None).problems
    assert "returned a int; it must return a module, an NxDPPModel, or (model, optimizer)" in problem.message


def test_an_optimizer_may_be_made_of_the_parameters():
    models_built = []

    def optimizer(params):
        models_built.append(nxd.NeuronZero1Optimizer(params, torch.optim.AdamW))
        return models_built[-1]

    report = spmd.check(models.model_fn, models.example_inputs(), MESH, optimizer=optimizer, level=None)
    assert report.ok and models_built
    assert report.collectives == 1 + 3  # the row layer's; reduce-scatter, norm and all-gather of the optimizer


@pytest.mark.parametrize("mesh", [{"tp": 4, "dp": 2}, Mesh(8, tp=4), {"tp": 4, "dp": 2, "pp": 1, "cp": 1}])
def test_a_mesh_is_sizes_or_a_mesh(mesh):
    report = spmd.check(models.model_fn, models.example_inputs(), mesh, level=None)
    assert report.ok and report.mesh == {"pp": 1, "dp": 2, "cp": 1, "tp": 4}


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tq": 4}, "unknown axes tq"),
        ({"tp": 0}, "tp must be a positive integer, got 0"),
        ({"dp": 3, "ep": 2}, "not divisible"),
        ({"dp": 4, "ep": 2, "edp": 4}, "edp 4 does not fit"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(mesh, message):
    with pytest.raises(ValueError, match=message):
        spmd.check(models.model_fn, models.example_inputs(), mesh)


def test_a_level_that_there_is_not():
    with pytest.raises(ValueError, match="neither 'G'"):
        check(level="X")


def test_time_that_runs_out_is_no_verdict():
    report = check(time_limit=0.0)
    assert not report.ok and not report.finished and report.problems == []
    assert "before everything was checked: no verdict" in str(report)


# --- pipelines -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize("optimizer", [False, True])
def test_pipelines_are_ok(zero1, optimizer):
    report = spmd.check(
        models.pipeline,
        models.pipeline_inputs(),
        {"pp": 2, "dp": 2, "tp": 2},
        options=dict(zero1=zero1, optimizer=optimizer),
        level=None,
    )
    assert report.ok, str(report)
    assert report.programs >= 2


def test_stages_that_expect_other_shapes_than_are_sent():
    report = spmd.check(models.pipeline, models.pipeline_inputs(), {"pp": 2}, options=dict(defect="stages"), level=None)
    problem = report.problems[0]
    assert problem.kind == "pipeline"
    assert "stage 0 (rank 0) sends torch.float32 [2, 8], and stage 1 (rank 1) expects torch.float32 [4, 8]" in str(
        report
    )


def test_a_batch_that_is_not_divisible_into_microbatches():
    report = spmd.check(
        models.pipeline, models.pipeline_inputs(), {"pp": 2}, options=dict(num_microbatches=3), level=None
    )
    assert "8 rows, which is not divisible into 3 microbatches" in str(report)


def test_the_schedule_is_simulated_over_all_microbatches(monkeypatch):
    from neuronx_dist.checking.programs import schedules
    from neuronx_dist.pipeline.schedule import OneFOneB

    asked = []

    class FirstReceiveLast(OneFOneB):
        def tasks(self, stage):
            asked.append(self.num_microbatches)
            tasks = super().tasks(stage)
            return tasks if stage < self.num_stages - 1 else [*tasks[1:], tasks[0]]

    prove = schedules.prove
    monkeypatch.setattr(
        schedules, "prove", lambda given: prove(FirstReceiveLast(given.num_stages, given.num_microbatches))
    )
    report = spmd.check(
        models.pipeline, models.pipeline_inputs(), {"pp": 2}, options=dict(num_microbatches=8), level=None
    )
    assert set(asked) == {8}
    assert "the schedule of 8 microbatches over 2 stages cannot run" in str(report)
