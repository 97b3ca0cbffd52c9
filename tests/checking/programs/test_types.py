"""Types over whole steps: pipelines, gradient reduction, optimizers; and the gate before the optimizer's step."""

from __future__ import annotations

import pytest
import torch

import neuronx_dist as nxd
from neuronx_dist import spmd
from tests.checking.programs import checked_models as models

MESH = {"dp": 2, "tp": 4}


def refused(report, *parts):
    """The one problem, of the types, that holds all parts."""
    (problem,) = report.problems
    assert problem.kind == "types" and isinstance(problem.error, spmd.SpmdTypeError), str(report)
    for part in parts:
        assert part in problem.message, problem.message
    return problem


@pytest.mark.slow
@pytest.mark.parametrize(("level", "mesh"), [("G", MESH), ("L", {"tp": 4})])
def test_a_right_model_is_ok(level, mesh):
    for defect in ("", "allowed", "converted"):
        report = spmd.check(models.model_fn, models.example_inputs(), mesh, options={"defect": defect}, level=level)
        assert report.ok, str(report)
        assert f", level {level}: gradients" in str(report)


def test_a_reduction_too_many_is_refused_at_its_line():
    report = spmd.check(models.model_fn, models.example_inputs(), MESH, options={"defect": "twice"})
    problem = refused(report, "all_reduce(y [4, 8] {dp: S(0), tp: I}, 'tp', src=P, dst=I)", "y is I")
    assert problem.lines[0].startswith(models.__file__)
    assert problem.error.axis == "tp"


@pytest.mark.parametrize(
    ("defect", "text"),
    [
        ("number", "is called with 1 on rank 0 and with 2 on rank 1, and its result is I on tp"),
        ("branch", "is called on rank 0 and not on rank 1, and its result is I on tp: equal on all ranks"),
    ],
)
def test_what_ranks_do_differently_is_not_equal(defect, text):
    report = spmd.check(models.model_fn, models.example_inputs(), MESH, options={"defect": defect})
    (problem,) = report.problems
    assert problem.kind == "types" and text in problem.message, problem.message
    assert problem.lines[0].startswith(models.__file__)
    assert "dst=V) what is meant to differ" in problem.message


def test_inputs_are_sharded_over_dp_unless_in_types_says_otherwise():
    def step_of_equal_batches(model, optimizer, inputs):
        """The mean over dp of what is equal there is the value; of sums over other samples it is too small."""
        model.down(torch.relu(model.up(inputs["x"]))).square().sum().backward()
        nxd.reduce_gradients(model)
        optimizer.step()

    def check(in_types):
        return spmd.check(
            models.model_fn, {"x": models.example_inputs()}, MESH, step=step_of_equal_batches, in_types=in_types
        )

    refused(check(None), "on dp it is R/N: it is too small by the size of dp")
    refused(check({"dp": spmd.S(1)}), "on dp", "is S(1): a dim of 8 is this rank's piece")
    assert check({"x": {"dp": spmd.R}}).ok
    (problem,) = check({"y": {"dp": spmd.R}}).problems
    assert "in_types names y, but the inputs are x" in problem.message


# --- the gate --------------------------------------------------------------------------------------------------------


def test_gradients_that_are_not_reduced_over_dp_are_refused():
    report = spmd.check(models.model_fn, models.example_inputs(), MESH, step=models.step)
    refused(
        report,
        "SGD.step: the gradient of up.weight [8, 8]: on dp it is P",
        "the parts are not added up",
        "repair: reduce_gradients(model) after the last backward",
        "in the step of rank 0 (dp 0, tp 0)",
    )
    assert spmd.check(models.model_fn, models.example_inputs(), {"tp": 4}, step=models.step).ok  # nothing to reduce


@pytest.mark.slow
def test_an_optimizer_that_reduces_them_itself_may_have_them():
    for wrapper, wrong in ((nxd.NeuronZero1Optimizer, False), (nxd.MasterWeightsOptimizer, True)):

        def model_fn(wrapper=wrapper):
            model = models.model_fn()
            return model, wrapper(list(model.parameters()), torch.optim.AdamW, lr=0.1)

        report = spmd.check(model_fn, models.example_inputs(), MESH, step=models.step)
        if wrong:
            refused(report, "MasterWeightsOptimizer.step: the gradient of up.weight", "on dp it is P")
        else:
            assert report.ok, str(report)


def test_sequence_parallel_gradients_that_are_not_reduced_over_tp_are_refused():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nxd.RMSNorm(models.HIDDEN, sequence_parallel_enabled=True)

        def forward(self, x):
            return self.norm(x).square().sum()

    def step(model, optimizer, x):
        here = spmd.convert(x, "tp", src=spmd.R, dst=spmd.S(0))
        total = spmd.all_reduce(model(here), "tp", src=spmd.P, dst=spmd.I)
        total.backward()
        optimizer.step()

    x = torch.randn(8, models.HIDDEN)
    report = spmd.check(Model, x, {"tp": 4}, step=step)
    refused(report, "SGD.step: the gradient of norm.weight [8]: on tp it is P", "sequence-parallel")

    def reduced(model, optimizer, x):
        step(model, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), x)
        nxd.reduce_gradients(model)
        optimizer.step()

    assert spmd.check(Model, x, {"tp": 4}, step=reduced).ok


# --- pipelines -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("mesh", [{"pp": 2, "dp": 2, "tp": 2}, {"pp": 4, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("zero1", [False, True])
def test_a_pipeline_step_with_its_optimizer_is_ok(mesh, zero1):
    options = dict(zero1=zero1, optimizer=True)
    report = spmd.check(models.pipeline, models.pipeline_inputs(), mesh, options=options)
    assert report.ok, str(report)


def test_what_a_stage_sends_has_its_type_in_the_next():
    """A row layer whose sum is missing in stage 0 is found where stage 1 uses what was sent."""

    class Forgetful(models.Block):
        def forward(self, x):
            return torch.nn.functional.linear(torch.relu(self.up(x)), self.down.weight)

    class Broken(models.Stack):
        def __init__(self):
            super().__init__()
            self.layers[1] = Forgetful()

    def model_fn():
        return nxd.NxDPPModel(
            Broken(),
            transformer_layer_cls=models.Block,
            output_loss_value_spec=True,
            input_names=["x", "target"],
            pipeline_cuts=["layers.1"],
        )

    report = spmd.check(model_fn, models.pipeline_inputs(), {"pp": 2, "tp": 2})
    refused(report, "rank 2 (pp 1, tp 0)", "tp: P")
