"""The public calls: what a script sees of checkpoints, on ranks as threads."""

from __future__ import annotations

import inspect
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.checkpoint import background
from neuronx_dist.checkpoint.errors import CheckpointError, CheckpointMismatch
from neuronx_dist.checkpoint.storage import LocalStorage, open_storage
from neuronx_dist.checkpoint.tags import CheckpointFolder
from neuronx_dist.mesh import Mesh
from tests.checkpoint.saved_runs import on_ranks, saved
from tests.checkpoint.small_run import Net, Run, equal

pytestmark = pytest.mark.slow


def test_arguments_are_nxds() -> None:
    save, load = (inspect.signature(call) for call in (nxd.save_checkpoint, nxd.load_checkpoint))
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [name for name, parameter in save.parameters.items() if parameter.kind is positional]
    assert " ".join(names) == (
        "checkpoint_dir_str tag model optimizer scheduler user_content num_workers use_xser num_kept_ckpts async_save "
        "zero1_optimizer use_zero1_dcp avoid_saving_lower_precision_weights"
    )
    assert (
        " ".join(name for name in load.parameters if name != "device")
        == "path tag model optimizer scheduler num_workers strict use_zero1_dcp"
    )
    assert {name: save.parameters[name].default for name in ("num_workers", "num_kept_ckpts", "async_save")} == {
        "num_workers": 8,
        "num_kept_ckpts": None,
        "async_save": False,
    }


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize("url", ["", "memory://"])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, url: str, zero1: bool, async_save: bool) -> None:
    folder = f"{url}{tmp_path}/run"

    def rank() -> None:
        assert not nxd.has_checkpoint(folder)
        comm.barrier()
        run = Run(zero1=zero1)
        run.train(3)
        values = run.values()
        run.save(folder, "step_3", async_save=async_save)
        losses = run.train(2)  # before it is written, perhaps
        nxd.finalize_checkpoint()
        assert nxd.has_checkpoint(folder)

        other = Run(seed=1, zero1=zero1)
        assert other.load(folder) == {"step": 3}
        assert equal(other.values(), values) and other.scheduler.state_dict()["last_epoch"] == 3
        assert other.train(2) == losses and equal(other.values(), run.values())

    on_ranks(rank)


def test_a_tag_may_be_a_number(tmp_path: Path) -> None:
    """No warning says that another checkpoint was loaded instead."""

    def rank() -> None:
        run = Run()
        run.save(tmp_path, 100)  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert run.load(tmp_path, 100) == {"step": 0}  # type: ignore[arg-type]

    on_ranks(rank)


def test_arguments_without_effect_are_said_once(tmp_path: Path) -> None:
    """Warned are arguments whose effect a script would miss; the others change only the speed."""

    def rank() -> None:
        run = Run()
        run.save(tmp_path, "a", num_workers=1, use_xser=True, avoid_saving_lower_precision_weights=True)
        run.save(tmp_path, "b", num_workers=1, zero1_optimizer=True, use_zero1_dcp=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        on_ranks(rank)
    assert [str(warning.message).partition(" has no effect")[0] for warning in caught] == [
        "use_xser",
        "avoid_saving_lower_precision_weights",
    ]


@pytest.mark.parametrize("name", ["model", "optimizer", "scheduler"])
def test_state_dicts_are_no_models(tmp_path: Path, name: str) -> None:
    def rank() -> None:
        run = Run()
        run.save(tmp_path, "a")
        parts = {part: getattr(run, part) for part in ("model", "optimizer", "scheduler")}
        parts[name] = dict(parts[name].state_dict())
        for call in (nxd.save_checkpoint, nxd.load_checkpoint):
            with pytest.raises(TypeError, match=f"{name} is a dict, a state dict: pass the {name} itself"):
                call(tmp_path, "a", **parts)

    on_ranks(rank)


def test_parts(tmp_path: Path) -> None:
    """Each part may be left out of a save, and of a load."""

    def rank() -> None:
        run = Run()
        run.train(3)
        nxd.save_checkpoint(tmp_path, "weights", run.model)
        nxd.save_checkpoint(tmp_path, "content", user_content=[1, "a", {"b": torch.arange(3)}, None])
        assert nxd.load_checkpoint(tmp_path, "weights", Run(seed=1).model) is None
        content = nxd.load_checkpoint(tmp_path, "content")
        assert content[:2] == [1, "a"] and content[2]["b"].tolist() == [0, 1, 2]
        with pytest.raises(CheckpointError, match="weights was saved without a scheduler"):
            nxd.load_checkpoint(tmp_path, "weights", run.model, scheduler=run.scheduler)
        with pytest.raises(CheckpointError, match="optimizer"):
            nxd.load_checkpoint(tmp_path, "weights", run.model, run.optimizer)
        other = Run(seed=1)
        run.save(tmp_path, "all")
        nxd.load_checkpoint(tmp_path, "all", other.model)
        assert equal(list(other.model.parameters()), list(run.model.parameters()))

    on_ranks(rank)


def test_what_lies_in_the_folder(tmp_path: Path) -> None:
    saved(tmp_path, "step_1")
    names = {str(path.relative_to(tmp_path / "step_1")) for path in (tmp_path / "step_1").rglob("*") if path.is_file()}
    random = {f"random/dp_rank_0{dp}_cp_rank_00_tp_rank_0{tp}_pp_rank_00.pt" for dp in (0, 1) for tp in (0, 1)}
    data = {f"__{rank}_0.distcp" for rank in range(4)}
    assert names == {"checkpoint", "done", ".metadata", "scheduler.pt", "user_content.pt", *data, *random}
    assert torch.load(tmp_path / "step_1" / "user_content.pt", weights_only=True) == {"step": 1}
    assert set(CheckpointFolder(open_storage(tmp_path)).find("step_1").files or {}) == names - {"checkpoint", "done"}


@pytest.mark.parametrize("num_kept, left", [(2, ["b", "c"]), (-1, ["a", "b", "c"])])
def test_rotation(tmp_path: Path, num_kept: int, left: list[str]) -> None:
    """NxD's scripts pass -1, their default, to keep all."""
    saved(tmp_path, "a", "b", "c", num_kept_ckpts=num_kept)
    assert sorted(os.listdir(tmp_path)) == left


# --- beside the run ---


def test_values_are_those_of_the_call_and_the_memory_is_kept(tmp_path: Path) -> None:
    def rank() -> None:
        run = Run()
        addresses = set()
        for number in range(3):
            run.save(tmp_path, str(number), async_save=True)
            staged = background.state_of_rank().staged
            assert staged is not None
            addresses.add(staged.data_ptr())
            values = run.values()
            run.train()
            nxd.finalize_checkpoint()
            other = Run(seed=1)
            other.load(tmp_path)
            assert number == 0 or equal(other.values(), values)
        assert len(addresses) == 2  # without the optimizer's state, and with it

    on_ranks(rank, Mesh(2))


@pytest.mark.parametrize("when_busy, left", [("wait", ["a", "b"]), ("supersede", ["b"])])
def test_a_second_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when_busy: str, left: list[str]) -> None:
    """The second save waits for the first, or replaces it."""
    write = LocalStorage.write

    def slow(self: LocalStorage, name: str, chunks: Any) -> None:
        def some() -> Any:
            for chunk in chunks:
                time.sleep(0.05)
                yield chunk

        write(self, name, some() if "a/__" in name else chunks)

    monkeypatch.setattr(LocalStorage, "write", slow)

    def rank() -> None:
        run = Run()
        run.train()
        run.save(tmp_path, "a", async_save=True)
        run.train()
        run.save(tmp_path, "b", async_save=True, when_busy=when_busy)
        nxd.finalize_checkpoint()
        assert Run().load(tmp_path) == {"step": 2}

    on_ranks(rank, Mesh(2))
    assert sorted(os.listdir(tmp_path)) == left


def test_a_module_of_another_kind(tmp_path: Path) -> None:
    """`strict=False` loads what both have."""

    def rank() -> None:
        run = Run()
        run.save(tmp_path, "a", optimizer=None, scheduler=None)
        other = Net()
        other.extra = torch.nn.Linear(2, 2)
        with pytest.raises(CheckpointMismatch, match="model.extra.weight"):
            nxd.load_checkpoint(tmp_path, model=other)
        nxd.load_checkpoint(tmp_path, model=other, strict=False)
        assert torch.equal(other.up.weight, run.model.up.weight)

    on_ranks(rank)
