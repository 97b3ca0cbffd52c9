"""Runs whose ranks are killed, and started again: a program, which forks the ranks, so that torch is loaded once.

    python -m tests.faults.killed_runs FOLDER LAYOUT SCENARIOS

LAYOUT is one of `LAYOUTS`. SCENARIOS is a JSON list of [rank that is killed, at which point, at which occurrence of
it]; [] is an undisturbed run. With a fourth word, "SIGTERM", the rank receives this signal in place of SIGKILL.
For each a line of JSON is printed: whether a rank was killed, checkpoints that were whole then, and a digest of the
final weights and optimizer state of each rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.checkpoint import api, storage  # loaded before ranks are forked
from neuronx_dist.checkpoint.dcp import reading
from neuronx_dist.checkpoint.dcp.checksums import Blocks
from neuronx_dist.checkpoint.dcp.writing import WritePlan
from neuronx_dist.checkpoint.storage import LocalStorage, open_storage
from neuronx_dist.checkpoint.tags import CheckpointFolder
from tests.checkpoint.small_run import Run

STEPS, DROPOUT, KEPT = 8, 0.1, 2
LAYOUTS: dict[str, tuple[int, dict[str, int], bool]] = {  # ranks, degrees, ZeRO-1
    "tp 2": (2, dict(tensor_model_parallel_size=2), True),
    "dp 2, ZeRO-1": (2, {}, True),
    "pp 2": (2, dict(pipeline_model_parallel_size=2), False),
    "tp 2, dp 2, ZeRO-1": (4, dict(tensor_model_parallel_size=2), True),
}
POINTS = ("backward", "step", "copy", "write", "sync", "rename", "remove", "replace", "load")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class PipelinedRun(Run):
    """The same of a pipeline, which holds a stage of its layers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = dict(num_microbatches=2, input_names=["x"], output_loss_value_spec=True)
        self.model: Any = nxd.NxDPPModel(Layers(), transformer_layer_cls=nn.Linear, auto_partition=True, **options)
        self.optimizer = torch.optim.AdamW(self.model.local_parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.step, self.zero1 = 0, False

    def train(self, steps: int = 1) -> list[float]:
        for _ in range(steps):
            self.model.run_train(x=torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * self.step)))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
        return []

    def values(self) -> list[torch.Tensor]:
        return [value for value in super().values() if not value.is_meta]  # of other stages


def make_run(zero1: bool) -> Run:
    return PipelinedRun() if comm.size("pp") > 1 else Run(dropout=DROPOUT, zero1=zero1)


def kill_at(point: str, occurrence: int, run: Run, sent: int = signal.SIGKILL) -> None:
    """From now on this process is ended by a signal at an occurrence of `point`."""
    count = 0

    def counted(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == occurrence:
            os.kill(os.getpid(), sent)

    def before(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapper(*args: Any, **options: Any) -> Any:
            counted()
            return original(*args, **options)

        setattr(owner, name, wrapper)

    if point == "backward":
        next(param for param in run.model.parameters() if not param.is_meta).register_hook(counted)
    elif point == "write":
        write = LocalStorage.write

        def chunk_by_chunk(self: LocalStorage, path: str, chunks: Any) -> None:
            write(self, path, (counted() or chunk for chunk in chunks))  # type: ignore[func-returns-value]

        LocalStorage.write = chunk_by_chunk  # type: ignore[method-assign]
    else:
        places = {
            # A scheduler has put a method of the object in place of the class's.
            "step": (torch.optim.AdamW if run.zero1 else run.optimizer, "step"),
            "copy": (WritePlan, "stage"),
            "sync": (os, "fsync"),
            "rename": (os, "replace"),
            "remove": (LocalStorage, "remove_tree"),
            "replace": (LocalStorage, "rename"),
            "load": (reading, "load"),
        }
        before(*places[point])


def train(folder: Path, point: str | None, occurrence: int, sent: int = signal.SIGKILL, zero1: bool = True) -> str:
    """Resumes if there is something to resume, trains and saves; returns a digest of the result."""
    torch.manual_seed(0)
    nxd.model_parallel_manual_seed(0)
    run = make_run(zero1)
    if point is not None:
        kill_at(point, occurrence, run, sent)
    if nxd.has_checkpoint(folder):
        run.load(folder)
    while run.step < STEPS:
        run.train()
        tag = "last" if run.step % 2 else f"step_{run.step}"  # one that is replaced, and others
        run.save(folder, tag, num_kept_ckpts=KEPT, async_save=run.step % 4 != 0)
    nxd.finalize_checkpoint()
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in run.values())).hexdigest()


def rank_main(rank: int, layout: str, store: Path, answer: Callable[[int], str]) -> None:
    ranks, degrees, _ = LAYOUTS[layout]
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    nxd.initialize_model_parallel(**degrees)
    digest = answer(rank)
    store.with_suffix(f".{rank}").write_text(digest)
    comm.barrier()


def run_ranks(layout: str, store: Path, answer: Callable[[int], str]) -> list[str] | None:
    """Returns each rank's answer; None if one was killed, whereupon the others are, as a launcher does."""
    children = {}
    ranks = LAYOUTS[layout][0]
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                rank_main(rank, layout, store, answer)
                status = 0
            except BaseException as error:  # noqa: B902
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(status)  # nothing of the parent's is to be ended twice
        children[child] = rank
    killed = failed = False
    while children:
        child, status = os.wait()
        children.pop(child)
        if status and not killed and not failed:
            killed = os.WIFSIGNALED(status)
            failed = not killed
            time.sleep(0.05)
            for other in children:
                os.kill(other, signal.SIGKILL)
    assert not failed, "a rank failed by itself"
    return None if killed else [store.with_suffix(f".{rank}").read_text() for rank in range(ranks)]


def whole(folder: Path) -> list[str]:
    checkpoints = CheckpointFolder(open_storage(folder))
    complete = checkpoints.complete()
    for tag in complete:
        assert not checkpoints.damage(tag)
        for name in [name for name, entry in (tag.files or {}).items() if entry.crc32 is None]:
            content = memoryview((folder / tag.name / name).read_bytes())
            blocks = Blocks(lambda start, stop, content=content: content[start:stop], len(content), name)
            blocks.verify(content, 0, blocks.starts[-1])
    return [tag.name for tag in complete]


def main(root: Path, layout: str, scenarios: list[Any]) -> None:
    assert api and storage
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).zero_grad()  # imports what the first optimizer does
    for number, scenario in enumerate(scenarios):
        answer = scenario_of(root / f"run_{number}", root / f"store_{number}", layout, scenario)
        print(json.dumps(answer), flush=True)


def scenario_of(folder: Path, store: Path, layout: str, scenario: Any) -> dict[str, Any]:
    """Runs it, and again if a rank was killed."""
    victim, point, occurrence, *name = scenario or (-1, None, 0)
    sent = signal.Signals[name[0]] if name else signal.SIGKILL
    zero1 = LAYOUTS[layout][2]

    def first(rank: int) -> str:
        return train(folder, point if rank == victim else None, occurrence, sent, zero1)

    digests = run_ranks(layout, store, first)
    killed, left = digests is None, whole(folder)
    if killed:
        digests = run_ranks(
            layout, store.with_name(store.name + "_again"), lambda rank: train(folder, None, 0, zero1=zero1)
        )
    return {"killed": killed, "left": left, "end": sorted(whole(folder)), "digests": digests}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
