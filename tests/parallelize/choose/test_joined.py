"""Conversions that are one collective: which ones, their calls and bytes, their costs, and parity with one process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from neuronx_dist import Mesh, comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, explain, parallelize
from neuronx_dist.parallelize.policy.policies import divide
from neuronx_dist.planning.costs import H100, Costs
from neuronx_dist.program.decompose import decomposed
from neuronx_dist.program.record import record_program
from tests.parallelize.support.parity import assert_equal, loss_of, trained, trained_parallel

pytestmark = pytest.mark.slow


class Branches(nn.Module):
    """Attention's and the MLP's part of a parallel residual, each dropped or scaled before they are added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scales = nn.LayerNorm(16), nn.ParameterList([torch.rand(16), torch.rand(24)])
        self.up, self.gate = nn.Linear(16, 32), nn.Linear(16, 32)
        self.down, self.out = nn.Linear(32, 24), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        wide, narrow = self.down(torch.relu(self.up(h))), self.out(torch.tanh(self.gate(h)))
        return x + torch.tanh(narrow * self.scales[0]) + torch.sin(wide * self.scales[1])[..., :16]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Branches() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


class Towers(nn.Module):
    """Two towers of unequal inputs and widths, with an output each."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 16))
        self.text = nn.Sequential(nn.Linear(20, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.image(image), self.text(text)


class OneUnused(Towers):
    """Two towers, of which the loss reads one."""

    def forward(self, image: Tensor, text: Tensor) -> Any:
        image, text = super().forward(image, text)
        return torch.sin(text).square().sum(), torch.sin(image)


class SharedExpert(nn.Module):
    """Routed experts beside a shared one, which is gated behind its sum."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.gate = nn.Linear(16, 4), nn.Linear(16, 1)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(16, 8), nn.SiLU(), nn.Linear(8, 16)) for _ in range(4)])
        self.shared = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        routed = sum(expert(x) * weights[..., i : i + 1] for i, expert in enumerate(self.experts))
        return (x + routed + torch.sigmoid(self.gate(x)) * self.shared(x)).square().mean()


MODELS = {
    "branches": (Stack, {"x": (4, 8, 16)}),
    "towers": (Towers, {"image": (8, 12), "text": (8, 20)}),
    "one unused": (OneUnused, {"image": (8, 12), "text": (8, 20)}),
    "shared expert": (SharedExpert, {"x": (4, 8, 16)}),
}


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, shapes = MODELS[name]
    return model().double(), {key: torch.randn(shape, dtype=torch.float64) for key, shape in shapes.items()}


def step(name: str, policy: str, folder: Path) -> tuple[Counter[str], int, Any]:
    """The collectives of forward and backward over two ranks, by verb, their bytes, and what `explain` says."""
    module, arguments = made(name)

    def rank() -> tuple[Counter[str], int, Any]:
        parallel: Any = parallelize(module, arguments, policy, ComputeConfig(2), gen_savedir=folder)
        with comm.record() as calls:
            loss_of(parallel(**arguments)).backward()
        sent = [call for call in calls if ":" not in call.verb]
        return Counter(call.verb for call in sent), sum(call.bytes for call in sent), explain(parallel)

    return threads.run(Mesh(2, tp=2), rank)[0]


@pytest.mark.parametrize(
    ("name", "policy", "apart", "together"),
    [
        ("branches", "data", {"all_reduce": 25}, {"all_reduce": 3}),
        ("branches", "tp", {"all_reduce": 6}, {"all_reduce": 4}),
        ("towers", "data", {"all_reduce": 8, "all_gather": 2}, {"all_reduce": 4, "all_gather": 1}),
        ("towers", "tp", {"all_reduce": 2}, {"all_reduce": 1}),
        ("shared expert", "data", {"all_reduce": 25}, {"all_reduce": 9}),
    ],
)
def test_equal_collectives_of_a_layer_are_one_call_of_the_same_bytes(
    name: str, policy: str, apart: dict[str, int], together: dict[str, int], tmp_path: Path, monkeypatch: Any
) -> None:
    calls, sent, costs = step(name, policy, tmp_path / "together")
    monkeypatch.setattr(Costs, "joined_bytes", 0.0)
    calls_apart, sent_apart, costs_apart = step(name, policy, tmp_path / "apart")
    assert (calls_apart, calls) == (apart, together)
    assert sent == sent_apart
    saved = sum(apart.values()) - sum(together.values())
    assert (costs["joined_collectives"], costs_apart["joined_collectives"]) == (saved, 0)
    assert costs["gap"] == costs_apart["gap"]
    assert costs["seconds"] == pytest.approx(costs_apart["seconds"] - costs["joined_seconds"])
    assert 0.9 < costs["joined_seconds"] / (saved * H100.link_latency) < 1  # tiny tensors: copies take no time
    assert f"joined: {saved} collectives and" in str(costs)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 4])
@pytest.mark.parametrize(
    ("name", "policy"),
    [("branches", "data"), ("branches", "tp"), ("towers", "data"), ("towers", "tp"), ("shared expert", "data")],
)
def test_joined_programs_train_as_in_one_process(name: str, policy: str, ranks: int, tmp_path: Path) -> None:
    module, arguments = made(name)

    def sgd(parameters: Any) -> torch.optim.SGD:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    wanted = trained(module, arguments, sgd, 3, 1)
    assert_equal(trained_parallel(module, arguments, sgd, 3, ComputeConfig(ranks), policy, tmp_path), wanted, 1e-10)
    assert "spmd.together(" in "".join(file.read_text() for file in tmp_path.rglob("*.py"))


def test_parameters_before_an_unused_result_of_joined_collectives_have_no_gradient(tmp_path: Path) -> None:
    module, arguments = made("one unused")
    wanted = trained(module, arguments, torch.optim.SGD, 1, 1)
    assert sum(x is None for x in wanted.gradients.values()) == 4
    has = trained_parallel(module, arguments, torch.optim.SGD, 1, ComputeConfig(2), "tp", tmp_path)
    assert_equal(has, wanted, 1e-10)
    assert "spmd.together(" in "".join(file.read_text() for file in tmp_path.rglob("*.py"))


def test_a_tensor_is_joined_if_its_copy_takes_half_of_a_call_s_latency() -> None:
    """64 kB are copied in 66 us at 2 GB/s: their sum is one with the bias's at 150 us a call, and not at 50 us."""
    module = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    program = decomposed(record_program(module, {"input": torch.randn(4096, 128)}, training=True))
    for latency, calls in ((150e-6, 2), (50e-6, 4)):
        costs = Costs(1e12, bandwidth=2e9, launch=0.0, link_bandwidth=1e12, link_latency=latency)
        division = divide(program, "data", ComputeConfig(2, pas_config={"costs": costs}))
        assert division.costs is not None
        (entry,) = [row for row in division.costs()["collectives"] if row["operator"] == "convert"]
        assert entry["times"] == calls
