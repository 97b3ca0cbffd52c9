"""`parallelize` on real processes, and the example under torchrun's variables."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from neuronx_dist.parallelize import ComputeConfig, build_optimizer, parallelize
from neuronx_dist.parallelize.cli import AggregatedOutputs
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.parallelize.choose.test_whole_tables import towers, whole
from tests.parallelize.support.dlrm import trained as trained_whole
from tests.parallelize.support.models import model
from tests.parallelize.support.parity import batch, trained
from tests.support import forked
from tests.support.paths import ROOT
from tests.support.pool import processes

SGD = partial(torch.optim.SGD, lr=0.1)


def train_on_rank(folder: str) -> dict[str, torch.Tensor]:
    module, arguments = model("gpt")
    config = ComputeConfig(2, 4, use_zero=True)
    rank = torch.distributed.get_rank()
    subfolder = os.path.join(folder, str(rank))  # a folder of its own: rank 0's files are sent
    parallel = parallelize(module, arguments, "tp", config, gen_savedir=subfolder, broadcast_strategy="all")
    optimizer = build_optimizer(parallel, SGD)
    for step in range(3):
        optimizer.zero_grad()
        parallel(**batch(arguments, step, rank // 2)).backward()
        optimizer.step()
    return {name: gather_full(p, spec_of(p)) for name, p in parallel.named_parameters()}


@pytest.mark.process
def test_processes_with_folders_of_their_own(tmp_path: Path) -> None:
    module, arguments = model("gpt")
    wanted = trained(module, arguments, SGD, 3, 2).weights
    for weights in processes(4).run(train_on_rank, str(tmp_path), mesh={"tp": 2}):
        assert weights.keys() == wanted.keys() - {"head.weight"}  # tied: it has its first name alone
        for name, x in weights.items():
            torch.testing.assert_close(x, wanted[name], rtol=1e-9, atol=1e-9)


def train_divided(kind: str, folder: str) -> list[torch.Tensor]:
    """Trains three steps on a rank of two: tables that are each whole on a rank, or of four: two axes."""
    (module, arguments), policy, size = KINDS[kind]()
    ranks = torch.distributed.get_world_size()
    config = ComputeConfig(ranks, ranks, pas_config={"tp_size": size} if size else {})
    subfolder = os.path.join(folder, str(torch.distributed.get_rank()))
    parallel = parallelize(module, arguments, policy, config, gen_savedir=subfolder, broadcast_strategy="all")
    return trained_whole(parallel, arguments, build_optimizer(parallel, SGD))


KINDS: dict[str, Any] = {
    "whole tables": lambda: (towers(), whole, None),
    "two axes": lambda: (model("mlp"), "tp", [2, 2]),
}


@pytest.mark.process
@pytest.mark.parametrize(("kind", "ranks"), [("whole tables", 2), ("two axes", 4)])
def test_divisions_over_processes(kind: str, ranks: int, tmp_path: Path) -> None:
    """Losses, gradients of three steps and weights equal those of one process."""
    module, arguments = KINDS[kind]()[0]
    wanted = trained_whole(module, arguments, SGD(module.parameters()))
    for found in processes(ranks).run(train_divided, kind, str(tmp_path), mesh={"tp": ranks}):
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


CONFIGURATION = """
compute_config: {plan_ngpus: 1, use_end2end: true}
pas_policy: dp
max_train_steps: 2
seed: 0
micro_batch_size: 2
gen_savedir: generated
model: {type: tests.parallelize.cli.test_trainer.Net}
optimizer: {type: torch.optim.Adam, aggregate_outputs_fn: tests.parallelize.test_processes.aggregated}
dataset: {type: tests.parallelize.cli.test_trainer.Rows, train_args: {size: 8}}
"""


def aggregated(outputs: list[Any], group: torch.distributed.ProcessGroup) -> AggregatedOutputs:
    sums = torch.stack([loss for loss, _ in outputs]).sum()
    torch.distributed.all_reduce(sums, group=group)
    return AggregatedOutputs(sums.item(), 2 * len(outputs))


@pytest.mark.slow
@pytest.mark.process
def test_trainer(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIGURATION)
    words = ["-m", "neuronx_dist.parallelize.cli.train", "-f", "config.yaml", "--enable_progress_bar", "false"]
    words += ["--log_progress_every_n_train_steps", "1", "--compute_config.runtime_ngpus", "2"]
    result = forked.run(words, ranks=2, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert result.codes == [0, 0], result.errors
    assert "epoch 0: 2/2 train_loss=" in result.errors[0] and "train_loss" not in result.errors[1]
    assert sorted(path.name for path in (tmp_path / "checkpoints/last").iterdir()) == ["0.ckpt", "1.ckpt"]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", ["conv", pytest.param("gpt2", marks=pytest.mark.full)])
def test_example(name: str) -> None:
    arguments = ["--model", name, "--policy", "tp", "--verify", "--explain", "--steps", "2"]
    result = forked.run(["examples/parallelize.py", *arguments], ranks=2)
    assert result.codes == [0, 0], result.errors
    output = result.outputs[0]
    assert "training in one process gives the same weights" in output and "spmd." in output
    assert ", over 2 ranks:\n" in output and "\n-> " in output and "the program takes " in output
