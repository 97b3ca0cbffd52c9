"""NxD's checkpoints that are damaged, malicious, or of another model."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.checkpoint.errors import CheckpointCorrupted, CheckpointError, CheckpointMismatch
from neuronx_dist.mesh import Mesh
from tests.checkpoint.nxd_runs import (
    Net,
    load,
    parameters,
    refused,
    write,
)


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("where", ["model", "optim", "user_content.pt", "tensors"])
def test_nothing_in_a_folder_is_run(where: str, tmp_path: Path) -> None:
    folder, witness = tmp_path / "run" / "a", tmp_path / "was run"
    write(folder, user_content={"step": 1}, xser=where == "tensors")
    name = "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    file = {
        "user_content.pt": folder / where,
        "tensors": folder / "model" / f"{name}.tensors" / "tensor_0.pt",
    }.get(where, folder / where / name)
    torch.save({"embed.weight": Malicious(witness)}, file)
    refused(tmp_path / "run", "holds (more|other things) than", CheckpointError)
    file.write_bytes(pickle.dumps(Malicious(witness), protocol=2))
    refused(tmp_path / "run", "holds (more|other things) than", CheckpointError)
    assert not witness.exists()


def test_files_that_are_missing_or_cut_off(tmp_path: Path) -> None:
    write(tmp_path / "a")
    file = tmp_path / "a" / "optim" / "dp_rank_01_tp_rank_01_pp_rank_00.pt"
    file.write_bytes(file.read_bytes()[:-100])
    refused(tmp_path, "optim/dp_rank_01_tp_rank_01_pp_rank_00.pt is truncated", CheckpointCorrupted)
    file.unlink()
    refused(
        tmp_path,
        r"lacks 1 of 8 files of optim, of a layout tp=2, pp=2, dp=2: the first is that of tp rank 1, pp rank 0, dp",
        CheckpointCorrupted,
    )


def test_an_optimizer_that_is_not_known(tmp_path: Path) -> None:
    write(tmp_path / "a", optimizer="none")
    refused(tmp_path, "was saved without an optimizer: load the model alone")
    shutil.rmtree(tmp_path / "a")
    whole = parameters()
    write(tmp_path / "a", whole)
    for file in (tmp_path / "a" / "optim").iterdir():
        state = torch.load(file, weights_only=True)
        state["shape_info"][0], state["shape_info"][1] = state["shape_info"][1], state["shape_info"][0]
        torch.save(state, file)
    refused(tmp_path, r"that of pp rank 0 has parameter 0 of shape .* and embed.weight has shape \(6, 8\)")


def test_another_model(tmp_path: Path) -> None:
    whole = parameters()
    whole["more.weight"] = whole.pop("layers.1.down.bias")
    write(tmp_path / "a", whole, optimizer="none")

    def rank() -> None:
        with pytest.raises(CheckpointMismatch, match="1 missing in it: model.layers.1.down.bias. 1 not in .*more.weig"):
            load(tmp_path, kind=None)
        load(tmp_path, kind=None, strict=False)

    comm.threads.run(Mesh(2, tp=2), rank)


def test_a_model_that_is_not_sharded(tmp_path: Path) -> None:
    write(tmp_path / "a", optimizer="none")

    def rank() -> None:
        model = Net()
        model.embed = nn.Embedding(12, 8)
        with pytest.raises(CheckpointMismatch, match=r"embed.weight is \(6, 8\) on each of 2 .* build the model with"):
            nxd.load_checkpoint(tmp_path, model=model)

    comm.threads.run(Mesh(1), rank)


def test_a_tensor_of_another_shape_than_its_reference(tmp_path: Path) -> None:
    write(tmp_path / "a", xser=True)
    tensors = tmp_path / "a" / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors"
    torch.save(torch.zeros(12, 8), tensors / "tensor_0.pt")
    refused(
        tmp_path,
        r"tensors/tensor_\d+.pt holds \(12, 8\) of torch.float32, in place of a tensor \(6, 8\)",
        CheckpointError,
    )


@pytest.mark.each_value
@pytest.mark.parametrize("harm", ["missing", "truncated"])
@pytest.mark.parametrize("part", ["model", "optim"])
def test_files_of_single_tensors_are_opened_before_anything_changes(part: str, harm: str, tmp_path: Path) -> None:
    """The last one of all, which one of the ranks opens."""
    write(tmp_path / "a", xser=True)
    name = {"model": "dp_rank_00", "optim": "dp_rank_01"}[part]
    tensors = tmp_path / "a" / part / f"{name}_tp_rank_01_pp_rank_01.pt.tensors"
    file = max(tensors.iterdir(), key=lambda path: int(path.stem.split("_")[1]))
    content = file.read_bytes()
    file.unlink() if harm == "missing" else file.write_bytes(content[:-50])
    refused(tmp_path, f"was not loaded.*{file.name} is {harm}|{file.name} is {harm}", CheckpointError)


def test_a_scheduler_that_is_no_state_dict(tmp_path: Path) -> None:
    write(tmp_path / "a", scheduler=5)

    def rank() -> None:
        model = Net()
        before = [param.detach().clone() for param in model.parameters()]
        scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
        with pytest.raises(CheckpointCorrupted, match="a/scheduler.pt has a int in place of a scheduler's state dict"):
            nxd.load_checkpoint(tmp_path, "a", model, scheduler=scheduler)
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters()))

    comm.threads.run(Mesh(1), rank)
