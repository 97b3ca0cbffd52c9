"""Runs whose ranks are killed, and started again: a program, which forks the ranks, so that torch is loaded once.

    python -m tests.faults.killed_runs FOLDER RANKS SCENARIOS

SCENARIOS is a JSON list of [rank that is killed, at which point, at which occurrence of it]; [] is an undisturbed run.
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
POINTS = ("backward", "step", "copy", "write", "sync", "rename", "remove", "replace", "load")


def kill_at(point: str, occurrence: int, run: Run) -> None:
    """From now on this process is killed at an occurrence of `point`."""
    count = 0

    def counted(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == occurrence:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapper(*args: Any, **options: Any) -> Any:
            counted()
            return original(*args, **options)

        setattr(owner, name, wrapper)

    if point == "backward":
        run.model.up.weight.register_hook(counted)
    elif point == "write":
        write = LocalStorage.write

        def chunk_by_chunk(self: LocalStorage, path: str, chunks: Any) -> None:
            write(self, path, (counted() or chunk for chunk in chunks))  # type: ignore[func-returns-value]

        LocalStorage.write = chunk_by_chunk  # type: ignore[method-assign]
    else:
        places = {
            "step": (torch.optim.AdamW, "step"),
            "copy": (WritePlan, "stage"),
            "sync": (os, "fsync"),
            "rename": (os, "replace"),
            "remove": (LocalStorage, "remove_tree"),
            "replace": (LocalStorage, "rename"),
            "load": (reading, "load"),
        }
        before(*places[point])


def train(folder: Path, point: str | None, occurrence: int) -> str:
    """Resumes if there is something to resume, trains and saves; returns a digest of the result."""
    torch.manual_seed(0)
    nxd.model_parallel_manual_seed(0)
    run = Run(dropout=DROPOUT)
    if point is not None:
        kill_at(point, occurrence, run)
    if nxd.has_checkpoint(folder):
        run.load(folder)
    while run.step < STEPS:
        run.train()
        tag = "last" if run.step % 2 else f"step_{run.step}"  # one that is replaced, and others
        run.save(folder, tag, num_kept_ckpts=KEPT, async_save=run.step % 4 != 0)
    nxd.finalize_checkpoint()
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in run.values())).hexdigest()


def rank_main(rank: int, ranks: int, store: Path, answer: Callable[[int], str]) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    nxd.initialize_model_parallel(tensor_model_parallel_size=2)
    digest = answer(rank)
    store.with_suffix(f".{rank}").write_text(digest)
    comm.barrier()


def run_ranks(ranks: int, store: Path, answer: Callable[[int], str]) -> list[str] | None:
    """What each rank answered; None if one was killed, whereupon the others are, as a launcher does."""
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                rank_main(rank, ranks, store, answer)
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


def main(root: Path, ranks: int, scenarios: list[Any]) -> None:
    assert api and storage
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).zero_grad()  # imports what the first optimizer does
    for number, scenario in enumerate(scenarios):
        answer = scenario_of(root / f"run_{number}", root / f"store_{number}", ranks, scenario)
        print(json.dumps(answer), flush=True)


def scenario_of(folder: Path, store: Path, ranks: int, scenario: Any) -> dict[str, Any]:
    """Runs it, and again if a rank was killed."""
    victim, point, occurrence = scenario or (-1, None, 0)

    def first(rank: int) -> str:
        return train(folder, point if rank == victim else None, occurrence)

    digests = run_ranks(ranks, store, first)
    killed, left = digests is None, whole(folder)
    if killed:
        digests = run_ranks(ranks, store.with_name(store.name + "_again"), lambda rank: train(folder, None, 0))
    return {"killed": killed, "left": left, "end": sorted(whole(folder)), "digests": digests}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
