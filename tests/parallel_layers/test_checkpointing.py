"""`parallel_layers.checkpointing`: files by NxD's names, in the layout they were saved in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import checkpointing


def model(value: float = 0.0) -> nn.Module:
    net = nn.Sequential(
        nxd.ColumnParallelLinear(4, 8, gather_output=False), nxd.RowParallelLinear(8, 4), nn.Linear(4, 4)
    )
    with torch.no_grad():
        for number, param in enumerate(net.parameters()):
            param.copy_(torch.arange(param.numel()).view(param.shape) + 100 * number + 1000 * comm.rank("tp") + value)
    return net


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in net.parameters()]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize("argument", ["model", "model_or_optimizer"])
def test_what_is_saved_is_loaded(tmp_path: Path, argument: str) -> None:
    def rank() -> None:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters())
        sum(param.square().sum() for param in net.parameters()).backward()
        optimizer.step()
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
        checkpointing.save(state, tmp_path / "step_7")
        other = model(0.5)
        result = checkpointing.load(tmp_path / "step_7", **{argument: other})
        assert result["step"] == 7 and equal(weights(other), weights(net))
        assert checkpointing.load(tmp_path / "step_7")["step"] == 7
        other_optimizer = torch.optim.AdamW(other.parameters())
        checkpointing.load(tmp_path / "step_7", model_or_optimizer=other_optimizer, model_key="optimizer")
        moments = [[values["exp_avg"] for values in zero1.state.values()] for zero1 in (optimizer, other_optimizer)]
        assert len(moments[0]) == 6 and equal(*moments)

    threads.run(Mesh(4, tp=2), rank)
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == [f"step_7/tp_rank_0{tp}_pp_rank_00/checkpoint.pt" for tp in (0, 1)]
    saved = torch.load(tmp_path / files[1], weights_only=True)
    assert saved["model"]["0.weight"].shape == (4, 4) and saved["model"]["0.weight"][0, 0] != 0


def test_every_data_parallel_rank(tmp_path: Path) -> None:
    def rank() -> None:
        checkpointing.save({"rank": comm.rank("world")}, tmp_path, master_dp_only=False)
        assert checkpointing.load(tmp_path, master_dp_only=False) == {"rank": comm.rank("world")}

    threads.run(Mesh(4, tp=2), rank)
    assert sorted(os.listdir(tmp_path))[:2] == ["tp_rank_00_pp_rank_00_dp_rank_00", "tp_rank_00_pp_rank_00_dp_rank_01"]


def test_only_the_first_data_parallel_rank_writes(tmp_path: Path) -> None:
    def rank() -> None:
        checkpointing.save({"rank": comm.rank("world")}, tmp_path)
        assert checkpointing.load(tmp_path) == {"rank": comm.rank("tp")}

    threads.run(Mesh(4, tp=2), rank)


def test_bf16(tmp_path: Path) -> None:
    with comm.as_rank(Mesh(1), 0):
        checkpointing.save({"a": [torch.ones(2), torch.arange(2)]}, tmp_path, down_cast_bf16=True)
        assert [tensor.dtype for tensor in checkpointing.load(tmp_path)["a"]] == [torch.bfloat16, torch.int64]


@pytest.mark.parametrize("in_folder", [False, True])
def test_whole_weights(tmp_path: Path, in_folder: bool) -> None:
    path = tmp_path / ("checkpoint.pt" if in_folder else "whole.bin")
    with comm.as_rank(Mesh(1), 0):
        whole = model()
        torch.save({"model": whole.state_dict()}, path)

    def rank() -> None:
        net = model(0.5)
        checkpointing.load(tmp_path if in_folder else path, net, sharded=False)
        up, down, last = whole[0].weight, whole[1].weight, whole[2].weight
        tp = comm.rank("tp")
        assert torch.equal(net[0].weight, up[4 * tp : 4 * tp + 4]) and torch.equal(net[2].weight, last)
        assert torch.equal(net[1].weight, down[:, 4 * tp : 4 * tp + 4])

    threads.run(Mesh(2, tp=2), rank)


def test_another_layout_is_refused(tmp_path: Path) -> None:
    with comm.as_rank(Mesh(1), 0):
        checkpointing.save({"a": 1}, tmp_path)
    with (
        comm.as_rank(Mesh(2, tp=2), 1),
        pytest.raises(FileNotFoundError, match="no .*tp_rank_01_pp_rank_00/check.*there are tp_rank_00_pp"),
    ):
        checkpointing.load(tmp_path)
    with comm.as_rank(Mesh(1), 0), pytest.raises(FileNotFoundError, match="has no such folders"):
        checkpointing.load(tmp_path / "nothing")


def test_a_state_that_is_not_there_is_named_with_what_is(tmp_path: Path) -> None:
    with comm.as_rank(Mesh(1), 0):
        net = model()
        torch.save(net.state_dict(), tmp_path / "whole.bin")
        with pytest.raises(KeyError, match=r"whole.bin has no 'model', only '0.weight', .*model_key=None"):
            checkpointing.load(tmp_path / "whole.bin", net, sharded=False)
        checkpointing.load(tmp_path / "whole.bin", net, sharded=False, model_key=None)


def test_arguments_that_exclude_one_another(tmp_path: Path) -> None:
    with comm.as_rank(Mesh(1), 0):
        net = model()
        optimizer = torch.optim.SGD(net.parameters())
        checkpointing.save({"model": optimizer.state_dict()}, tmp_path)
        with pytest.raises(ValueError, match="model or model_or_optimizer, not both"):
            checkpointing.load(tmp_path, net, optimizer)
        torch.save({"model": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
        with pytest.raises(ValueError, match="sharded=True"):
            checkpointing.load(tmp_path, model_or_optimizer=optimizer, sharded=False)


def test_a_file_that_would_run_code(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "ran"),))

    with comm.as_rank(Mesh(1), 0):
        checkpointing.save({"a": 1}, tmp_path)
        torch.save(Bomb(), tmp_path / "tp_rank_00_pp_rank_00" / "checkpoint.pt")
        with pytest.raises(
            ValueError, match="checkpoint.pt holds more than tensors and plain data; nothing was executed"
        ):
            checkpointing.load(tmp_path, weights_only=False)
    assert not (tmp_path / "ran").exists()


def test_a_job_that_dies_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(state: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("no space left")

    with comm.as_rank(Mesh(1), 0):
        checkpointing.save({"a": 1}, tmp_path)
        monkeypatch.setattr(torch, "save", interrupted)
        with pytest.raises(OSError, match="no space left"):
            checkpointing.save({"a": 2}, tmp_path)
        assert checkpointing.load(tmp_path) == {"a": 1}


@pytest.mark.parametrize("what", ["unwritable", "not plain"])
def test_what_one_rank_cannot_write_ends_all_at_once(tmp_path: Path, what: str) -> None:
    """Each with that rank's message; nobody waits for it, and they can go on together."""

    def rank() -> str:
        state: dict[str, Any] = {"model": model().state_dict()}
        if comm.rank("tp") == 1:
            if what == "unwritable":
                (tmp_path / "tp_rank_01_pp_rank_00").write_text("a file in its place")
            else:
                state["hook"] = lambda: None
        with pytest.raises(Exception) as error:
            checkpointing.save(state, tmp_path)
        comm.barrier()
        return f"{type(error.value).__name__}: {error.value}"

    first, second = threads.run(Mesh(2, tp=2), rank, timeout=10)
    assert first == f"RuntimeError: checkpointing.save: {tmp_path} was not written: rank 1: {second}"
    assert not list(tmp_path.rglob("tp_rank_01*/checkpoint.pt"))
