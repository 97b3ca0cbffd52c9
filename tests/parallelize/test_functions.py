"""Functions of others in a recording: autograd functions, kernels that need values; other architectures; speed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from neuronx_dist import Mesh
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, parallelize
from neuronx_dist.planning.costs import CPU
from neuronx_dist.program.record import record_program
from neuronx_dist.program.recording import TracingError
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.parallelize.support.programs import Function, assert_equal, sample
from tests.support.architectures import ARCHITECTURES


class Calling(nn.Module):
    """A layer, called in a way of the test's."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any] = lambda layer, x: layer(x)) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self.layer, x)


class Scaled(torch.autograd.Function):
    """x * w and x + 1, with a backward of its own: twice the gradient of w."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, w)
        return x * w, x + 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return gradients[0] * w + gradients[1], 2 * gradients[0] * x


def test_autograd_functions_are_one_call() -> None:
    program = assert_equal(Function(lambda self, x: sum(Scaled.apply(x, self.weight))), {"x": sample()})
    first = program.calls[0]
    assert first.name == "apply" and first.function.__self__ is Scaled and first.several  # type: ignore[attr-defined]


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
        self.layer = nn.Linear(5, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(sum(Scaled.apply(x, self.weight)) ** 2)


def test_an_autograd_function_without_a_registration_is_computed_whole(tmp_path: Path) -> None:
    """BLOOM's GELU. Its class is imported by the file, and the recorded program is saved for `ReuseType.GRAPH`."""
    module, x = Unregistered(), sample()

    def rank() -> list[torch.Tensor]:
        parallel = parallelize(module, {"x": x}, "tp", ComputeConfig(2, 2), gen_savedir=tmp_path)
        result = parallel(x)
        result.square().sum().backward()
        return [result.detach(), *(gather_full(p.grad, spec_of(p)) for p in parallel.parameters())]

    ranks = threads.run(Mesh(2, tp=2), rank)
    result = module(x)
    result.square().sum().backward()
    for computed in ranks:
        for a, b in zip(computed, [result, *(p.grad for p in module.parameters())], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert "= Scaled.apply(" in next(tmp_path.rglob("gencode0.py")).read_text()
    assert '["", "' + __name__ + '", "Scaled.apply"]' in next(tmp_path.rglob("programs.json")).read_text()


class WithoutSecond(Scaled):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
        ctx.save_for_backward(x, w)
        return x * w, None


def test_results_that_are_not_all_tensors() -> None:
    with pytest.raises(TracingError, match=rf"{__file__}:\d+: apply returns tensors in nested containers, or mixed"):
        record_program(Function(lambda self, x: WithoutSecond.apply(x, self.weight)[0]), {"x": sample()}, training=True)


@pytest.mark.parametrize("options", [{}, {"need_weights": False}, {"average_attn_weights": False}])
def test_functions_written_in_python_are_looked_into(options: dict[str, bool]) -> None:
    """Multi-head attention is products and a softmax, which have strategies."""
    module = Calling(nn.MultiheadAttention(8, 2, dropout=0.2), lambda layer, x: layer(x, x, x, **options))
    program = assert_equal(module, {"x": torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0))})
    names = [call.name for call in program.calls]
    assert names.count("linear") == 2 and "multi_head_attention_forward" not in names
    assert all(call.where.startswith(__file__) and call.module == "layer" for call in program.calls)


def experts(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *projections: torch.Tensor) -> torch.Tensor:
    """Mixtral's experts, which ask which of them have tokens; told to modes as one call, as torch's functions are."""
    if has_torch_function((x,)):
        return handle_torch_function(experts, (x,), x, chosen, weights, *projections)  # type: ignore[no-any-return]
    gate_up, down = projections
    total = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        token, position = torch.where(chosen == expert)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        result = F.linear(F.silu(gate) * up, down[expert]) * weights[token, position, None]
        total.index_add_(0, token, result)
    return total


MIXTRAL = next(architecture for architecture in ARCHITECTURES if architecture.name == "Mixtral")


def test_functions_that_need_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral in float64, with its experts as a function."""
    monkeypatch.setattr(
        transformers.models.mixtral.modeling_mixtral.MixtralExperts,
        "forward",
        lambda self, *args: experts(*args, self.gate_up_proj, self.down_proj),
    )
    program = assert_equal(MIXTRAL.make(2), MIXTRAL.inputs())
    assert [call.function for call in program.calls].count(experts) == 2


@pytest.mark.slow
def test_grouped_products(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Mixtral's experts, in any implementation, are recorded as products of groups, which tp cuts as Megatron does."""
    model = MIXTRAL.make(2).float()
    model.config._experts_implementation = "grouped_mm"
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.Logger, "handle", lambda self, record: logged.append(record))
    program = record_program(model, MIXTRAL.inputs(), training=True)
    assert [call.name for call in program.calls].count("expert_product") == 4
    assert model.config._experts_implementation == "grouped_mm"
    assert not [record for record in logged if record.levelno >= logging.ERROR]
    config = ComputeConfig(2, 2, pas_config={"costs": replace(CPU, flops=1e6)})  # so slow that all is divided
    parallelize(model, MIXTRAL.inputs(), "tp", config, gen_savedir=tmp_path, load_module=False)
    assert "values: equal to one process" in next(tmp_path.rglob("proof.txt")).read_text()
    costs = json.loads(next(tmp_path.rglob("plan.json")).read_text())["costs"]
    strategies = {row["strategy"] for row in costs["calls"] if row["function"] == "expert_product"}
    assert strategies == {"S(2, stride=2) of operand 1", "S(1) of operand 0"}  # columns, and rows


def test_a_complex_buffer_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(4, 4)
    module.register_buffer("turns", torch.ones(4, dtype=torch.complex64))
    with pytest.raises(ValueError, match="turns has dtype torch.complex64, .*: hold torch.view_as_real of it"):
        parallelize(module, {"input": torch.ones(2, 4)}, "tp", ComputeConfig(2, 2), gen_savedir=tmp_path)


def test_a_sparse_buffer_is_refused(tmp_path: Path) -> None:
    """OpenAI's Whisper has one, which its forward does not read."""
    module = nn.Linear(4, 4)
    module.register_buffer("heads", torch.eye(4).to_sparse(), persistent=False)
    with pytest.raises(ValueError, match=r"Linear: heads has layout torch.sparse_coo, .* or delete it"):
        parallelize(module, {"input": torch.ones(2, 4)}, "tp", ComputeConfig(2, 2), gen_savedir=tmp_path)


def test_what_fails_on_values_too_says_why() -> None:
    with pytest.raises(RuntimeError, match="broadcast|must match"):
        record_program(Function(lambda self, x: x[:2] + self.weight[:3]), {"x": sample()}, training=True)


def images() -> dict[str, torch.Tensor]:
    pixels = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


@pytest.mark.parametrize("training", [True, False])
def test_resnet(training: bool) -> None:
    """`hidden_state += residual`; batch norm."""
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    program = assert_equal(transformers.ResNetForImageClassification(config).double(), images(), training)
    written = [call.name for call in program.calls if call.writes]
    assert set(written) == ({"batch_norm", "copy_"} if training else set())


def test_dropout_of_a_model_draws_the_same() -> None:
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, drop_path_rate=0.5)
    pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    arguments = {"pixel_values": pixels, "labels": torch.tensor([0, 1, 1, 0])}
    program = assert_equal(transformers.ConvNextForImageClassification(config), arguments)
    assert any(call.random for call in program.calls)


@pytest.mark.parametrize("training", [True, False])
def test_layers_of_torch(training: bool) -> None:
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    for layer in (
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
        nn.LSTM(16, 8, batch_first=True),
        nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
        nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4)),
        nn.Sequential(nn.Conv1d(6, 4, 3), nn.GroupNorm(2, 4), nn.PReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten()),
    ):
        with torch.random.fork_rng():
            assert_equal(Calling(layer), {"x": x}, training)


@pytest.mark.slow
def test_recording_takes_less_than_two_milliseconds_a_call() -> None:
    """Seconds of CPU count, and 32 layers take at most 1.5 times as much a call as 4: nothing is quadratic."""
    llama, per_call = ARCHITECTURES[0], []
    for layers in (1, 4, 32):  # the first one imports
        model = llama.make(layers)
        start = time.process_time()
        program = record_program(model, llama.inputs(), training=True)
        per_call.append((time.process_time() - start) / len(program.calls))
    assert len(program.calls) > 1700
    assert per_call[1] < 2e-3 and per_call[2] < 1.5 * per_call[1] + 5e-4
