"""Recomputed spans: less is kept for backward, and all values are equal to the bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, IRGraph, parallelize
from neuronx_dist.parallelize.policy.operations import IRFwOperation
from neuronx_dist.program.recording import TracingError
from neuronx_dist.spmd.random import manual_seed
from tests.parallelize.support.models import WIDTH
from tests.parallelize.support.pipelines import accumulated, assert_same, config, pipelined

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Blocks(nn.Module):
    """Dropout, a span without gradients, and a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)) for _ in range(3)])
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            with torch.no_grad():
                scale = x.abs().mean()
            hidden = F.dropout(F.gelu(block[0](x)), 0.3, self.training)
            x = x + block[1](torch.tanh(hidden)) / scale
        return self.norm(x).pow(2).sum()


def _recomputed(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    for number in range(3):
        graph.recompute(graph.select(ntype=IRFwOperation, module=f"blocks.{number}"))
    graph.recompute([node for node in graph.operations if node.name in ("gelu", "dropout", "tanh", "batch_norm")])
    for module in ("blocks.*.0", "blocks.*.1"):
        for node in graph.select(name="linear", module=module):
            graph.shard(node.module, weight=int(node.module.endswith("1"))) if graph.size > 1 else None
    return graph


def _kept(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    graph = _recomputed(graph, config)
    for node in graph.operations:
        node.recompute = False
    return graph


def _step(policy: Any, size: int, folder: Path | str) -> tuple[int, list[torch.Tensor]]:
    """Bytes that this rank saves for backward, and the loss, gradients and buffers of two steps."""
    torch.manual_seed(0)
    whole, x = Blocks().double(), torch.randn(8, WIDTH).double()
    manual_seed(comm.current().rank)
    parallel = parallelize(whole, {"x": x}, policy, ComputeConfig(size), gen_savedir=folder)
    saved: dict[int, int] = {}
    values = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = parallel(x)
        loss.backward()
        values += [loss.detach(), *(p.grad.clone() for p in parallel.parameters())]
    return sum(saved.values()), [*values, *(b.clone() for b in parallel.buffers())]


def _both(size: int, folder: str) -> list[tuple[int, list[torch.Tensor]]]:
    return [_step(_kept, size, f"{folder}/kept"), _step(_recomputed, size, f"{folder}/again")]


def assert_recomputed(saved: tuple[int, list[torch.Tensor]], again: tuple[int, list[torch.Tensor]]) -> None:
    """Fewer bytes are saved for backward, and all values are equal to the bit."""
    assert again[0] < 0.7 * saved[0]
    for has, wanted in zip(again[1], saved[1], strict=True):
        assert torch.equal(has, wanted)


@pytest.mark.slow
def test_less_is_saved_and_values_are_equal_to_the_bit(tmp_path: Path) -> None:
    (steps,) = threads.run(ComputeConfig(1).mesh(), _both, 1, str(tmp_path))
    assert_recomputed(*steps)


@pytest.mark.slow
def test_less_is_saved_on_two_ranks(tmp_path: Path) -> None:
    for steps in threads.run(ComputeConfig(2).mesh(), _both, 2, str(tmp_path)):
        assert_recomputed(*steps)


def test_the_file_says_what_is_computed_again(tmp_path: Path) -> None:
    threads.run(ComputeConfig(1).mesh(), _step, _recomputed, 1, tmp_path)
    (file,) = tmp_path.rglob("gencode0.py")
    source = file.read_text()
    assert "from neuronx_dist.spmd.random import checkpoint" in source
    assert source.count("= checkpoint(recomputed_") == source.count("def recomputed_") > 0
    span = source.partition("def recomputed_0")[2].partition("checkpoint(")[0]
    assert "batch_norm" not in span  # it writes its statistics, which would be written twice


@pytest.mark.slow
def test_spans_in_pipeline_stages(tmp_path: Path) -> None:
    """A span goes over the cut between two stages: each stage recomputes its part."""

    def policy(graph: IRGraph, config: ComputeConfig) -> IRGraph:
        graph.recompute(graph.select(ntype=IRFwOperation, module="blocks"))
        graph.pipeline_ranks = 2
        return config.apply_pipeline_scheduler(graph, 2, 4, "1f1b")

    has = pipelined("gpt", SGD, 2, config(4), 2, tmp_path, policy)
    assert_same(has, accumulated("gpt", SGD, 2, 1), 1)
    (file,) = tmp_path.rglob("gencode0.py")
    *_, first, second = file.read_text().split("def stage_")
    stages, layer = [first, *second.split("def _blocks")[:1]], second.split("def _blocks")[1]
    assert all("self._blocks(self.blocks[" in stage for stage in stages) and "= checkpoint(recomputed_0" in layer


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(torch.relu(self.up(x)))).square().mean()


def test_what_a_span_is_given_is_not_written(tmp_path: Path) -> None:
    """The product is made outside of the span, and reduced inside: again in backward, of the same partial sums."""

    def policy(graph: IRGraph, config: ComputeConfig) -> IRGraph:
        graph.shard("up", weight=0)
        graph.shard("down", weight=1)
        graph.recompute(graph.select(name="tanh"))
        return graph

    torch.manual_seed(0)
    arguments = {"x": torch.randn(4, 8, dtype=torch.float64)}
    parallelize(
        _Residual().double(), arguments, policy, ComputeConfig(2, 2), gen_savedir=tmp_path, load_module=False
    )  # values are compared
    (source,) = (file.read_text() for file in tmp_path.rglob("gencode0.py"))
    assert "all_reduce" in source.partition("def recomputed_0")[2].partition("checkpoint(")[0]


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize(
    "names, spans",
    [
        ("Block", 2),
        ("test_recompute.Block", 2),
        ("0.1", 1),
        ("0.0, 0.1", 2),
        ("Tanh,0.0", 2),
        ("norms", 1),
        ("full", 2),
    ],
)
def test_modules_are_recomputed_by_the_end_of_their_path_or_by_their_class(
    names: str, spans: int, tmp_path: Path
) -> None:
    module = nn.Sequential(nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH))
    module._no_split_modules = ["Block"]  # type: ignore[assignment] # as a Hugging Face model has it
    config = ComputeConfig(1, 1, pas_config={"recompute_modules": names})
    arguments = {"input": torch.ones(4, WIDTH)}
    parallelize(module, arguments, "autodist", config, gen_savedir=tmp_path, load_module=False)
    assert next(tmp_path.rglob("gencode0.py")).read_text().count(" = checkpoint(") == spans


def test_attention_and_offload_are_refused_by_name(tmp_path: Path) -> None:
    module, arguments = nn.Sequential(Block(), Block()), {"input": torch.ones(4, WIDTH)}
    config = ComputeConfig(1, 1, pas_config={"recompute_modules": "attention"})
    with pytest.raises(ValueError, match=r"call neuronx_dist.recompute\(module, 'attention'\) before parallelize"):
        parallelize(module, arguments, "autodist", config, gen_savedir=tmp_path, load_module=False)
    nxd.recompute(module, Block, offload=True)
    with pytest.raises(TracingError, match=r"saved_tensors_hooks \(_to_host, .*leave out offload"):
        parallelize(module, arguments, "dp", ComputeConfig(1, 1), gen_savedir=tmp_path, load_module=False)


def test_adjacent_spans_of_two_calls_stay_two(tmp_path: Path) -> None:
    """Layer after layer: one span of all layers would hold all their values at once in backward. A plan has both."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    plan = tmp_path / "plan.json"
    saving = {"recompute_modules": "0,1,2,3", "save_plan_path": str(plan)}
    for policy, options in (("autodist", saving), (str(plan), {})):
        folder = tmp_path / policy.replace("/", "_")
        compute = ComputeConfig(1, 1, pas_config=options)
        parallelize(module, {"input": torch.ones(4, WIDTH)}, policy, compute, gen_savedir=folder, load_module=False)
        assert next(folder.rglob("gencode0.py")).read_text().count(" = checkpoint(") == 4
