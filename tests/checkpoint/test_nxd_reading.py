"""Folders that NeuronX Distributed wrote, at tp 2 and pp 2, load into other layouts, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.checkpoint.errors import CheckpointCorrupted, CheckpointMismatch
from neuronx_dist.checkpoint.run_state import collect
from neuronx_dist.mesh import Mesh
from neuronx_dist.weights.shard_spec import ShardSpec, set_spec
from tests.checkpoint import nxd_folder
from tests.checkpoint.nxd_folder import Parameter
from tests.checkpoint.nxd_runs import (
    LAYOUTS,
    Net,
    adamw,
    assert_holds,
    buffers,
    load,
    parameters,
    refused,
    write,
)

pytestmark = pytest.mark.slow


@pytest.mark.each_value
@pytest.mark.parametrize("xser", [False, True], ids=["pt", "xser"])
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_weights_and_the_state_of_zero1(mesh: Mesh, xser: bool, tmp_path: Path) -> None:
    whole = parameters()
    write(tmp_path / "step_7", whole, dp=3, xser=xser, user_content={"step": 7})

    def rank() -> None:
        model, optimizer, content = load(tmp_path)
        assert content == {"step": 7}
        assert_holds(model, optimizer, whole)

    comm.threads.run(mesh, rank)


@pytest.mark.parametrize("tp, pp, dp", [(1, 1, 1), (4, 1, 2), (1, 2, 4)])
def test_from_other_layouts(tp: int, pp: int, dp: int, tmp_path: Path) -> None:
    whole = parameters()
    for x in (*whole.values(), *(extra := buffers()).values()):
        x.stage = min(x.stage, pp - 1)
    nxd_folder.write(tmp_path / "a", whole, tp, pp, dp, buffers=extra, ep=0)
    comm.threads.run(Mesh(4, tp=2), lambda: assert_holds(*load(tmp_path)[:2], whole))


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["plain", "zero1"])
@pytest.mark.parametrize("saved", ["plain", "zero1"])
def test_with_and_without_zero1(kind: str, saved: str, tmp_path: Path) -> None:
    write(tmp_path / "a", optimizer=saved, xser=True, info=False)
    comm.threads.run(Mesh(4, tp=2), lambda: assert_holds(*load(tmp_path, kind=kind)[:2], parameters()))


def test_master_weights(tmp_path: Path) -> None:
    whole = parameters(torch.bfloat16)
    write(tmp_path / "a", whole, masters=True)

    def rank() -> None:
        model = Net().to(torch.bfloat16)
        optimizer = adamw(model)
        nxd.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        masters = {key: x for key, x in collect(model, optimizer).tensors.items() if ".master." in key}
        assert len(masters) == len(whole)
        for key, tensor in masters.items():
            expected = whole[key.removeprefix("optimizer.master.")].state["exp_avg"] * 3
            for piece in tensor.pieces:
                where = tuple(slice(at, at + size) for at, size in zip(piece.offset, piece.shape))
                assert torch.equal(tensor.tensor[piece.local], expected[where]), key

    comm.threads.run(Mesh(4, tp=4), rank)


@pytest.mark.parametrize("tag", [None, "run"])
@pytest.mark.parametrize("xser", [False, True], ids=["pt", "xser"])
def test_what_parallel_layers_checkpointing_wrote(tag: str | None, xser: bool, tmp_path: Path) -> None:
    whole = parameters()
    nxd_folder.write_first_way(tmp_path / (tag or ""), whole | buffers(), 2, 2, xser)
    comm.threads.run(Mesh(4, tp=4), lambda: assert_holds(load(tmp_path, tag, kind=None)[0], None, whole))


def test_padding_and_replicas(tmp_path: Path) -> None:
    """A vocabulary of 11 is padded to 12 there; key/value heads are on two ranks each, in the order of trn1 or trn2."""
    generator = torch.Generator().manual_seed(1)
    embed, key, value = (torch.randn(shape, generator=generator) for shape in ((11, 8), (4, 8), (4, 8)))
    padded = torch.cat([embed, torch.zeros(1, 8)])
    folder = tmp_path / "a"
    nxd_folder.write(
        folder,
        {
            "embed.weight": Parameter(padded, 0),
            "key.weight": Parameter(key.repeat(2, 1), 0),
            "value.weight": Parameter(value.view(2, 2, 8).repeat_interleave(2, 0).reshape(8, 8), 0),
        },
        4,
        1,
        optimizer="none",
    )

    def rank() -> None:
        model = nn.Module()
        model.embed = nxd.ParallelEmbedding(11, 8)
        model.key = nxd.ColumnParallelLinear(8, 4, bias=False)
        model.value = nxd.ColumnParallelLinear(8, 4, bias=False)
        nxd.load_checkpoint(tmp_path, model=model)
        assert torch.equal(model.embed.weight, embed)
        assert torch.equal(model.key.weight, key)
        assert torch.equal(model.value.weight, value)

    comm.threads.run(Mesh(1), rank)


def test_more_rows_than_the_model_has_are_no_padding(tmp_path: Path) -> None:
    whole = parameters()
    whole["head.weight"].value = torch.randn(16, 8)
    write(tmp_path / "a", whole, optimizer="none")

    def rank() -> None:
        with pytest.raises(CheckpointMismatch, match=r"head.weight is \(8, 8\) on each of 2 .* neither padding nor"):
            load(tmp_path, kind=None)

    comm.threads.run(Mesh(1), rank)


def test_tied_weights(tmp_path: Path) -> None:
    """Each stage has its copy; where the copies differ they are no tied weight."""
    whole = parameters()
    whole["head.weight"] = Parameter(whole["embed.weight"].value, 0, 1, 1)
    write(tmp_path / "a", whole, optimizer="none")

    def rank() -> None:
        model = Net()
        model.head.weight = model.embed.weight
        nxd.load_checkpoint(tmp_path, model=model)
        assert_holds(model, None, {name: x for name, x in whole.items() if name != "head.weight"})

    comm.threads.run(Mesh(1), rank)
    shutil.rmtree(tmp_path / "a")
    write(tmp_path / "a", optimizer="none")
    comm.threads.run(Mesh(1), lambda: pytest.raises(CheckpointMismatch, rank).match("two tensors in the checkpoint"))


def test_a_tied_weight_has_one_number(tmp_path: Path) -> None:
    """A stage with both of its names has one state for it."""
    whole = {name: parameter for name, parameter in parameters().items() if name != "head.weight"}
    for x in whole.values():
        x.stage = 0
    twice = {**whole, "head.weight": Parameter(whole["embed.weight"].value, 0)}
    nxd_folder.write(tmp_path / "a", whole, 2, 1)
    for rank in range(2):  # the head is in the middle
        state = {name: x.shard(x.value, rank, 2) for name, x in twice.items() if "layers" not in name}
        state |= {name: x.shard(x.value, rank, 2) for name, x in twice.items() if "layers" in name}
        torch.save(state, tmp_path / "a" / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")

    def rank_of_two() -> None:
        model = Net()
        model.head.weight = model.embed.weight
        optimizer = adamw(model)
        nxd.load_checkpoint(tmp_path, model=model, optimizer=optimizer, strict=False)
        tensors = collect(model, optimizer).tensors
        for name, x in whole.items():
            tensor = tensors[f"optimizer.state.{name}.exp_avg"]
            for piece in tensor.pieces:
                where = tuple(slice(at, at + size) for at, size in zip(piece.offset, piece.shape))
                assert torch.equal(tensor.tensor[piece.local], x.state["exp_avg"][where]), name

    comm.threads.run(Mesh(2, tp=2), rank_of_two)


def test_another_number_of_groups(tmp_path: Path) -> None:
    write(tmp_path / "a", optimizer="plain")
    for file in (tmp_path / "a" / "optim").iterdir():
        state = torch.load(file, weights_only=True)
        torch.save({**state, "param_groups": state["param_groups"] * 2}, file)
    refused(tmp_path, "has 2 parameter groups, but this one has 1: create it with the same groups, or ")


def test_several_groups_and_frozen_parameters(tmp_path: Path) -> None:
    """Numbers go by group: weights first, then biases and norms; a frozen one has none."""
    whole = parameters()
    del whole["embed.weight"].state["exp_avg"]
    order = sorted(whole, key=lambda name: name.endswith("bias"))
    trained = {name: whole[name] for name in order if name != "embed.weight"}
    write(tmp_path / "a", dp=2)
    _write_groups(tmp_path / "a" / "optim", trained)

    def rank() -> None:
        model = Net()
        model.embed.weight.requires_grad_(False)
        biases = [param for name, param in model.named_parameters() if name.endswith("bias")]
        weights = [param for name, param in model.named_parameters() if not name.endswith("bias")]
        groups = [dict(params=weights, weight_decay=0.5), dict(params=biases, weight_decay=0.0)]
        optimizer = nxd.NeuronZero1Optimizer(groups, torch.optim.AdamW, lr=0.5)
        nxd.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.75]
        state = collect(model, optimizer)
        for name, parameter in trained.items():
            tensor = state.tensors[f"optimizer.state.{name}.exp_avg"]
            for piece in tensor.pieces:
                where = tuple(slice(at, at + size) for at, size in zip(piece.offset, piece.shape))
                assert torch.equal(tensor.tensor[piece.local], parameter.state["exp_avg"][where]), name

    comm.threads.run(Mesh(2, tp=2), rank)


def _write_groups(folder: Path, trained: dict[str, Parameter]) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    for stage in range(2):
        local = {name: parameter for name, parameter in trained.items() if parameter.stage == stage}
        groups = [[n for n, name in enumerate(local) if name.endswith("bias") is bias] for bias in (False, True)]
        for rank in range(2):
            for data in range(2):
                state = nxd_folder.zero1_state(local, rank, 2, data, 2)
                options = state["param_groups"][0]
                state["param_groups"] = [
                    {**options, "params": params, "weight_decay": decay} for params, decay in zip(groups, (0.25, 0.75))
                ]
                torch.save(state, folder / f"dp_rank_{data:02d}_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt")


class MixtureNet(nn.Module):
    """Experts `[experts/ep, width/tp, hidden]`, and a router that all ranks have."""

    def __init__(self) -> None:
        super().__init__()
        ep, tp = comm.size("ep"), comm.size("tp")
        self.router = nn.Linear(4, 8, bias=False)
        self.mlp = nn.Module()
        self.mlp.down = nn.Parameter(torch.zeros(8 // ep, 6 // tp, 4))
        self.mlp.down.expert_model_parallel = True  # type: ignore[attr-defined]
        set_spec(self.mlp, "down", ShardSpec("tp", 1, 1, tp, (8 // ep, 6, 4)))


@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(4, ep=4), Mesh(4, tp=2, ep=2)], ids=str)
@pytest.mark.parametrize("xser", [False, True], ids=["pt", "xser"])
def test_experts_over_several_ranks(xser: bool, mesh: Mesh, tmp_path: Path) -> None:
    """Saved at ep 2 and tp 2: ep rank 0 writes everything, ep rank 1 its experts."""
    router, down = torch.randn(8, 4), torch.randn(8, 6, 4)
    for ep, experts in enumerate(down.chunk(2)):
        parameters = {"mlp.down": Parameter(experts, 1)}
        whole = {"router.weight": Parameter(router)} | parameters
        nxd_folder.write(tmp_path / str(ep), whole if ep == 0 else parameters, 2, 1, optimizer="none", xser=xser, ep=ep)
    for path in sorted((tmp_path / "1" / "model").iterdir()):
        path.rename(tmp_path / "0" / "model" / path.name)
    if xser:
        for info in (tmp_path / "0" / "model").glob("*ep_rank_01*.info.pt"):
            described = torch.load(info, weights_only=True)
            torch.save({0: {**described[0], "expert_model_parallel": True}}, info)
    shutil.rmtree(tmp_path / "1")

    def rank() -> None:
        model = MixtureNet()
        nxd.load_checkpoint(tmp_path, "0", model)
        shard = down.chunk(comm.size("ep"))[comm.rank("ep")].chunk(comm.size("tp"), 1)[comm.rank("tp")]
        assert torch.equal(model.mlp.down, shard) and torch.equal(model.router.weight, router)

    comm.threads.run(mesh, rank)
    (tmp_path / "0" / "model" / "dp_rank_00_ep_rank_01_tp_rank_01_pp_rank_00.pt").unlink()
    with pytest.raises(CheckpointCorrupted, match="lacks the file of ep rank 1, of 2, beside .*ep_rank_00_tp_rank_01"):
        comm.threads.run(Mesh(1), lambda: nxd.load_checkpoint(tmp_path, "0", MixtureNet()))


def test_the_scheduler(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    scheduler = torch.optim.lr_scheduler.StepLR(adamw(model, "plain"), 2, 0.5)
    scheduler.last_epoch, scheduler.base_lrs = 3, [0.75]
    write(tmp_path / "a", scheduler=scheduler.state_dict())
    other = torch.optim.lr_scheduler.StepLR(adamw(model, "plain"), 2, 0.5)
    comm.threads.run(Mesh(1), lambda: nxd.load_checkpoint(tmp_path, "a", scheduler=other))
    assert other.state_dict() == scheduler.state_dict()


class Separate(nn.Module):
    """Projections as Hugging Face's models have them."""

    def __init__(self) -> None:
        super().__init__()
        for name, rows in (("q", 16), ("k", 8), ("v", 8), ("gate", 12), ("up", 12)):
            setattr(self, f"{name}_proj", nxd.ColumnParallelLinear(8, rows, bias=False, gather_output=False))
        self.o_proj = nxd.RowParallelLinear(16, 8, bias=False)


@pytest.mark.each_pair
@pytest.mark.parametrize("order", ["trn1", "trn2"])
@pytest.mark.parametrize("dp", [1, 3])
@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(4, tp=2)], ids=str)
def test_the_state_of_fused_projections(mesh: Mesh, dp: int, order: str, tmp_path: Path) -> None:
    """Saved at tp 4 as qkv_proj.weight_qkv and gate_up_proj; two key/value heads of 4 rows, each twice."""
    generator = torch.Generator().manual_seed(6)
    shapes = {"q": (16, 8), "k": (8, 8), "v": (8, 8), "o": (8, 16), "gate": (12, 8), "up": (12, 8)}
    whole = {
        f"{name}_proj.weight": {
            entry: torch.randn(shape, generator=generator) for entry in ("", "exp_avg", "exp_avg_sq")
        }
        for name, shape in shapes.items()
    }
    heads = (0, 2, 1, 3) if order == "trn1" else (0, 1, 2, 3)

    def fused(entry: str) -> dict[str, torch.Tensor]:
        query, key, value, output, gate, up = (x[entry] for x in whole.values())
        query = torch.cat([query.chunk(4)[head] for head in heads])
        output = torch.cat([output.chunk(4, 1)[head] for head in heads], 1)
        twice = [
            torch.cat([weight, weight])
            if order == "trn1"
            else weight.view(2, 4, 8).repeat_interleave(2, 0).reshape(16, 8)
            for weight in (key, value)
        ]
        rows = [weight.chunk(4)[rank] for rank in range(4) for weight in (query, *twice)]
        return {
            "qkv_proj.weight_qkv": torch.cat(rows),
            "gate_up_proj.weight": torch.cat([gate, up]),
            "o_proj.weight": output,
        }

    weights = fused("")
    parameters = {
        name: Parameter(weights[name], 1 if name == "o_proj.weight" else 0, 2 if "gate" in name else 1, 0)
        for name in weights
    }
    for name, parameter in parameters.items():
        parameter.state = {"step": torch.tensor(2.0)} | {
            entry: fused(entry)[name] for entry in ("exp_avg", "exp_avg_sq")
        }
    nxd_folder.write(tmp_path / "a", parameters, 4, 1, dp)

    def rank() -> None:
        model = Separate()
        optimizer = adamw(model)
        nxd.load_checkpoint(tmp_path, "a", model, optimizer)
        tensors = collect(model, optimizer).tensors
        for name, entries in whole.items():
            for entry, value in entries.items():
                tensor = tensors[f"optimizer.state.{name}.{entry}" if entry else f"model.{name}"]
                for piece in tensor.pieces:
                    where = tuple(slice(at, at + size) for at, size in zip(piece.offset, piece.shape))
                    assert torch.equal(tensor.tensor[piece.local], value[where]), (name, entry)

    comm.threads.run(mesh, rank)
