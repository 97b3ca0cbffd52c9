"""The module's own activation checkpoints are in the program: as little is kept as in one process, values are equal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, IRGraph, parallelize
from neuronx_dist.parallelize.policy.plans import plan_of
from neuronx_dist.parallelize.policy.policies import divide
from neuronx_dist.planning.plan import Plan
from neuronx_dist.program.record import record_program
from neuronx_dist.program.recording import TracingError
from neuronx_dist.spmd.random import manual_seed
from tests.parallelize.support.hf_models import hf_model
from tests.parallelize.support.models import WIDTH
from tests.parallelize.support.pipelines import (
    MODULES,
    GptSample,
    accumulated,
    assert_same,
    config,
    gpt_sample,
    pipelined,
)
from tests.parallelize.support.training import SGD

pytestmark = pytest.mark.slow

INPUT_BYTES = 8 * WIDTH * 8  # of a block
HOW: dict[str, Any] = {
    "kept": lambda block: block,
    "reentrant": lambda block: functools.partial(checkpoint, block, use_reentrant=True),
    "not reentrant": lambda block: functools.partial(checkpoint, block, use_reentrant=False),
    "of this package": lambda block: functools.partial(nxd.spmd.random.checkpoint, block),
    "nested": lambda block: functools.partial(
        checkpoint, lambda x: x + checkpoint(block, x, use_reentrant=False), use_reentrant=False
    ),
    "nested, kept": lambda block: lambda x: x + block(x),
    "nested, reentrant": lambda block: functools.partial(
        checkpoint, lambda x: x + checkpoint(block, x, use_reentrant=True), use_reentrant=True
    ),
}


class Dropping(nn.Module):
    """Blocks with dropout, each in a checkpoint."""

    def __init__(self, how: str, blocks: int = 3) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.ups = nn.ModuleList([nn.Linear(WIDTH, 64) for _ in range(blocks)])
        self.downs = nn.ModuleList([nn.Linear(64, WIDTH) for _ in range(blocks)])

    def block(self, number: int, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(F.gelu(self.ups[number](x)), 0.3, self.training)
        return x + self.downs[number](torch.tanh(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for number in range(len(self.ups)):
            x = HOW[self.how](functools.partial(self.block, number))(x)
        return x.pow(2).sum()


def _saved(parameters: set[int], step: Callable[[], Any]) -> tuple[Any, int]:
    """A result, and the bytes of activations that are alive because of it."""
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = step()
    return result, sum(sizes.values())


Step = tuple[int, list[torch.Tensor]]


def _steps(module: nn.Module, **arguments: Any) -> Step:
    """The bytes that are saved for backward, and the loss and gradients of two steps."""
    values, most = [], 0
    parameters = {tensor.untyped_storage().data_ptr() for tensor in module.parameters()}
    for _ in range(2):
        module.zero_grad()
        result, saved = _saved(parameters, lambda: module(**arguments))
        loss = result if isinstance(result, torch.Tensor) else result["loss"]
        loss.backward()
        values += [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
        most = max(most, saved)
    return most, values


def _made(how: str) -> tuple[Dropping, torch.Tensor]:
    torch.manual_seed(0)
    return Dropping(how).double(), torch.randn(8, WIDTH).double()


def _one_process(how: str) -> Step:
    whole, x = _made(how)
    with comm.as_rank(ComputeConfig(1).mesh(), 0):
        manual_seed(0)
        return _steps(whole, x=x)


def _rank_steps(how: str, size: int, folder: Path) -> Step:
    whole, x = _made(how)
    parallel = parallelize(whole, {"x": x}, "tp", ComputeConfig(size), gen_savedir=folder / how)
    manual_seed(0)
    return _steps(parallel, x=x)


def _parallel(how: str, size: int, folder: Path) -> list[Step]:
    return threads.run(ComputeConfig(size).mesh(), _rank_steps, how, size, folder)


def _assert_same_bits(has: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(has) == len(wanted) > 2
    for one, other in zip(has, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "of this package", "nested", "nested, reentrant"])
def test_one_rank_keeps_as_little_as_one_process(how: str, tmp_path: Path) -> None:
    """Values are equal to the bit to those of the module itself, dropout included, and to what keeps all."""
    saved, values = _parallel(how, 1, tmp_path)[0]
    most, expected = _parallel("nested, kept" if how.startswith("nested") else "kept", 1, tmp_path)[0]
    _assert_same_bits(values, expected)
    assert saved < most / 3
    kept_in_one_process, values_in_one_process = _one_process(how)
    if how == "nested, reentrant":  # a backward inside of another adds up three gradients in another order
        torch.testing.assert_close(values, values_in_one_process, rtol=1e-13, atol=1e-13)
        return
    _assert_same_bits(values, values_in_one_process)
    assert saved <= kept_in_one_process + 3 * INPUT_BYTES  # torch holds the inputs of a checkpoint without a hook


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "nested"])
def test_shards_are_computed_again(how: str, tmp_path: Path) -> None:
    without = _parallel("nested, kept" if how == "nested" else "kept", 2, tmp_path)
    for (saved, values), (most, expected) in zip(_parallel(how, 2, tmp_path), without, strict=True):
        _assert_same_bits(values, expected)
        assert saved < most / 2


def test_a_span_may_lie_in_another(tmp_path: Path) -> None:
    _parallel("nested", 1, tmp_path)
    (file,) = tmp_path.rglob("gencode0.py")
    training = file.read_text().partition("def train_forward")[2].partition("def eval_forward")[0]
    lines = training.splitlines()
    assert [line.count("    ") for line in lines if "= checkpoint(recomputed_" in line] == [3, 2] * 3


def test_a_policy_may_keep_what_the_module_computes_again_and_a_plan_has_the_spans(tmp_path: Path) -> None:
    whole, x = _made("nested")
    program = record_program(whole, {"x": x}, training=True)
    division = divide(program, "dp", ComputeConfig(1))
    outer, inner = division.recompute[::2], division.recompute[1::2]
    assert len(outer) == len(inner) == 3
    assert all(a <= c < d < b for (a, b), (c, d) in zip(outer, inner, strict=True))
    plan = plan_of(division)
    plan.save(tmp_path / "plan.json")
    again = divide(record_program(whole, {"x": x}, training=True), Plan.load(tmp_path / "plan.json"), ComputeConfig(1))
    assert again.recompute == division.recompute

    def keeping(graph: IRGraph, config: ComputeConfig) -> IRGraph:
        for node in graph.operations:
            node.recompute = False
        return graph

    assert divide(program, keeping, ComputeConfig(1)).recompute == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.each_value
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "name, size",
    [
        ("llama", 1),
        ("llama", 2),
        *(pytest.param(architecture, 2, marks=pytest.mark.full) for architecture in ("t5", "mixtral")),
    ],
)
def test_gradient_checkpointing_of_hugging_face(name: str, size: int, reentrant: bool, tmp_path: Path) -> None:
    module, arguments = hf_model(name)
    module.train()
    config = ComputeConfig(size)

    def rank() -> Step:
        parallel = parallelize(module, arguments, "tp", config, gen_savedir=tmp_path, reuse="override")
        return _steps(parallel, **arguments)

    most = threads.run(config.mesh(), rank)[0][0]
    module.gradient_checkpointing_enable({"use_reentrant": reentrant})
    _, expected = _steps(module, **arguments)
    ranks = threads.run(config.mesh(), rank)
    assert all(saved < most * 0.6 for saved, _ in ranks)
    if size == 1:
        _assert_same_bits(ranks[0][1], expected)
    assert ranks[0][1][0] == pytest.approx(float(expected[0]), rel=1e-12)


@pytest.mark.parametrize("what", ["attention", "norms"])
def test_parts_that_recompute_names_are_spans(what: str, tmp_path: Path) -> None:
    """Losses and gradients of a rank are those of the module in one process, and less is saved."""
    module, arguments = hf_model("llama")
    module.train()
    module.config._attn_implementation = "eager"
    saved = []
    for words in ([], [what]):
        nxd.recompute(module, words)
        _, values = _steps(module, **arguments)

        def rank() -> Step:
            parallel = parallelize(module, arguments, "tp", ComputeConfig(1), gen_savedir=tmp_path / str(words))  # noqa: B023
            return _steps(parallel, **arguments)

        ((of_rank, has),) = threads.run(ComputeConfig(1).mesh(), rank)
        saved.append(of_rank)
        _assert_same_bits(has, values)
    assert saved[1] < saved[0]


class InOne(GptSample):
    """All blocks are in one checkpoint, without an effect in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.Sequential(*self.blocks)
        self.blocks = nn.ModuleList([Checkpointed(blocks)])


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.training else self.inner(x)


def test_checkpoints_in_pipeline_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One goes over the cut between two stages: each stage recomputes its part."""
    monkeypatch.setitem(MODULES, "in one", (InOne, gpt_sample))
    has = pipelined("in one", SGD, 2, config(2), 2, tmp_path, "pp")
    assert_same(has, accumulated("in one", SGD, 2, 1), 1)
    (file,) = tmp_path.rglob("gencode0.py")
    source = file.read_text()
    training = source.partition("def train_stage_0")[2].partition("def eval_stage_0")[0]
    assert all("= self._inner(" in stage for stage in training.split("def train_stage_1"))
    assert "= checkpoint(recomputed_0" in source.partition("def _inner(")[2].partition("def ")[2]


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.norm(self.linear(x)).tanh(), x, use_reentrant=False).sum()


def test_buffers_are_written_once(tmp_path: Path) -> None:
    """In one process batch norm inside of a checkpoint counts each batch twice."""
    torch.manual_seed(0)
    whole, x = Statistics(), torch.randn(8, WIDTH)

    def rank() -> int:
        parallel = parallelize(whole, {"x": x}, "dp", ComputeConfig(1), gen_savedir=tmp_path)
        parallel(x).backward()
        return int(parallel.norm.num_batches_tracked)

    assert threads.run(ComputeConfig(1).mesh(), rank) == [1]
    whole(x).backward()
    assert whole.norm.num_batches_tracked == 2


def _selective(*_: Any) -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


def _on_cpu(function: Callable[[Any], Any], x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return function(x)


REFUSED = {
    "selective": (
        lambda function, x: checkpoint(function, x, use_reentrant=False, context_fn=_selective),
        r"test_checkpoints.py:\d+: torch.utils.checkpoint has a context_fn.*graph.recompute\(nodes\)",
    ),
    "save_on_cpu": (_on_cpu, r"test_checkpoints.py:\d+: forward runs inside .*save_on_cpu.*around the call"),
    "no gradient": (
        lambda function, x: checkpoint(function, x.detach(), use_reentrant=True),
        r"test_checkpoints.py:\d+: .*use_reentrant=True\) gets no tensor that requires a gradient",
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_forms_that_would_be_lost_are_refused(how: str, tmp_path: Path) -> None:
    around, message = REFUSED[how]

    class Refused(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return around(super().forward, x).sum()

    with pytest.raises(TracingError, match=message):
        parallelize(
            Refused(WIDTH, WIDTH), {"x": torch.ones(2, WIDTH)}, "dp", ComputeConfig(1), gen_savedir=tmp_path,
            load_module=False,
        )  # fmt: skip
    with torch.autograd.graph.save_on_cpu():  # of whoever records
        record_program(nn.Linear(WIDTH, WIDTH), {"input": torch.ones(2, WIDTH)}, training=True)
