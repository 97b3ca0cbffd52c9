"""`parallelize` on real processes, and the example under torchrun's variables."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from neuronx_dist.parallelize import ComputeConfig, build_optimizer, parallelize
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.parallelize.support.models import model
from tests.parallelize.support.parity import batch, trained
from tests.support import forked
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
