"""Cost of ShardTensor: its host time on tiny tensors, a Llama block, a large convolution, and memory.

* Tiny tensors of two gloo processes: plain torch, ours, torch's DTensor. CPU time of the main thread, best of some
  rounds, in which the three take turns. Collectives of gradients are in it; DTensor leaves those of the weights of a
  linear layer out.
* The linear layers of a Llama block whose weights `distribute_module` has sharded over two ranks: against DTensor
  (hidden 32: host time), and against our own parallel layers (hidden 1024: all of it, CPU of both ranks).
* conv2d(8, 8, 3) on (1, 8, n, n) whose rows are on two ranks: against the same halos and convolution written by hand.
* The most memory of ten of these in a row on four ranks, over that of one process.

Medians of the rounds' ratios, but for tiny tensors; `again` is the peer once more, which is the noise.

    python benchmarks/shard_tensor.py [--quick] [--only tiny block conv memory]

The last line is JSON: the ratios that have goals, and microseconds a call.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from common import Seconds, compared, heading, on_ranks, parser, quiet, take_turns  # first: sets the threads

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor as distribute_dtensor
from tp_block import COLUMNS, ROWS, Variant, block, check, dtensor, ours

import neuronx_dist as nxd
from neuronx_dist import comm, distributed
from neuronx_dist.distributed import Replicate, Shard
from neuronx_dist.shard_tensor.points import knn

PARTS = ("tiny", "block", "conv", "memory", "knn")
GOALS = {"8 pointwise, both ways / DTensor": 0.30, "8 pointwise, both ways / plain": 2.5, "linear / DTensor": 0.5}
CHANNELS, CONVS = 8, 10


def pointwise(x: torch.Tensor) -> torch.Tensor:
    y = F.gelu(torch.relu(x) * 2.0) + x
    return torch.tanh(torch.sigmoid(y) - 0.5) * y


def programs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> dict[str, Callable[[], Any]]:
    with torch.no_grad():
        start = torch.ones_like(x)

    def both_ways() -> None:
        pointwise(x).backward(start)
        x.grad = None

    def linear() -> None:
        with torch.no_grad():
            F.linear(x, weight, bias)

    def linear_both_ways() -> None:
        F.linear(x, weight, bias).backward(start)
        x.grad = weight.grad = bias.grad = None

    return {
        "relu": lambda: torch.relu(x),
        "times a number": lambda: x * 2.0,
        "8 pointwise": lambda: pointwise(x),
        "8 pointwise, both ways": both_ways,
        "linear": linear,
        "linear, both ways": linear_both_ways,
    }


def measure(quick: bool) -> dict[str, dict[str, float]]:
    """Microseconds of a call, by variant and program."""
    mesh, theirs = distributed.init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2,))
    x, weight, bias = torch.randn(8, 4), torch.randn(4, 4), torch.zeros(4)
    variants = {
        "plain": [x[:4].clone(), weight.clone(), bias.clone()],
        "ours": [
            distributed.distribute_tensor(operand, mesh, [placement])
            for operand, placement in ((x, Shard(0)), (weight, Replicate()), (bias, Replicate()))
        ],
        "DTensor": [
            distribute_dtensor(operand, theirs, [placement])
            for operand, placement in ((x, Shard(0)), (weight, Replicate()), (bias, Replicate()))
        ],
    }
    todo = {name: programs(*(tensor.requires_grad_() for tensor in tensors)) for name, tensors in variants.items()}
    best: dict[str, dict[str, float]] = {name: {} for name in todo}
    rounds, repeats = (2, 10) if quick else (9, 300)
    quiet()
    for _ in range(rounds):
        for program in todo["plain"]:
            for name in todo:
                call = todo[name][program]
                began = time.thread_time()
                for _ in range(repeats):
                    call()
                seconds = (time.thread_time() - began) / repeats
                best[name][program] = min(best[name].get(program, 1e9), seconds * 1e6)
    return best


def tiny(quick: bool) -> dict[str, Any]:
    best = on_ranks(measure, 2, quick)
    print(f"{'microseconds of CPU a call':26}" + "".join(f"{name:>10}" for name in best))
    for program in best["plain"]:
        print(f"{program:26}" + "".join(f"{best[name][program]:10.1f}" for name in best))
    ratios = {}
    for goal, limit in GOALS.items():
        program, _, other = goal.partition(" / ")
        ratios[goal] = verdict(goal, best["ours"][program] / best[other][program], limit)
    return {"microseconds": best, **ratios}


def verdict(what: str, ratio: float, goal: float) -> float:
    print(f"{what:44} {ratio:6.3f}   goal {goal}: {'met' if ratio <= goal else 'MISSED'}", flush=True)
    return round(ratio, 4)


# --- the linear layers of a Llama block


class Layers(nn.Module):
    def __init__(self, full: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in full.items():
            layer = nn.Linear(value.shape[1], value.shape[0], bias=False)
            layer.weight = nn.Parameter(value.clone())
            setattr(self, name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return block(
            x,
            lambda x: [self.q(x), self.k(x), self.v(x)],
            self.o,
            lambda x: [self.gate(x), self.up(x)],
            self.down,
        )


class Distributed(Variant):
    """The block as it is, with weights that are ShardTensors; plain tensors go in and come out."""

    def __init__(self, full: dict[str, torch.Tensor]) -> None:
        mesh = distributed.init_device_mesh("cpu", (2,))

        def shard(name: str, module: nn.Module) -> None:
            for dim, names in ((0, COLUMNS), (1, ROWS)):
                if name in names:
                    module.weight = nn.Parameter(distributed.distribute_tensor(module.weight, mesh, [Shard(dim)]))

        layers = distributed.distribute_module(Layers(full), mesh, shard)
        self.weights = {name: getattr(layers, name).weight for name in full}
        self.mesh = mesh
        super().__init__(lambda x: self.full(layers(distributed.DTensor.from_local(x, mesh))), self.weights)

    @staticmethod
    def full(x: Any) -> torch.Tensor:
        whole: torch.Tensor = x.redistribute().to_local()
        return whole


class Checked(Variant):
    """The same, whose gradients `check` can read."""

    def __init__(self, variant: Distributed) -> None:
        self.variant = variant
        super().__init__(variant.forward, variant.params)

    def run(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        out = super().run(x, grad)
        self.params = {name: Local(weight.grad.to_local()) for name, weight in self.variant.weights.items()}
        return out

    def clear(self, x: torch.Tensor) -> None:
        self.variant.clear(x)


class Local:
    def __init__(self, grad: torch.Tensor) -> None:
        self.grad = grad


def time_block(hidden: int, repeats: int) -> dict[str, list[Seconds]]:
    torch.manual_seed(0)
    nxd.initialize_model_parallel(tensor_model_parallel_size=2)
    rank, tokens = dist.get_rank(), 512 if hidden > 64 else 4
    mlp = (hidden * 8 // 3 + 63) // 64 * 64
    shapes = dict.fromkeys("qkvo", (hidden, hidden)) | {"gate": (mlp, hidden), "up": (mlp, hidden)}
    shapes["down"] = (hidden, mlp)
    full = {name: torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    x, grad = torch.randn(1, tokens, hidden, requires_grad=True), torch.randn(1, tokens, hidden)
    variants = {
        "ShardTensor": Distributed(full),
        "DTensor": dtensor(full, rank),
        "our layers": ours(full, rank),
        "our layers, again": ours(full, rank),
    }
    block = variants["ShardTensor"]
    assert isinstance(block, Distributed)
    check(variants | {"ShardTensor": Checked(block)}, full, x, grad)

    def several(variant: Variant) -> None:
        for _ in range(1 if hidden > 64 else 20):
            variant.run(x, grad)
            variant.clear(x)

    rounds = take_turns({name: partial(several, variant) for name, variant in variants.items()}, repeats)
    nxd.destroy_model_parallel()
    return rounds


def llama_block(quick: bool) -> dict[str, float]:
    results = {}
    for hidden, repeats in ((32, 100), (1024, 60)):
        by_variant = on_ranks(time_block, 2, hidden, 8 if quick else repeats)
        host = hidden == 32
        for name, rounds in by_variant.items():
            if host:
                rounds[:] = [one_round._replace(cpu=one_round.thread) for one_round in rounds]
            per = compared(rounds, by_variant["our layers"])["_cpu"]
            print(f"Llama block, hidden {hidden}: {name:20} / our layers {per.ratio:6.3f} ± {per.interval:.3f}")
        peer, goal = ("DTensor", 0.5) if host else ("our layers", 1.10)
        ratio = compared(by_variant["ShardTensor"], by_variant[peer])["_cpu"].ratio
        what = f"Llama block, hidden {hidden} / {peer}"
        results[what] = verdict(what, ratio, goal)
    return results


# --- a convolution


class Halo(torch.autograd.Function):
    """A row of each neighbour around a rank's rows, written by hand; zeros where there is none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        ctx.place = rank, size
        rows = x.detach()
        above, below = rows.new_zeros(rows[:, :, :1].shape), rows.new_zeros(rows[:, :, :1].shape)
        swap({rank - 1: (rows[:, :, :1], above), rank + 1: (rows[:, :, -1:], below)}, size)
        return torch.cat((above, rows, below), 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        rank, size = ctx.place
        above, below = grad.new_zeros(grad[:, :, :1].shape), grad.new_zeros(grad[:, :, :1].shape)
        swap({rank - 1: (grad[:, :, :1], above), rank + 1: (grad[:, :, -1:], below)}, size)
        local_grad = grad[:, :, 1:-1].clone()
        local_grad[:, :, :1] += above
        local_grad[:, :, -1:] += below
        return local_grad


def swap(messages: dict[int, tuple[torch.Tensor, torch.Tensor]], size: int) -> None:
    """Sends and receives, with each rank that there is, by the exchange that ShardTensor uses."""
    nothing = torch.empty(0)
    sends, recvs = [nothing] * size, [nothing] * size
    for rank, (sent, received) in messages.items():
        if 0 <= rank < size:
            sends[rank], recvs[rank] = sent.contiguous(), received
    comm.exchange(sends, recvs, "world")


def time_conv(n: int, repeats: int) -> dict[str, list[Seconds]]:
    torch.manual_seed(0)
    mesh = distributed.init_device_mesh("cpu", (2,))
    conv, mirrored = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
    mirrored.load_state_dict(conv.state_dict())
    image, grad = torch.randn(1, CHANNELS, n, n), torch.randn(1, CHANNELS, n, n)
    x, y = (distributed.distribute_tensor(tensor, mesh, [Shard(2)]) for tensor in (image, grad))
    x.requires_grad_()
    local, own_grad = x.to_local().detach().clone().requires_grad_(), y.to_local()

    def clear(module: nn.Module, x: torch.Tensor) -> None:
        module.zero_grad()
        x.grad = None

    def shard_tensor() -> None:
        clear(conv, x)
        conv(x).backward(y)

    def by_hand() -> None:
        clear(mirrored, local)
        F.conv2d(Halo.apply(local), mirrored.weight, mirrored.bias, padding=(0, 1)).backward(own_grad)
        for param in mirrored.parameters():
            dist.all_reduce(param.grad)

    shard_tensor()
    by_hand()
    for mine, theirs in ((x.grad.to_local(), local.grad), (conv.weight.grad, mirrored.weight.grad)):
        assert (mine - theirs).norm() / theirs.norm() < 1e-5
    return take_turns({"ShardTensor": shard_tensor, "by hand": by_hand, "by hand, again": by_hand}, repeats)


def convolution(quick: bool) -> dict[str, float]:
    by_variant = on_ranks(time_conv, 2, 128 if quick else 1024, 8 if quick else 30)
    for name, rounds in by_variant.items():
        per = compared(rounds, by_variant["by hand"])
        print(
            f"conv2d both ways: {name:16} / by hand: CPU {per['_cpu'].ratio:6.3f} ± {per['_cpu'].interval:.3f}, "
            f"wall {per[''].ratio:6.3f} ± {per[''].interval:.3f}"
        )
    what = "conv2d, both ways / by hand"
    return {what: verdict(what, compared(by_variant["ShardTensor"], by_variant["by hand"])["_cpu"].ratio, 1.05)}


# --- memory


def peak(n: int) -> int:
    """Bytes that a rank takes at most for some convolutions in a row, forward and backward."""
    mesh = distributed.init_device_mesh("cpu", (dist.get_world_size(),))
    convs = nn.Sequential(*[nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(CONVS)])
    small = distributed.ones(1, CHANNELS, 64, 64, device_mesh=mesh, placements=[Shard(2)], requires_grad=True)
    convs(small).sum().backward()  # code, libraries, buffers of gloo
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    x = distributed.ones(1, CHANNELS, n, n, device_mesh=mesh, placements=[Shard(2)], requires_grad=True)
    convs(x).sum().backward()
    most: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(most, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return max(most) * 1024


def memory(quick: bool) -> dict[str, float]:
    n = 512 if quick else 1024
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed tensors go back: otherwise gaps of glibc's heap are measured
    alone, sharded = on_ranks(peak, 1, n), on_ranks(peak, 4, n)
    halos = (CONVS + 1) * 2 * CHANNELS * n * 4
    print(
        f"memory of {CONVS} convolutions: {alone:,} bytes in one process, {sharded:,} on a rank of 4; halos {halos:,}"
    )
    what = f"memory of {CONVS} convolutions, without halos / one process"
    return {what: verdict(what, (sharded - halos) / alone, 0.30)}


def brute_force(x: torch.Tensor, y: torch.Tensor, k: int) -> torch.Tensor:
    """The tutorial's nearest neighbours, as they are written for one device."""
    distance = torch.norm(x[None, :, :] - y[:, None, :], dim=2)
    return x[torch.topk(distance, k=k, dim=1, largest=False)[1]]


def neighbours(quick: bool) -> dict[str, float]:
    """Milliseconds of CPU for the 17 nearest of 23,456 points to each of 1,234."""
    mesh, theirs = distributed.init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    points = [torch.randn(2345 if quick else 23_456, 3), torch.randn(123 if quick else 1234, 3)]
    ours = [distributed.distribute_tensor(point_set, mesh, [Shard(0)]) for point_set in points]
    dtensors = [distribute_dtensor(point_set, theirs, [Shard(0)]) for point_set in points]
    variants: dict[str, Callable[[], Any]] = {
        "one process": lambda: brute_force(*points, 17),
        "DTensor": lambda: brute_force(*dtensors, 17),
        "unmodified": lambda: brute_force(*ours, 17),
        "ring": lambda: knn(*ours, 17),
    }
    return {
        name: min(seconds.thread for seconds in by_round) * 1e3
        for name, by_round in take_turns(variants, 1 if quick else 6).items()
    }


def nearest_neighbours(quick: bool) -> dict[str, float]:
    by_variant = on_ranks(neighbours, 2, quick)
    print(
        "nearest neighbours, ms of CPU: " + ", ".join(f"{name} {seconds:.0f}" for name, seconds in by_variant.items())
    )
    return {
        f"kNN {name} / {other}": verdict(f"kNN {name} / {other}", by_variant[name] / by_variant[other], goal)
        for name in ("ring", "unmodified")
        for other, goal in (("DTensor", 0.80), ("one process", 0.60))
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    args = options.parse_args()
    heading("What ShardTensor costs")
    functions = {"tiny": tiny, "block": llama_block, "conv": convolution, "memory": memory, "knn": nearest_neighbours}
    results: dict[str, Any] = {}
    for part in args.only:
        results |= functions[part](args.quick)
        print(flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
