"""Checkpoints load into models that were built on meta: straight into the memory that parameters then have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.checkpoint.errors import CheckpointError, CheckpointMismatch
from neuronx_dist.mesh import Mesh
from tests.checkpoint import llama_layouts, nxd_folder
from tests.checkpoint.llama_layouts import Layout
from tests.checkpoint.small_run import Net, Run
from tests.support import llama_training


class Buffered(Net):
    """With a buffer that a checkpoint has, and one that it does not have."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((3,), value))
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(4.0))


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "plain":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return nxd.NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.01, lazy_init=kind == "lazy")


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["plain", "zero1", "lazy"])
@pytest.mark.parametrize("mesh", [Mesh(2, tp=2), Mesh(4)], ids=str)
def test_a_run_goes_on_from_meta(mesh: Mesh, kind: str, tmp_path: Path) -> None:
    """The run that saved makes the same two steps, bit for bit."""

    def saving() -> None:
        run = Run(zero1=kind != "plain")
        run.train(2)
        run.save(tmp_path, "a")

    def rank() -> None:
        expected = Run(zero1=kind != "plain")
        expected.load(tmp_path, "a")
        run = Run(zero1=kind != "plain")
        run.model = on_meta(Net)
        run.optimizer = optimizer_of(run.model, kind)
        run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, 0.5)
        before = {name: id(param) for name, param in run.model.named_parameters()}
        run.load(tmp_path, "a")
        assert {name: id(param) for name, param in run.model.named_parameters()} == before
        assert run.train(2) == expected.train(2)
        assert len(run.values()) == len(expected.values()) and all(map(torch.equal, run.values(), expected.values()))

    comm.threads.run(mesh, saving)
    comm.threads.run(mesh, rank)


def test_masters_of_a_model_on_meta(tmp_path: Path) -> None:
    """Masters come from the checkpoint; they differ from the weights by less than bf16's resolution."""

    def rank() -> None:
        model = Net().to(torch.bfloat16)
        optimizer: Any = optimizer_of(model, "zero1")
        for shard in optimizer.shards:
            shard.set_master(shard.master * (1 + 2.0**-12))
        nxd.save_checkpoint(tmp_path, "a", model, optimizer)
        other = on_meta(lambda: Net().to(torch.bfloat16))
        loaded: Any = optimizer_of(other, "zero1")
        nxd.load_checkpoint(tmp_path, "a", other, loaded)
        for mine, theirs in zip(loaded.shards, optimizer.shards, strict=True):
            assert torch.equal(mine.master, theirs.master)
            assert mine.master.dtype == torch.float32 and not torch.equal(mine.master, mine.master.bfloat16().float())

    comm.threads.run(Mesh(2), rank)


def test_memory_is_that_of_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor that was read into becomes the parameter, without another copy."""
    from neuronx_dist.checkpoint.dcp import reading

    targets: list[int] = []
    fill = reading.fill
    monkeypatch.setattr(
        reading, "fill", lambda target, *rest: (targets.append(target.tensor.data_ptr()), fill(target, *rest))
    )

    def rank() -> None:
        nxd.save_checkpoint(tmp_path, "a", Net())
        model = on_meta(Net)
        nxd.load_checkpoint(tmp_path, "a", model)
        assert sorted(param.data_ptr() for param in model.parameters()) == sorted(targets)

    comm.threads.run(Mesh(1), rank)


def test_buffers(tmp_path: Path) -> None:
    def rank() -> None:
        nxd.save_checkpoint(tmp_path, "a", Buffered(7.0))
        model = on_meta(Buffered)
        nxd.load_checkpoint(tmp_path, "a", model)
        assert model.seen.tolist() == [7.0] * 3
        assert model.table.tolist() == [0.0, 1.0, 2.0, 3.0]

    comm.threads.run(Mesh(2, tp=2), rank)


def test_what_the_checkpoint_lacks_stays_on_meta(tmp_path: Path) -> None:
    def rank() -> None:
        nxd.save_checkpoint(tmp_path, "a", Net())
        model = on_meta(lambda: nn.ModuleDict({"net": Net()}).net)
        model.more = on_meta(lambda: nn.Linear(2, 2))
        with pytest.raises(CheckpointMismatch, match=r"2 missing in it: model.more.weight"):
            nxd.load_checkpoint(tmp_path, "a", model)
        assert all(param.is_meta for param in model.parameters())
        nxd.load_checkpoint(tmp_path, "a", model, strict=False)
        assert [name for name, param in model.named_parameters() if param.is_meta] == ["more.weight", "more.bias"]
        with pytest.raises(ValueError, match=r"more.weight is on the meta device: initialise the model first"):
            nxd.save_checkpoint(tmp_path, "b", model)
        nxd.materialize(model, 0)
        nxd.save_checkpoint(tmp_path, "b", model)

    comm.threads.run(Mesh(2, tp=2), rank)


def test_an_optimizer_that_does_not_fit_leaves_the_model_on_meta(tmp_path: Path) -> None:
    """And another load, of the weights alone, succeeds; so does the optimizer's first step."""

    def rank() -> None:
        run = Run(zero1=True)
        run.train(1)
        run.save(tmp_path, "a")
        model = on_meta(Net)
        optimizer = nxd.NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, lr=0.1, lazy_init=True)
        with pytest.raises(CheckpointError, match="of another optimizer class"):
            nxd.load_checkpoint(tmp_path, "a", model, optimizer)
        assert all(param.is_meta for param in model.parameters())
        nxd.load_checkpoint(tmp_path, "a", model)
        optimizer.init_zero()
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.step()
        assert not any(map(torch.equal, before, model.parameters()))

    comm.threads.run(Mesh(2), rank)


def test_a_folder_of_nxd(tmp_path: Path) -> None:
    value = torch.randn(6, 8)
    nxd_folder.write(tmp_path / "a", {"embed.weight": nxd_folder.Parameter(value, 0)}, 2, 1, optimizer="none")

    def rank() -> None:
        model = on_meta(lambda: nn.ModuleDict({"embed": nxd.ParallelEmbedding(6, 8)}))
        nxd.load_checkpoint(tmp_path, "a", model)
        assert torch.equal(model["embed"].weight, value.chunk(3)[comm.rank("tp")])

    comm.threads.run(Mesh(3, tp=3), rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=4, sequence_parallel=True),
        Layout(pp=2, tp=2, dp=2, microbatches=2),
        pytest.param(Layout(pp=2, microbatches=2, schedule="interleaved"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_llama_on_meta_in_any_layout(layout: Layout, tmp_path: Path) -> None:
    """Tied weights, pipelines, replicated heads and rotary frequencies, which are on meta too."""
    comm.threads.run(Mesh(1), llama_layouts.train_and_save, Layout(optimizer="plain"), tmp_path)

    def rank() -> None:
        expected, other = llama_layouts.make(layout, zeros=True)
        llama_layouts.load(expected, other, tmp_path)
        model = llama_training.build(layout)
        assert all(param.is_meta for param in model.local_parameters())
        optimizer = llama_layouts.optimizer_of(layout, model)
        llama_layouts.load(model, optimizer, tmp_path)
        model.train()
        assert llama_layouts.steps(layout, model, optimizer, 2) == llama_layouts.steps(layout, expected, other, 2)
        assert all(map(torch.equal, model.local_parameters(), expected.local_parameters()))

    comm.threads.run(layout.mesh, rank)
