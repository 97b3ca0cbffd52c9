"""`numeric=True`: what no type shows, a wrong scale, is named with its ratio."""

from __future__ import annotations

from math import nan

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import Mesh, comm, spmd
from neuronx_dist.checking.programs.calls import Deadline
from neuronx_dist.checking.programs.numeric import compare_values
from neuronx_dist.checking.programs.played import Subject
from tests.checking.programs import checked_models as models

MESH = {"dp": 2, "tp": 2}


class Mean(models.MLP):
    """A model whose loss is a mean, which over dp is again one: what the sum's constant leaves to the caller."""

    def __init__(self, defect: str = "") -> None:
        super().__init__(defect)
        if defect == "gradient":
            self.up.weight.register_hook(lambda grad: grad * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        y = self._scale(y) if self.defect == "scale" else y
        return y.square().sum() / (y.numel() if self.defect != "constant" else y.numel() * 2)


def check(defect: str = "", inputs=models.example_inputs, mesh=MESH, level="G"):
    return spmd.check(Mean, inputs(), mesh, options={"defect": defect}, numeric=True, level=level)


def test_a_right_model_has_the_values_of_one_process():
    report = check()
    assert report.ok, str(report)
    assert "loss and 4 gradients equal those of one process" in str(report)


def test_a_wrong_scale_passes_the_types_and_not_the_numbers():
    assert spmd.check(Mean, models.example_inputs(), MESH, options={"defect": "scale"}).ok
    report = check("scale")
    assert {problem.kind for problem in report.problems} == {"values"}
    assert "the loss is" in report.problems[0].message and "0.25 times that" in report.problems[0].message
    assert "the gradient of up.weight is wrong on rank 0: 0.25 times" in report.problems[1].message
    assert "and 3 more of 4" in report.problems[1].message


def test_a_wrong_gradient_is_named_with_its_parameter():
    def model_fn():
        model = Mean()
        if comm.size("tp") > 1:  # only where it is parallel
            model.register_forward_pre_hook(lambda m, args: (m.up.weight.register_hook(lambda g: g * 2), args)[1])
        return model

    report = spmd.check(model_fn, models.example_inputs(), MESH, numeric=True)
    (problem,) = report.problems
    assert problem.message == (
        "the gradient of up.weight is wrong on rank 0: 2 times that of one process (the dp size or the tp size)"
    )


@pytest.mark.parametrize("where", ["everywhere", "on ranks", "in gradients on ranks"])
def test_numbers_that_are_not_finite_equal_nothing(where):
    class Spoilt(Mean):
        def forward(self, x):
            loss = super().forward(x)
            if where == "in gradients on ranks" and comm.size("tp") > 1:
                self.up.weight.register_hook(lambda grad: grad * nan)
                return loss
            return loss * nan if where == "everywhere" or comm.size("tp") > 1 else loss

    report = spmd.check(Spoilt, models.example_inputs(), MESH, numeric=True)
    if where == "everywhere":
        assert report.ok and not report.numeric
        assert "values not compared: the loss is nan in one process: pass inputs with which" in str(report)
        return
    messages = [problem.message for problem in report.problems]
    if where == "on ranks":
        assert messages.pop(0).startswith("the loss is nan on rank 0 and ")
    (of_gradients,) = messages
    assert of_gradients.startswith("the gradient of up.weight is wrong on rank 0: it has elements that are not finite")


@pytest.mark.slow
@pytest.mark.parametrize("zero1", [False, True])
def test_pipelines_have_the_values_of_one_process(zero1):
    class Stack(models.Stack):
        def forward(self, x, target):
            for layer in self.layers:
                x = layer(x)
            return (x - target).square().mean()

    def model_fn():
        return nxd.NxDPPModel(
            Stack(),
            transformer_layer_cls=models.Block,
            num_microbatches=2,
            output_loss_value_spec=True,
            input_names=["x", "target"],
            auto_partition=True,
            use_zero1_optimizer=zero1,
        )

    report = spmd.check(model_fn, models.pipeline_inputs(), {"pp": 2, "dp": 2, "tp": 2}, numeric=True)
    assert report.ok, str(report)
    assert "loss and 16 gradients equal" in str(report)


def test_a_mean_of_means_is_noted_where_the_last_rank_has_fewer_rows():
    report = check(mesh={"dp": 3})
    assert report.ok and report.numeric
    assert "with one row fewer on dp rank 2 they do not: the loss is" in report.details(), report.details()
    assert "drop_last=True" in report.details()


def test_a_mean_over_all_rows_is_not_noted():
    def step(model, optimizer, x):
        rows = comm.all_reduce(torch.tensor(len(x), dtype=x.dtype), "dp")
        (model(x).square().sum() * comm.size("dp") / rows).backward()
        nxd.reduce_gradients(model)
        optimizer.step()

    report = spmd.check(lambda: nn.Linear(4, 2), torch.ones(2, 4), {"dp": 2}, step=step, numeric=True)
    assert report.numeric and report.notes == ["2 gradients equal those of one process"], report.details()


def test_a_count_that_became_a_plain_number_is_told_from_a_sum_of_equal_values():
    def step(model, optimizer, x):
        rows = comm.all_reduce(torch.tensor(float(len(x))), "dp")
        (model(x).square().sum() * comm.size("dp") / rows).backward()

    report = spmd.check(lambda: nn.Linear(4, 2), torch.ones(2, 4), {"dp": 2}, step=step)
    first = report.problems[0].message.partition("repair: ")[2]
    assert first.startswith("torch.tensor(n, dtype=...) with n = len(x)"), report


def test_shapes_that_fit_equal_batches_alone_are_noted():
    def step(model, optimizer, x):
        model(x).square().view(2, -1).mean().backward()
        nxd.reduce_gradients(model)
        optimizer.step()

    report = spmd.check(lambda: nn.Linear(4, 1), torch.ones(2, 4), {"dp": 2}, step=step, numeric=True)
    assert report.numeric and "not compared with one row fewer on dp rank 1: RuntimeError: shape" in report.details()


def test_inputs_that_a_function_makes_are_each_ranks_part_of_one_batch():
    whole = torch.linspace(-1, 1, 8 * models.HIDDEN).view(8, models.HIDDEN)

    def mine():
        rows = 8 // comm.size("dp")
        start = comm.rank("dp") * rows
        return whole[start : start + rows]

    assert check(inputs=lambda: mine).ok


@pytest.mark.parametrize("factor", [1, 3])
def test_a_step_of_its_own_is_compared_by_the_gradients_that_its_optimizer_is_given(factor):
    def step(model, optimizer, x):
        (factor * model(x) if comm.size("world") > 1 else model(x)).backward()
        nxd.reduce_gradients(model)
        optimizer.step()

    report = spmd.check(Mean, models.example_inputs(), MESH, step=step, numeric=True)
    assert report.numeric
    if factor == 1:
        assert report.ok and "4 gradients equal those of one process" in report.details()
    else:
        assert "3 times that of one process" in report.problems[0].message


def test_a_step_that_cannot_be_compared_says_so():
    def step(model, optimizer, x):
        model(x).backward()
        nxd.reduce_gradients(model, average_over_data=False)
        optimizer.step()

    zero1 = dict(optimizer=lambda params: nxd.NeuronZero1Optimizer(params, torch.optim.SGD, lr=0.1))
    report = spmd.check(Mean, models.example_inputs(), MESH, step=step, numeric=True, **zero1)
    assert report.ok and not report.numeric and "values not compared" in str(report)


def test_a_mean_over_data_that_was_forgotten_is_seen():
    """Data-parallel ranks get inputs of their own, so that a rank's gradient is not the mean."""

    def step(model, optimizer, x):
        model(x).backward()
        optimizer.step()

    notes: list[str] = []
    subject = Subject(Mean, models.example_inputs(), step=step)
    problems = compare_values(subject, Mesh(2), Deadline(None), notes)
    assert problems is not None and "the gradient of " in problems[0].message, notes


def test_a_scale_that_is_wrong_by_a_thousandth_is_seen():
    def step(model, optimizer, x):
        ((1.001 if comm.size("world") > 1 else 1) * model(x)).backward()
        nxd.reduce_gradients(model)
        optimizer.step()

    report = spmd.check(Mean, models.example_inputs(), MESH, step=step, numeric=True)
    assert "1.001 times that of one process" in report.problems[0].message


class Classifier(nn.Module):
    def __init__(self, local_mean: bool) -> None:
        super().__init__()
        self.linear, self.local_mean = nn.Linear(4, 5), local_mean

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.linear(x)
        if self.local_mean:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        items = nxd.global_num_items(labels, shift=False, dtype=logits.dtype)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / items


@pytest.mark.parametrize("numeric", [False, True])
@pytest.mark.parametrize("local_mean", [False, True])
def test_ranks_have_other_numbers_of_labels_that_count(local_mean, numeric):
    labels = torch.tensor([[0, 1, 2, 3], [4, 0, -100, -100]])
    report = spmd.check(lambda: Classifier(local_mean), (torch.ones(2, 4, 4), labels), {"dp": 2}, numeric=numeric)
    assert report.ok == (not (local_mean and numeric)), str(report)
    assert any("as many targets count" in text for text in report.assumed) == local_mean
