"""Exchanges of ranks about a checkpoint, each in a small program that fails without it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.checkpoint.agreement import together
from neuronx_dist.checkpoint.background import Save
from neuronx_dist.checkpoint.storage import open_storage
from neuronx_dist.checkpoint.tags import CheckpointFolder
from neuronx_dist.parallel_layers import checkpointing
from tests.checkpoint import nxd_folder

RANKS = 2


def _everywhere(words: str | None, function: Callable[[Path], Any], **axes: int) -> None:
    """Asserts that a function returns, or that it raises a CheckpointError of these words, on every rank."""
    with tempfile.TemporaryDirectory() as folder:

        def rank() -> None:
            said = None
            try:
                function(Path(folder))
            except nxd.CheckpointError as error:
                said = str(error)
            except comm.CommError as error:
                raise AssertionError("another rank has gone") from error
            assert said == words or (said and words and words in said), f"rank {comm.rank('world')}: {said}"

        comm.threads.run(nxd.Mesh(RANKS, **axes), rank, timeout=2.0)


def _save(folder: Path, tag: str, content: Any = None) -> None:
    nxd.save_checkpoint(folder, tag, user_content=content)


def a_rank_that_fails() -> None:
    def fail(folder: Path) -> None:
        with together("it failed"):
            if comm.rank("world") == 1:
                raise OSError

    _everywhere("it failed: rank 1: OSError", fail)


def _write(folder: Path, write: Callable[[Any, str], None], commit: Callable[..., None] | None = None) -> None:
    checkpoints = CheckpointFolder(open_storage(folder))
    if commit is not None:
        checkpoints.commit = commit  # type: ignore[method-assign]
    if comm.rank("world") == 0:
        checkpoints.begin("a")
    save = Save(checkpoints, "a", write, {}, None, comm.rank("world"), RANKS)
    save.write_own_files()
    save.settle()


def _fail(*args: Any) -> None:
    raise OSError


def a_rank_that_cannot_write() -> None:
    def save(folder: Path) -> None:
        _write(folder, _fail if comm.rank("world") == 1 else lambda storage, tag: None)

    _everywhere("rank 1: OSError", save)


def a_checkpoint_that_cannot_be_completed() -> None:
    _everywhere("rank 0: OSError", lambda folder: _write(folder, lambda storage, tag: None, commit=_fail))


def ranks_with_other_tags() -> None:
    _everywhere("rank 0 saves", lambda folder: _save(folder, f"rank_{comm.rank('world')}"))


def the_newest() -> None:
    """Rank 0 says which it is."""

    def load(folder: Path) -> None:
        _save(folder, "a")
        assert nxd.load_checkpoint(folder) is None

    _everywhere(None, load)


def what_each_rank_holds() -> None:
    """A layer on each rank, as on stages of a pipeline: the checkpoint lists both."""

    def save_and_load(folder: Path) -> None:
        model = torch.nn.ModuleDict({f"layer_{comm.rank('world')}": torch.nn.Linear(2, 2)})
        nxd.save_checkpoint(folder, "a", model)
        nxd.load_checkpoint(folder, "a", model)

    _everywhere(None, save_and_load)


def a_model_that_fits_on_one_rank_only() -> None:
    """A rank whose own tensors fit must not go on."""

    def load(folder: Path) -> None:
        _save_model(folder)
        features = 3 if comm.rank("world") == 1 else 2
        nxd.load_checkpoint(folder, "a", torch.nn.Linear(2, features))

    _everywhere("model.weight has shape (2, 2) in the checkpoint and (3, 2) in this model", load)


def _save_model(folder: Path) -> None:
    torch.manual_seed(0)
    nxd.save_checkpoint(folder, "a", torch.nn.Linear(2, 2))


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x)).sum()


def parameters_of_other_stages() -> None:
    """A folder of one NxD stage numbers all parameters; here each of two stages trains one of them."""
    state = {"step": torch.tensor(7.0), "exp_avg": torch.ones(2, 2), "exp_avg_sq": torch.ones(2, 2)}
    layers = {f"layers.{layer}.weight": nxd_folder.Parameter(torch.ones(2, 2), state=state) for layer in range(2)}

    def load(folder: Path) -> None:
        model = nxd.NxDPPModel(
            TwoLayers(), transformer_layer_cls=torch.nn.Linear, input_names=["x"], output_loss_value_spec=True,
            num_microbatches=1, auto_partition=True,
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.local_parameters(), lr=0.1)
        if comm.rank("world") == 0:
            nxd_folder.write(folder / "a", layers, tp=1, pp=1)
        comm.barrier()
        nxd.load_checkpoint(folder, "a", model, optimizer)
        (loaded,) = optimizer.state.values()
        assert torch.equal(loaded["exp_avg"], torch.ones(2, 2)) and loaded["step"] == 7

    _everywhere(None, load, pp=RANKS)


def a_rank_that_cannot_write_its_file() -> None:
    """One rank fails in `parallel_layers.checkpointing.save`."""

    def save(folder: Path) -> None:
        if comm.rank("tp") == 1:
            (folder / "tp_rank_01_pp_rank_00").write_text("a file in the place of a folder")
        try:
            checkpointing.save({"step": 1}, folder)
        except comm.CommError:
            raise
        except (RuntimeError, OSError) as error:
            raise nxd.CheckpointError("it ended") from error

    _everywhere("it ended", save, tp=2)
