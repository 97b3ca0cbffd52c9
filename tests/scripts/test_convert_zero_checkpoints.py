"""`nxd_convert_zero_checkpoints`: ZeRO-1's state as NeuronX Distributed has it at another dp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from neuronx_dist.scripts.convert_zero_checkpoints import main
from tests.checkpoint import nxd_folder
from tests.checkpoint.nxd_folder import Parameter


def parameters() -> dict[str, Parameter]:
    """Rows that dp divides and rows that it does not."""
    generator = torch.Generator().manual_seed(2)
    whole = {}
    for name, shape, dim, stage in (("a", (12, 3), 0, 0), ("b", (5,), None, 0), ("c", (7, 4), 1, 1)):
        value, first, second = (torch.randn(shape, generator=generator) for _ in range(3))
        state = {"step": torch.tensor(3.0), "exp_avg": first, "exp_avg_sq": second}
        whole[name] = Parameter(value, dim, 1, stage, state)
    return whole


def write(folder: Path, dp: int, xser: bool = False, masters: bool = True) -> Path:
    nxd_folder.write(folder, parameters(), 2, 2, dp, xser=xser, masters=masters)
    return folder


def run(source: Path, target: Path, *flags: str) -> int:
    return main(["--input_dir", str(source), "--output_dir", str(target), *flags])


def assert_equal(first: Any, second: Any, where: str = "") -> None:
    if isinstance(second, dict):
        assert first.keys() == second.keys(), where
        for key in second:
            assert_equal(first[key], second[key], f"{where}.{key}")
    elif isinstance(second, torch.Tensor):
        assert first.dtype == second.dtype and torch.equal(first, second), where
    else:
        assert first == second, where


def assert_same_files(folder: Path, expected: Path) -> None:
    names = sorted(path.name for path in (expected / "optim").glob("*.pt"))
    assert sorted(path.name for path in (folder / "optim").glob("*.pt")) == names and names
    for name in names:
        assert_equal(*(torch.load(root / "optim" / name, weights_only=True) for root in (folder, expected)), name)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("saved, wanted", [(2, 4), (4, 3), (3, 1)])
def test_sharded_to_sharded(saved: int, wanted: int, masters: bool, tmp_path: Path) -> None:
    source = write(tmp_path / "a", saved, masters=masters)
    assert run(source, tmp_path / "b", "--convert_to_sharded", "--dp_size", str(wanted)) == 0
    assert_same_files(tmp_path / "b", write(tmp_path / "c", wanted, masters=masters))
    assert not (tmp_path / "b" / "done").exists()


def test_through_whole_states(tmp_path: Path) -> None:
    source = write(tmp_path / "a", 4)
    assert run(source, tmp_path / "full", "--convert_to_full", "--num_workers", "2") == 0
    state = torch.load(tmp_path / "full" / "optim" / "full_tp_rank_01_pp_rank_01.pt", weights_only=True)
    expected = parameters()["c"]
    assert torch.equal(state["base_state"][0]["exp_avg"], expected.state["exp_avg"].chunk(2, 1)[1])
    assert torch.equal(state["sharded_master_weights"][0], 3 * expected.state["exp_avg"].chunk(2, 1)[1])
    assert run(tmp_path / "full", tmp_path / "b", "--convert_to_sharded", "--dp_size", "2") == 0
    assert_same_files(tmp_path / "b", write(tmp_path / "c", 2))


def test_xser(tmp_path: Path) -> None:
    """Output of xser input is xser too, and converting back to the first dp restores the input."""
    source = write(tmp_path / "a", 2, xser=True)
    assert run(source, tmp_path / "b", "--convert_to_sharded", "--dp_size", "3") == 0
    tensors = tmp_path / "b" / "optim" / "dp_rank_02_tp_rank_00_pp_rank_00.pt.tensors"
    shapes = sorted(tuple(torch.load(path, weights_only=True).shape) for path in tensors.iterdir())
    assert shapes == [(), ()] + [(2,)] * 3 + [(2, 3)] * 3
    (tmp_path / "b" / "model").symlink_to(source / "model")
    from neuronx_dist.checkpoint.nxd.rank_files import NxdFiles, Writer
    from neuronx_dist.checkpoint.storage import LocalStorage

    files = NxdFiles(LocalStorage(tmp_path), "b")
    moments = [files.optimizer[Writer(1, 1, dp)]["base_state"][0]["exp_avg"].tensor() for dp in range(3)]
    assert torch.equal(torch.cat(moments)[:7], parameters()["c"].state["exp_avg"].chunk(2, 1)[1])


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    from neuronx_dist.scripts import convert_zero_checkpoints as module

    alive: list[Any] = []
    most = 0
    read = module._Rows.read

    def watched(self: Any) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(reference() is not None for reference in alive))
        value = read(self)
        alive.append(weakref.ref(value))
        return value

    monkeypatch.setattr(module._Rows, "read", watched)
    assert run(write(tmp_path / "a", 2), tmp_path / "b", "--convert_to_sharded", "--dp_size", "3") == 0
    assert len(alive) == 18 and most == 0


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "a", 2)
    torch.save(
        {"base_state": Malicious(tmp_path / "was run")}, source / "optim" / "dp_rank_01_tp_rank_00_pp_rank_00.pt"
    )
    assert run(source, tmp_path / "b", "--convert_to_full") == 1
    assert "holds more than tensors and plain data; nothing was executed" in capsys.readouterr().err
    assert not (tmp_path / "was run").exists() and not (tmp_path / "b").exists()


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(message: str, *args: Any) -> None:
        assert run(*args) == 1
        assert message in capsys.readouterr().err

    source = write(tmp_path / "a", 2)
    refused("has no ZeRO-1 files", tmp_path, tmp_path / "b", "--convert_to_full")
    refused("exists already, and is not empty", source, source, "--convert_to_full")
    assert run(source, tmp_path / "full", "--convert_to_full") == 0
    refused("has full states already", tmp_path / "full", tmp_path / "b", "--convert_to_full")
    (source / "optim" / "dp_rank_01_tp_rank_01_pp_rank_00.pt").unlink()
    refused("lacks dp rank 1 of 2", source, tmp_path / "b", "--convert_to_full")
    nxd_folder.write(tmp_path / "plain", parameters(), 2, 2, optimizer="plain")
    refused("is not a ZeRO-1 state", tmp_path / "plain", tmp_path / "b", "--convert_to_full")
    with pytest.raises(SystemExit):
        run(source, tmp_path / "b", "--convert_to_sharded")
    assert "needs --dp_size" in capsys.readouterr().err
