"""Pipeline models that are hard on a pipeline are ok under the check, at any number of stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.gradients import buckets
from tests.checking.programs import checked_models
from tests.support import pipeline_models as models
from tests.support.paths import file_name

ROWS = models.BATCH


class Summed(models.Model):
    """The loss is a sum, whose gradients are averaged over the data."""

    def loss(self, x, labels):
        logits = self.head(self.norm(x))
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total * comm.size("dp") / 100


class Tupled(Summed):
    def loss(self, x, labels):
        return super().loss(x, labels), x


class Named(Summed):
    def loss(self, x, labels):
        return {"loss": super().loss(x, labels), "hidden": x}


class Skipping(Summed):
    """A model whose last stage uses the embedding's result again; its blocks pass on tuples with a mask."""

    def body(self, x):
        first = x
        mask = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        for layer in self.layers:
            x = layer(x, mask)
        return x + first


CASES = {
    "loss": (Summed, {}, True),
    "tied": (Summed, dict(tied=True), True),
    "tuple": (Tupled, {}, (True, False)),
    "dict": (Named, {}, {"loss": True, "hidden": False}),
    "skip": (Skipping, {}, True),
    "skip, tied": (Skipping, dict(tied=True), True),
}


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("mesh", [{"pp": 1, "dp": 2}, {"pp": 2, "dp": 2}, {"pp": 4}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_model_is_ok(name, mesh):
    model_class, options, spec = CASES[name]

    def model_fn():
        return nxd.NxDPPModel(
            model_class(**options),
            transformer_layer_cls=models.Block,
            num_microbatches=2,
            input_names=["ids", "labels"],
            output_loss_value_spec=spec,
            auto_partition=True,
        )

    report = spmd.check(model_fn, models.batch(ROWS), mesh)
    assert report.ok, str(report)
    assert not report.assumed and all(file_name(buckets) in line for line in report.trusted)


@pytest.mark.slow
def test_backwards_in_halves_are_ok():
    """The checker sees whole backwards: nothing is assumed of the gradients that a half makes."""

    def model_fn():
        return nxd.NxDPPModel(
            Summed(tied=True),
            transformer_layer_cls=models.Block,
            num_microbatches=2,
            input_names=["ids", "labels"],
            output_loss_value_spec=True,
            auto_partition=True,
            schedule="zb_h1",
        )

    report = spmd.check(model_fn, models.batch(ROWS), {"pp": 2, "dp": 2})
    assert report.ok, str(report)
    assert not report.assumed


@pytest.mark.slow
def test_ranks_that_differ_along_dp_alone_run_one_program():
    """A second rank of each kind is played after the first has stepped: it must not seem to do something else."""
    mesh, options = {"pp": 2, "dp": 2, "tp": 2}, {"zero1": True}
    report = spmd.check(checked_models.pipeline, checked_models.pipeline_inputs, mesh, options=options)
    assert report.ok and report.programs == 4  # by pp, and by tp: replicated parameters count for the norm once
