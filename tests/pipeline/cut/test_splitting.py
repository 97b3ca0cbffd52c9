"""Computations of each stage, and tensors sent between stages."""

from __future__ import annotations

from typing import Any

import torch

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline.cut.splitting import split
from neuronx_dist.program.recorder import record
from tests.pipeline.test_parity import Skip
from tests.support.pipeline_models import SEQ, Block, Model, batch, make


def plans_of(model: torch.nn.Module, cuts: list[str], inputs: dict[str, Any] | None = None) -> Any:
    with comm.as_rank(Mesh(1), 0):
        return split(record(model, inputs or batch(), [Block]), cuts)


def test_calls_between_two_cuts_are_a_stage() -> None:
    plans = plans_of(make(), ["layers.0", "layers.2"])
    assert [[str(node.target) for node in plan.nodes if node.op == "call_module"] for plan in plans] == [
        ["embed", "layers.0"],
        ["layers.1", "layers.2"],
        ["layers.3", "norm", "head"],
    ]
    assert [[node.name for node in plan.sent] for plan in plans] == [["layers_0"], ["layers_2"], []]
    assert [[node.name for node in plan.received] for plan in plans] == [[], ["layers_0"], ["layers_2"]]


def test_values_pass_through_the_stages_between() -> None:
    plans = plans_of(make(Skip), ["layers.0", "layers.1", "layers.2"])
    assert [sorted(node.name for node in plan.sent) for plan in plans] == [
        ["embed", "layers_0"],
        ["embed", "layers_0", "layers_1"],
        ["embed", "layers_0", "layers_1", "layers_2"],
        [],
    ]


def test_what_depends_on_inputs_alone_is_computed_where_it_is_needed() -> None:
    class Masked(Model):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            mask = (ids != 3).double()[:, None, :] * torch.ones(SEQ, SEQ, dtype=torch.float64).tril_()
            x = self.layers[1](self.layers[0](self.embed(ids)), mask)
            return self.loss(self.layers[3](self.layers[2](x), mask), labels)

    plans = plans_of(make(Masked), ["layers.0", "layers.1", "layers.2"])
    assert [sum("mul" in node.name for node in plan.nodes) for plan in plans] == [0, 1, 0, 1]
    assert all(len(plan.sent) == 1 for plan in plans[:3])
    assert [sum(node.name == "tril_" for node in plan.nodes) for plan in plans] == [0, 1, 0, 1]


def test_boundaries_are_known_without_running() -> None:
    plans = plans_of(make(), ["layers.1"])
    spec = plans[0].sent[0].meta["info"].spec
    assert spec == ((8, SEQ, 8), (SEQ * 8, 8, 1), torch.float64, True)
