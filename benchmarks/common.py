"""Common code of the benchmarks: processes on loopback, the heading of a report, medians of paired measurements."""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, in the spawned processes too
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["Seconds", "compared", "heading", "notch", "num_bytes", "on_ranks", "parser", "quiet", "ratio", "take_turns"]

_UNITS = {"K": 1 << 10, "M": 1 << 20}


class Seconds(NamedTuple):
    wall: float
    cpu: float  # of the whole process: gloo's threads as well
    thread: float = 0.0  # CPU of the thread that runs Python


def parser(description: str | None) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=(description or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="few repeats: whether it works, not how fast it is")
    return options


def heading(title: str) -> None:
    """Prints what a figure is worth nothing without: the machine, the versions, the command and the date."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    print(f"{title}\n")
    print(f"machine   {_processor()}, {os.cpu_count()} cores, {platform.system()}; load {load}")
    print(f"versions  torch {torch.__version__}, Python {platform.python_version()}, 1 thread per process")
    print(f"command   python {shlex.join(sys.argv)}")
    print(f"date      {datetime.date.today().isoformat()}\n", flush=True)


def on_ranks(function: Callable[..., Any], size: int, *args: Any) -> Any:
    """`function(*args)` on `size` real processes joined by gloo on loopback; returns what rank 0 returned."""
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_rank, (function, size, os.path.join(folder, "store"), results, args), nprocs=size, daemon=True)
        return results.get()


def _rank(rank: int, function: Callable[..., Any], size: int, store: str, results: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        result = function(*args)
        if rank == 0:
            results.put(result)
    finally:
        dist.destroy_process_group()


def quiet() -> None:
    """No garbage collection from here on: it would fall on whoever runs at that time."""
    gc.collect()
    gc.freeze()
    gc.disable()


def take_turns(
    variants: Mapping[str, Callable[[], Any]], repeats: int, between: Callable[[str], None] | None = None
) -> dict[str, list[Seconds]]:
    """Each variant's seconds, round by round: wall of the slowest rank, CPU of all ranks together.

    `between(name)` is called after each run of a variant, and is not measured.
    """
    names = list(variants)
    times: dict[str, list[Seconds]] = {name: [] for name in names}
    turns = _orders(len(names))
    quiet()
    for turn in range(-2, repeats):  # two rounds to warm up
        for index in turns[turn % len(turns)]:
            name = names[index]
            seconds = _measure(variants[name])
            if between is not None:
                between(name)
            if turn >= 0:
                times[name].append(seconds)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, times)
    return {
        name: [
            Seconds(*(function(part) for function, part in zip((max, sum, sum), zip(*ranks))))
            for ranks in zip(*(results[name] for results in everyone))
        ]
        for name in names
    }


def _measure(run: Callable[[], Any]) -> Seconds:
    """One run, after all ranks have come here."""
    dist.barrier()
    wall, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
    run()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - thread)


def _orders(count: int) -> list[list[int]]:
    """Orders of `count` variants, one a round, in which each comes as often after each other one (Williams' design)."""
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]
    orders = [[(start + step) % count for step in zigzag] for start in range(count)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]


def ratio(over: Sequence[float], under: Sequence[float]) -> tuple[float, float]:
    """Median of the ratios of paired measurements, and the half-width of its 95 % interval."""
    ratios = [a / b for a, b in zip(over, under)]
    return statistics.median(ratios), notch(ratios)


class Compared(NamedTuple):
    """One variant against another, by one kind of seconds: medians in seconds, and the ratio of paired rounds."""

    seconds: float
    base: float
    ratio: float
    interval: float  # half-width, of the ratio


def compared(over: Sequence[Seconds], under: Sequence[Seconds]) -> dict[str, Compared]:
    """A variant's rounds against another's, in wall and in CPU time; the keys are what names in reports end in."""
    results = {}
    for key, part in (("", "wall"), ("_cpu", "cpu")):
        mine, base = ([getattr(one, part) for one in rounds] for rounds in (over, under))
        results[key] = Compared(statistics.median(mine), statistics.median(base), *ratio(mine, base))
    return results


def num_bytes(text: str) -> int:
    """`64K`, `1M` as a number."""
    return int(text[:-1]) * _UNITS[text[-1]]


def notch(values: Sequence[float]) -> float:
    """Half-width of the 95 % interval of a median: 1.57 IQR / sqrt(n) (McGill, Tukey and Larsen 1978)."""
    if len(values) < 4:
        return float("nan")
    first, _, third = statistics.quantiles(values, n=4)
    return 1.57 * (third - first) / len(values) ** 0.5


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
