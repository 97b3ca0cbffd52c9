"""Saving from four XLA devices, each with a rank as a thread, what ranks of a replayed training had.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python -m tests.xla.programs.saving FOLDER     # with the file `states`

The one thing that stands in for another is `rendezvous`: torch_xla does it by a collective of the devices, which it
does not execute between those of the CPU. Another collective would wait for ever.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.checkpoint.dcp import writing
from neuronx_dist.checkpoint.storage import open_storage
from neuronx_dist.checkpoint.tags import CheckpointFolder
from neuronx_dist.xla_replay import training_state
from tests.xla.programs import training
from tests.xla.programs.foundation import state_dicts
from tests.xla.programs.training import Training, make_model, make_optimizer

CASE = Training("adamw", "zero1")


def built(device: torch.device) -> tuple[Any, Any]:
    model = make_model(CASE, torch.zeros(1, device=device))
    return model, make_optimizer(CASE, model, torch.tensor(1e-3).to(device))


def held(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Returns a rank's weights, masters and moments, on the host, by the names of a replay."""
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_flatten_with_path(training_state(model, optimizer))[0]
    return {pytree.keystr(path): x.detach().cpu() for path, x in leaves if isinstance(x, torch.Tensor)}


class Rendezvous:
    """`xm.rendezvous` of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._payloads = [b""] * size

    def __call__(self, tag: str, payload: bytes = b"", replicas: Any = None) -> list[bytes]:
        import torch_xla.runtime as xr

        self._payloads[xr.global_ordinal()] = payload
        self._barrier.wait()
        payloads = [*self._payloads]
        self._barrier.wait()
        return payloads


_rendezvous = Rendezvous(4)


def save_and_load(index: int, folder: Path) -> None:
    import torch_xla.core.xla_model as xm

    xm.rendezvous = _rendezvous
    device = nxd.init_distributed("xla")
    nxd.initialize_model_parallel(tensor_model_parallel_size=2)
    rank = comm.rank("world")
    states = torch.load(folder / "states", weights_only=True)
    weights, optimizer_state = state_dicts(states[rank])
    model, optimizer = built(device)
    model.load_state_dict({name: value for name, value in weights.items() if name in model.state_dict()})
    optimizer.load_state_dict({**optimizer.state_dict(), **optimizer_state})
    before = held(model, optimizer)
    nxd.save_checkpoint(folder / "run", "sync", model, optimizer, user_content={"step": 2})
    nxd.save_checkpoint(folder / "run", "async", model, optimizer, user_content={"step": 2}, async_save=True)
    nxd.finalize_checkpoint()
    found = []
    for tag in ("sync", "async"):
        model, optimizer = built(device)
        content = nxd.load_checkpoint(folder / "run", tag, model, optimizer)
        found.append((content, held(model, optimizer)))
    torch.save({"before": before, "found": found, "device": str(device)}, folder / f"rank_{rank}")
    nxd.destroy_model_parallel()


def setup_and_save(*arguments: Any) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """The training of a replay, with a save of all that a rank has, after the set-up and after every step.

    A replay has no values there, and one rank at a time: what is written is nonsense, and the others' answers are
    this rank's own. What is looked at is what the next step compiles.
    """
    step, state = training.setup(*arguments)

    def saved_state() -> Any:
        values = state()
        with tempfile.TemporaryDirectory() as folder, _alone():
            model, optimizer = _of(step)
            for tag in ("a", "b") if comm.rank("world") else ():  # rank 0 is not there to do it
                CheckpointFolder(open_storage(folder)).begin(tag)
            nxd.save_checkpoint(folder, "a", model, optimizer)
            nxd.save_checkpoint(folder, "b", model, optimizer, async_save=True)
            nxd.finalize_checkpoint()
        return values

    return step, saved_state


def _of(step: Callable[..., Any]) -> tuple[Any, Any]:
    """The model and the optimizer that a step function trains."""
    cells = dict(zip(step.__code__.co_freevars, step.__closure__ or ()))
    return cells["model"].cell_contents, cells["optimizer"].cell_contents


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    size = comm.size("world")
    everyone = mock.patch.object(comm, "gather_objects", lambda obj, axis="world": [obj] * size)
    with everyone, mock.patch.object(writing, "_shares", _whole_shares):
        yield


def _whole_shares(everyone: Any, tensors: Any) -> list[Any]:
    """Each rank writes all that it has: what the others have is not known."""
    return [writing._Share([*holdings.objects.items()], holdings.claims) for holdings in everyone]


if __name__ == "__main__":
    import functools

    import torch_xla

    torch_xla.launch(functools.partial(save_and_load, folder=Path(sys.argv[1])))
