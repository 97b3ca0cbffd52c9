"""Layers that ask for values: which expert has tokens, a kernel without a fake implementation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import TracingError
from neuronx_dist.program.recorder import record
from neuronx_dist.program.recording import Recording, info_of
from tests.support.pipeline_models import HIDDEN, SEQ, Block, Model, batch, check_parity, make, on_ranks


class Routed(Block):
    """Tokens go to the expert that a gate prefers; experts without tokens do nothing."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 3)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.dropout = nn.Dropout(noise)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        weights = self.gate(self.norm(x)).softmax(-1)
        chosen, y = weights.argmax(-1), torch.zeros_like(x)
        for index in chosen.unique().tolist():
            expert = self.experts[index]
            rows = torch.where(chosen == index)
            y[rows] = expert(x[rows]) * weights[rows][:, index, None]
        return x + self.dropout(y)


class Experts(Model):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed(**options) for _ in range(4))


def recorded(model: nn.Module, leaves: list[type] | None = None) -> Recording:
    with comm.as_rank(Mesh(1), 0):
        return record(model, batch(), leaves or [Block])


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 4])
def test_experts_that_ask_which_of_them_have_tokens(pp: int) -> None:
    check_parity(Mesh(pp, pp=pp), make(Experts), batch(), 4)


def test_recording_changes_nothing_and_draws_no_random_number() -> None:
    model = make(Experts, noise=0.5)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    recording = recorded(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    layers = [info_of(node) for node in recording.calls() if str(node.target).startswith("layers.")]
    assert all(layer.random and layer.writes == layer.buffers != frozenset() for layer in layers)
    assert all(layer.spec == ((8, SEQ, HIDDEN), (SEQ * HIDDEN, HIDDEN, 1), torch.float64, True) for layer in layers)
    assert all(layer.flops > 0 for layer in layers)


def test_a_model_on_meta() -> None:
    """Values are made up; the recording is the same."""
    here = [str(node) for node in recorded(make(Experts)).graph.nodes]
    assert [str(node) for node in recorded(make(Experts).to("meta")).graph.nodes] == here


class OnKernel(Block):
    """A module that asks for a value, writes into its input, and returns a part of it, the input itself and nothing."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        assert x.sum().item() == x.sum().item()
        x.mul_(2.0)
        return super().forward(x), x[:, 1:], x, mask


def test_what_it_changes_and_what_it_returns_of_its_inputs() -> None:
    class Parts(Model):
        def __init__(self) -> None:
            super().__init__(1)
            self.layers[0] = OnKernel()

        def body(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1.0
            y, part, same, nothing = self.layers[0](x)
            assert same is x and nothing is None and part.untyped_storage()._cdata == x.untyped_storage()._cdata
            return y + part.mean() + x

    model = make(Parts)
    recording = recorded(model)
    (call,) = [node for node in recording.calls() if node.target == "layers.0"]
    argument = call.args[0]
    assert info_of(call).writes == {info_of(argument).storage}
    # Written by the layer on the first stage, and read there again before it is sent.
    check_parity(Mesh(2, pp=2), model, batch(), 2, auto_partition=False, pipeline_cuts=["layers.0"])


def test_a_layer_that_fails_raises_what_it_raises() -> None:
    class Wrong(Block):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return self.up(x)[..., : int(x.sum()) * 0 + 3] @ self.down.weight

    class Failing(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1] = Wrong()

    with pytest.raises(TracingError, match="layer layers.1 needs the values of a tensor"):
        recorded(make(Failing))


def test_a_leaf_without_parameters_is_refused_as_before() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    class Branched(Model):
        def __init__(self) -> None:
            super().__init__()
            self.branch = Branching()

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return self.branch(super().body(x))

    with pytest.raises(TracingError, match="layer branch needs the values .* leave it out"):
        recorded(make(Branched), [Block, Branching])


def test_experts_are_trained_and_their_counters_count() -> None:
    """The counter is of the stage that runs the layer: as many calls as there are microbatches, recording aside."""

    def use(pipeline: Any) -> Any:
        pipeline.run_train(**batch())
        return {name: int(buffer) for name, buffer in pipeline.local_named_buffers()}

    ranks = on_ranks(Mesh(2, pp=2), make(Experts), use, num_microbatches=4, output_loss_value_spec=True)
    assert [set(counts.values()) for counts in ranks] == [{4}, {4}]
