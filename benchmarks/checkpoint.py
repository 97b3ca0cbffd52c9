"""Saving and loading 200M fp32 weights (762 MiB), a shard on each rank: ours, torch.save, torch.distributed.checkpoint.

    save     torch.save     each rank its shard, into a file of its own, synced
             DCP            torch.distributed.checkpoint.save of DTensors
             DCP async      async_save, awaited; and what of it keeps the training waiting
             ours           save_checkpoint
             ours async     with async_save=True, awaited; and what of it keeps the training waiting: the call, and
                            (wall time) the next optimizer.step(), if it comes at once, for what is not copied yet
    load     mmap           a rank copies its slices of a memory-mapped file of whole tensors: the least there is to do
             DCP, ours      the same layout: shards of dim 0
             ours read      ours without the look at all files that load_checkpoint takes before it changes anything
    reshard  mmap, DCP ...  into another layout: shards of dim 1

Processes on loopback, turn by turn. A round gives each variant's CPU time of all ranks; what is reported is the median
over the rounds of a round's ratio to DCP (save) or to mmap (load, reshard), and milliseconds of one rank.

    python benchmarks/checkpoint.py [--quick] [--ranks 2 4] [--rounds 5] [--folder /dev/shm]

The last line is JSON: `{"2 ranks": {"save": {"ours": ratio, ...}, "load": ..., "reshard": ...}, ...}`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import Seconds, heading, on_ranks, parser, ratio, take_turns  # first: sets the threads

# isort: split
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import neuronx_dist as nxd
from neuronx_dist.checkpoint import api
from neuronx_dist.weights.shard_spec import ShardSpec, set_spec

GOALS = {"save": ("ours", 0.8), "load": ("ours", 1.2), "reshard": ("ours", 1.2)}


def shapes(quick: bool) -> list[tuple[int, int]]:
    """Shapes of the matrices of a Llama with 200M parameters."""
    hidden, layers, vocabulary = (128, 2, 1000) if quick else (1024, 11, 32000)
    layer = [(hidden, hidden)] * 4 + [(11 * hidden // 4, hidden)] * 2 + [(hidden, 11 * hidden // 4)]
    return [(vocabulary, hidden)] * 2 + layer * layers


class Model(nn.Module):
    """This rank's shards of dim `dim`."""

    def __init__(self, sizes: list[tuple[int, int]], dim: int) -> None:
        super().__init__()
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for number, size in enumerate(sizes):
            spec = ShardSpec("tp", dim, num_partitions=ranks, full_shape=size)
            shard = torch.full(spec.local_shape, rank + 2.0)
            self.register_parameter(f"w{number}", nn.Parameter(shard))
            set_spec(self, f"w{number}", spec)
        self.dim = dim

    def dtensors(self, mesh: DeviceMesh) -> dict[str, Any]:
        placements = [Shard(self.dim)]
        return {
            f"model.{name}": DTensor.from_local(param.detach(), mesh, placements)
            for name, param in self.named_parameters()
        }


def fresh(folder: Path) -> Path:
    """An empty folder, made by rank 0."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    return folder


def save_variants(
    root: Path, model: Model, mesh: DeviceMesh, blocked: dict[str, list[Seconds]]
) -> dict[str, Callable[[], None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # without state; who is given one copies in the background

    def block(name: str, call: Callable[[], Any]) -> Any:
        wall, thread = time.perf_counter(), time.thread_time()
        result = call()
        blocked[name].append(Seconds(time.perf_counter() - wall, 0.0, time.thread_time() - thread))
        return result

    def torch_save() -> None:
        with open(root / "torch" / f"{dist.get_rank()}.pt", "wb") as file:
            torch.save(model.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())

    def dcp_save() -> None:
        dcp.save(model.dtensors(mesh), checkpoint_id=root / "DCP")

    def dcp_async() -> None:
        save = partial(dcp.async_save, model.dtensors(mesh), checkpoint_id=root / "DCP async")
        block("DCP async", save).result()

    def ours() -> None:
        api.save_checkpoint(root / "ours", "tag", model)

    def ours_async() -> None:
        block("ours async", partial(api.save_checkpoint, root / "ours async", "tag", model, optimizer, async_save=True))
        block("next step", optimizer.step)
        api.finalize_checkpoint()

    return {
        "torch.save": torch_save,
        "DCP": dcp_save,
        "DCP async": dcp_async,
        "ours": ours,
        "ours async": ours_async,
        "DCP again": dcp_save,
    }


def load_variants(root: Path, model: Model, mesh: DeviceMesh) -> dict[str, Callable[[], None]]:
    params = dict(model.named_parameters())
    sizes = {name: param._shard_spec.full_shape for name, param in params.items()}  # type: ignore[attr-defined]
    rank = dist.get_rank()

    def mapped() -> None:
        path, start = str(root / "whole"), 0
        whole = torch.from_file(path, shared=False, size=os.path.getsize(path) // 4)
        for name, param in params.items():
            rows, columns = sizes[name]
            length = param.shape[model.dim]
            source = whole[start : start + rows * columns].view(rows, columns).narrow(model.dim, rank * length, length)
            param.data.copy_(source)
            start += rows * columns

    def dcp_load() -> None:
        dcp.load(model.dtensors(mesh), checkpoint_id=root / "DCP")

    def ours() -> None:
        api.load_checkpoint(root / "ours", "tag", model)

    return {"mmap": mapped, "DCP": dcp_load, "ours": ours, "mmap again": mapped}


def write_whole(root: Path, sizes: list[tuple[int, int]]) -> None:
    """The file of the least there is to do."""
    if dist.get_rank() == 0:
        with open(root / "whole", "wb") as file:
            for rows, columns in sizes:
                file.write(memoryview(torch.ones(rows, columns).numpy()))
    dist.barrier()


def measure(root: str, quick: bool, rounds: int) -> dict[str, dict[str, list[Seconds]]]:
    warnings.filterwarnings("ignore")
    nxd.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    folder, sizes = Path(root), shapes(quick)
    blocked: dict[str, list[Seconds]] = {"DCP async": [], "ours async": [], "next step": []}
    model = Model(sizes, 0)
    for name in ("torch", "DCP", "DCP async", "ours", "ours async"):
        fresh(folder / name)

    def clear(name: str) -> None:
        fresh(folder / name.removesuffix(" again"))

    saves = save_variants(folder, model, mesh, blocked)
    results = {"save": take_turns(saves, rounds, between=clear)}  # one checkpoint at a time: tmpfs is memory
    results["blocked"] = {name: values[-rounds:] for name, values in blocked.items()}
    for name in ("DCP", "ours"):
        saves[name]()
    write_whole(folder, sizes)
    for what, dim in (("load", 0), ("reshard", 1)):
        target = Model(sizes, dim)
        with torch.no_grad():
            for param in target.parameters():
                param.zero_()
        loads = load_variants(folder, target, mesh)
        sums = []
        for name in ("DCP", "mmap", "ours"):
            loads[name]()
            sums.append(sum(float(param.double().sum()) for param in target.parameters()))
        assert sums[0] == sums[2] != sums[1], "what is loaded differs"
        results[what] = take_turns(loads, rounds)
    nxd.destroy_model_parallel()
    return results


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--folder", default=tempfile.gettempdir(), help="where files are written")
    args = options.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(1)
    )  # as `timeout` ends it: what lies in memory is removed then too
    heading("Saving and loading checkpoints: CPU time of all ranks")
    found: dict[str, Any] = {}
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(dir=args.folder) as root:
            results = on_ranks(measure, ranks, root, args.quick, 2 if args.quick else args.rounds)
        figures: dict[str, Any] = {}
        print(f"{ranks} ranks, {args.folder}")
        for what in ("save", "load", "reshard"):
            base = "DCP" if what == "save" else "mmap"
            figures[what] = {}
            for name, seconds in results[what].items():
                value, width = ratio([s.cpu for s in seconds], [s.cpu for s in results[what][base]])
                cost = statistics.median(s.cpu for s in seconds) / ranks * 1e3
                goal = f"  goal {GOALS[what][1]}" if GOALS[what][0] == name else ""
                print(f"    {what:8} {name:11} {value:6.2f} ± {width:.2f} of {base}  {cost:7.0f} ms a rank{goal}")
                figures[what][name] = round(value, 3)
        for name, seconds in results["blocked"].items():
            is_wait = name == "next step"  # which takes no CPU
            sync = statistics.median(s.wall if is_wait else s.cpu / ranks for s in results["save"]["ours"])
            cost = statistics.median(s.wall if is_wait else s.thread for s in seconds)
            what = "wall" if is_wait else "CPU"
            goal = "  goal 0.1" if name == "ours async" else ""
            print(f"    blocked  {name:11} {cost / sync:6.2f} of ours   {cost * 1e3:7.0f} ms of {what} on rank 0{goal}")
            figures.setdefault("blocked", {})[name] = round(cost / sync, 3)
        found[f"{ranks} ranks"] = figures
    print(json.dumps(found))


if __name__ == "__main__":
    main()
