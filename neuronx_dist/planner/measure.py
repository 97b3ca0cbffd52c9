"""Measured speeds of this job's devices and links: what `Cluster.measure` fills a cluster with.

Products, memory and calls are timed on all ranks at the same time, as in a step: cores of one host share its memory.
Pointwise results are new tensors, as activations are: on the CPU that costs page faults. Collectives are those of the
groups of the job's mesh, timed twice: one after another, which shows bandwidth and latency, and each between two
products, as in a step, which takes longer (2 to 4 times on gloo): ranks wait for one another, and caches are cold. The
difference is `in_step`. Between products the verbs differ (`between`), messages from rank to rank among them. A call is
one of a small layer: modules, views and autograd take more of its time on a CPU than the operation.

A host that launches kernels of a device waits for them after many calls, so that neither the wait nor, between
products, its launches count: in a step the host is ahead.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from functools import partial
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from .. import comm
from ..accelerator.machine import module_of
from ..accelerator.streams import has_streams, synchronize
from .presets import hops

__all__ = ["GroupSpeed", "Speeds", "device_memory", "fingerprint", "measure_groups", "measure_speeds"]

KINDS = ("all_reduce", "all_gather", "reduce_scatter")
SIZES = {"cpu": (256, 512, 1024), "accelerator": (1024, 2048, 4096, 8192)}  # of products
_SPAN = 5e-3  # seconds of calls of a device before a wait for it, which takes about 20 us
AXES = ("tp", "cp", "ep", "dp", "edp", "pp")


#: Calls of a Llama's layer, forward and backward, as `seconds.py` counts them: 2 norms of 7, 14 others, 8 products.
LAYER_CALLS = 3 * (2 * 7 + 14 + 8)


class Speeds(NamedTuple):
    """Speeds of a device, the slowest of all ranks.

    Attributes:
        flops: floating-point operations per second of products, by dtype, the median over sizes; `best`: the largest.
        attention: speed of causal attention's products, relative to that of others of the first dtype.
        bandwidth: bytes per second that a pointwise operation reads and writes.
        launch: seconds of a call of a layer that computes nothing, with its share of modules, views and autograd.
    """

    flops: dict[str, float]
    best: dict[str, float]
    attention: float
    bandwidth: float
    launch: float


class GroupSpeed(NamedTuple):
    """Speed of the collectives of a group: `size` ranks, `stride` apart.

    Attributes:
        bandwidth: bytes per second that a rank sends in a ring.
        latency: seconds of a hop, of a ring or a tree.
        in_step: additional seconds between products.
        between: seconds of a hop of no bytes between products, by verb; that of messages to the next rank is "send".
    """

    size: int
    stride: int
    bandwidth: float
    latency: float
    in_step: float
    between: dict[str, float]


def fingerprint(device: torch.device) -> dict[str, str]:
    """Returns where a measurement was made: host, device, torch, ranks."""
    name = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} {os.cpu_count()} cores"
    )
    return {
        "host": platform.node(),
        "device": f"{device.type}: {name}",
        "torch": torch.__version__,
        "ranks": str(comm.size("world") if comm.is_initialized() else 1),
        "threads": str(torch.get_num_threads()),
    }


def device_memory(device: torch.device, ranks_per_host: int) -> int:
    """Returns the bytes of a device; on the CPU the host's memory is shared by its ranks."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_per_host
    module = module_of(device.type)
    if hasattr(module, "mem_get_info"):  # torch 2.9 has no other
        return int(module.mem_get_info(device)[1])
    return int(torch.accelerator.get_memory_info(device)[1])


def measure_speeds(device: torch.device, seconds: float) -> Speeds:
    """Times products, memory and calls; `seconds`: about how long, in all."""
    on_cpu = device.type == "cpu"
    dtypes = ("float32", "float64") if on_cpu else ("bfloat16", "float16", "float32")
    sizes = SIZES["cpu" if on_cpu else "accelerator"]
    share = seconds / (len(dtypes) * len(sizes) + 3)
    flops, best = {}, {}
    for dtype in dtypes:
        rates = []
        for size in sizes:
            x = torch.randn(size, size, device=device).to(getattr(torch, dtype))
            rates.append(2 * size**3 / _seconds(partial(torch.mm, x, x, out=torch.empty_like(x)), device, share))
        flops[dtype], best[dtype] = median(rates), max(rates)
    heads, length, width = (8, 256, 32) if on_cpu else (16, 4096, 128)
    qkv = torch.randn(3, 1, heads, length, width, device=device, dtype=getattr(torch, dtypes[0]), requires_grad=True)
    of_output = torch.ones_like(qkv[0])

    def attend() -> None:
        F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True).backward(of_output)

    operations = (1 + 2.5) * 2 * heads * length**2 * width  # of both passes: `seconds.py`
    attention = operations / _seconds(attend, device, share) / flops[dtypes[0]]
    x = torch.zeros((1 << 20) if on_cpu else (64 << 20), device=device)
    bandwidth = 2 * x.nbytes / _seconds(partial(torch.add, x, 1), device, share)
    layers = nn.Sequential(*(_LeastLayer() for _ in range(4))).to(device)
    tokens = torch.ones(1, 2, 4, device=device, requires_grad=True)
    launch = _seconds(lambda: layers(tokens).sum().backward(), device, share) / (4 * LAYER_CALLS)
    mine = Speeds(flops, best, attention, bandwidth, launch)
    ranks: list[Speeds] = comm.gather_objects(mine) if comm.is_initialized() else [mine]
    return Speeds(
        {dtype: min(one.flops[dtype] for one in ranks) for dtype in dtypes},
        {dtype: max(one.best[dtype] for one in ranks) for dtype in dtypes},
        min(one.attention for one in ranks),
        min(one.bandwidth for one in ranks),
        max(one.launch for one in ranks),
    )


class _LeastLayer(nn.Module):
    """Layer of a Llama whose 2 tokens have 4 elements: its time is that of its calls."""

    def __init__(self) -> None:
        super().__init__()
        names = ("query", "key", "value", "output", "gate", "up", "down")
        self.products = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})
        self.scales = nn.ParameterList(torch.ones(4) for _ in range(2))

    def _norm(self, x: torch.Tensor, number: int) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.scales[number] * wide.to(x.dtype)

    def _heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        heads = self.products[name](x).view(1, 2, 2, 2).transpose(1, 2)
        return heads if name == "value" else heads * 0.5 + torch.cat((-heads[..., 1:], heads[..., :1]), -1) * 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalized = self._norm(x, 0)
        query, key, value = (self._heads(normalized, name) for name in ("query", "key", "value"))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.products["output"](attended.transpose(1, 2).reshape(1, 2, 4))
        normalized = self._norm(x, 1)
        gated = F.silu(self.products["gate"](normalized)) * self.products["up"](normalized)
        return x + self.products["down"](gated)


def measure_groups(device: torch.device, seconds: float) -> list[GroupSpeed]:
    """Times the collectives of each group of the mesh that has its own size and distance between ranks.

    Args:
        seconds: about how long, in all.
    """
    groups: dict[tuple[int, int], str] = {}
    for axis in AXES:
        ranks = comm.communicator(axis).ranks
        if len(ranks) > 1:
            groups.setdefault((len(ranks), ranks[1] - ranks[0]), axis)
    return [
        _measure_group(axis, size, stride, device, seconds / len(groups)) for (size, stride), axis in groups.items()
    ]


def _measure_group(axis: str, size: int, stride: int, device: torch.device, seconds: float) -> GroupSpeed:
    small, large = 16 << 10, (2 << 20) if device.type == "cpu" else (128 << 20)
    share = seconds / (4 * len(KINDS) + 4)
    width, dtype = (256, torch.float32) if device.type == "cpu" else (4096, torch.bfloat16)
    x = torch.randn(width, width, device=device, dtype=dtype)
    out = torch.empty_like(x)

    def product() -> None:
        torch.mm(x, x, out=out)

    alone = _agreed_seconds(product, device, share)

    def between_products(collective: Callable[[], Any]) -> float:
        def both() -> None:
            product()
            collective()

        return max(0.0, _agreed_seconds(both, device, share) - alone)

    bandwidths, latencies, additions = [], [], []
    between: dict[str, float] = {}
    for kind in KINDS:
        passes = 2 if kind == "all_reduce" else 1
        collectives = [_collective(kind, axis, size, nbytes, device) for nbytes in (small, large)]
        back_to_back = [_agreed_seconds(collective, device, share) for collective in collectives]
        between_them = [between_products(collective) for collective in collectives]
        times = list(map(min, back_to_back, between_them))  # between products the host's launch takes no time
        added = [max(0.0, one - time) for one, time in zip(between_them, times)]
        bandwidths.append(passes * (large - small) * (1 - 1 / size) / max(times[1] - times[0], 1e-9))
        steps = hops(kind, size, 1, size)
        latencies.append(times[0] / steps)
        additions += added
        between[kind] = (times[0] + mean(added)) / steps
    bandwidth = median(bandwidths)
    messages = {"send": (1, _message(axis, size, small, device))}
    messages["all_to_all"] = (hops("all_to_all", size, 1, size), _collective("all_to_all", axis, size, small, device))
    for kind, (steps, send) in messages.items():
        between[kind] = max(0.0, between_products(send) - small / bandwidth) / steps
    return GroupSpeed(size, stride, bandwidth, median(latencies), median(additions), between)


def _message(axis: str, size: int, nbytes: int, device: torch.device) -> Callable[[], Any]:
    """Returns a call in which each rank sends `nbytes` to the next one."""
    x, pairs = torch.zeros(nbytes // 4, device=device), [(rank, (rank + 1) % size) for rank in range(size)]
    verb = comm.permute
    return lambda: verb(x, axis, pairs)


def _collective(kind: str, axis: str, size: int, nbytes: int, device: torch.device) -> Callable[[], Any]:
    """Returns a call of a collective whose larger side has `nbytes`."""
    whole = nbytes // 4 // size * size
    x = torch.zeros(whole // size if kind == "all_gather" else whole, device=device)
    verb = getattr(comm, kind)
    return lambda: verb(x, axis)


def _seconds(run: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Returns the median seconds of a call, of as many as fit `seconds`, at least 3; all ranks begin together."""
    if comm.is_initialized():
        comm.barrier()
    run()
    return _median_seconds(run, device, seconds, _timed(run, device, 1, 1)[0])


def _agreed_seconds(run: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Returns the median over as many calls as the slowest rank can make in `seconds`; of ranks the largest."""
    run()
    once = max(comm.gather_objects(_timed(run, device, 1, 1)[0]))
    return max(comm.gather_objects(_median_seconds(run, device, seconds, once, most=200)))


def _median_seconds(
    run: Callable[[], Any], device: torch.device, seconds: float, once: float, most: int = 1 << 20
) -> float:
    """Returns the median seconds of a call; `once`: seconds of a call and a wait for the device."""
    calls = max(1, int(_SPAN / max(once, 1e-7))) if has_streams(device.type) else 1
    return median(_timed(run, device, min(most, max(3, int(seconds / max(once * calls, 1e-7)))), calls))


def _timed(run: Callable[[], Any], device: torch.device, count: int, calls: int) -> list[float]:
    """Returns the seconds of a call, `count` times, of `calls` calls before a wait for the device."""
    times = []
    for _ in range(count):
        synchronize(device.type)
        began = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize(device.type)
        times.append((time.perf_counter() - began) / calls)
    return times
