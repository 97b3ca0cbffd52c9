"""Host time of single functions of ShardTensors, forward and backward, and of halo convolutions written by hand.

* Functions of tiny tensors on two gloo processes, beside torch's DTensor: CPU time of the main threads. What ours
  reduces is reduced in both: DTensor's Partial results and gradients of weights are redistributed.
* `softmax, sharded` is softmax with DTensor's result, which is Replicate, redistributed to the layout of ours.
* conv2d(8, 8, 3) of rows on two ranks, beside the same halos by `isend` and `irecv`: CPU time of both processes.

Variants take turns; a ratio is the median over the rounds, `again` is the peer once more, which is the noise.

    python benchmarks/shard_tensor_functions.py [--quick] [--only pointwise linear ...]

The last line is JSON: the ratios.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from common import Seconds, compared, heading, on_ranks, parser, take_turns  # first: sets the threads

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import init_device_mesh

from neuronx_dist import distributed

CHANNELS = 8
GOALS = {"pointwise": 0.30, "linear": 0.45, "softmax": 0.6, "softmax, sharded": None, "views": 0.5, "mean": 0.4}
CONVS = {"conv, tiny": (16, 1.3), "conv, 256": (256, 1.05)}


def pointwise(x: torch.Tensor, *_: Any) -> torch.Tensor:
    y = F.gelu(torch.relu(x) * 2.0) + x
    return (torch.tanh(torch.sigmoid(y) - 0.5) * y).sum()


def views(x: torch.Tensor, *_: Any) -> torch.Tensor:
    y = x.view(8, 2, 2).transpose(1, 2)
    return torch.cat([y, y], 1)


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "pointwise": pointwise,
    "linear": F.linear,
    "softmax": lambda x, *_: x.softmax(0),
    "softmax, sharded": lambda x, *_: x.softmax(0).redistribute(x.device_mesh, x.placements),
    "views": views,
    "mean": lambda x, *_: x.mean(),
}


def program(package: Any, mesh: Any, function: Callable[..., torch.Tensor], calls: int) -> Callable[[], None]:
    x, weight, bias = torch.randn(8, 4), torch.randn(4, 4), torch.zeros(4)
    shard, replicate = [package.Shard(0)], [package.Replicate()]
    operands = [
        package.distribute_tensor(operand, mesh, placements).requires_grad_()
        for operand, placements in ((x, shard), (weight, replicate), (bias, replicate))
    ]

    def reduced(y: Any) -> Any:
        summed = isinstance(y, dtensor.DTensor) and y.placements[0].is_partial()
        return y.redistribute(mesh, replicate) if summed else y

    with torch.no_grad():
        start = torch.ones_like(reduced(function(*operands)))

    def call() -> None:
        for _ in range(calls):
            y = reduced(function(*operands))
            y.backward(start) if y.dim() else y.backward()
            for operand in operands:
                reduced(operand.grad)
                operand.grad = None

    return call


def time_function(name: str, quick: bool) -> dict[str, list[Seconds]]:
    ours, theirs = distributed.init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2,))
    calls = 5 if quick else 40
    variants = {
        "ShardTensor": program(distributed, ours, FUNCTIONS[name], calls),
        "DTensor": program(dtensor, theirs, FUNCTIONS[name], calls),
        "DTensor, again": program(dtensor, theirs, FUNCTIONS[name], calls),
    }
    return take_turns(variants, 6 if quick else 30)


class Halo(torch.autograd.Function):
    """A row of each neighbour around a rank's rows, by `isend` and `irecv`; zeros where there is none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        above, below = swapped(x[:, :, :1], x[:, :, -1:])
        return torch.cat((above, x, below), 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        above, below = swapped(grad[:, :, :1], grad[:, :, -1:])
        mine = grad[:, :, 1:-1].clone()
        mine[:, :, :1] += above
        mine[:, :, -1:] += below
        return mine


def swapped(first: torch.Tensor, last: torch.Tensor) -> list[torch.Tensor]:
    """Sends rows to the ranks above and below, and returns theirs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [torch.zeros_like(first), torch.zeros_like(last)]
    waiting: list[Any] = []
    for peer, sent, into in ((rank - 1, first, received[0]), (rank + 1, last, received[1])):
        if 0 <= peer < size:
            waiting += [dist.isend(sent.contiguous(), peer), dist.irecv(into, peer)]
    for work in waiting:
        work.wait()
    return received


def time_conv(n: int, quick: bool) -> dict[str, list[Seconds]]:
    torch.manual_seed(0)
    mesh = distributed.init_device_mesh("cpu", (2,))
    conv, mirrored = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
    mirrored.load_state_dict(conv.state_dict())
    image, grad = torch.randn(1, CHANNELS, n, n), torch.randn(1, CHANNELS, n, n)
    x, y = (distributed.distribute_tensor(tensor, mesh, [distributed.Shard(2)]) for tensor in (image, grad))
    x.requires_grad_()
    rows, rows_grad = x.to_local().detach().clone().requires_grad_(), y.to_local()
    calls = (1 if n > 64 else 5) if quick else (4 if n > 64 else 20)

    def clear(module: nn.Module, x: torch.Tensor) -> None:
        module.zero_grad()
        x.grad = None

    def shard_tensor() -> None:
        for _ in range(calls):
            clear(conv, x)
            conv(x).backward(y)

    def by_hand() -> None:
        for _ in range(calls):
            clear(mirrored, rows)
            F.conv2d(Halo.apply(rows), mirrored.weight, mirrored.bias, padding=(0, 1)).backward(rows_grad)
            for param in mirrored.parameters():
                dist.all_reduce(param.grad)

    shard_tensor()
    by_hand()
    for mine, theirs in ((x.grad.to_local(), rows.grad), (conv.weight.grad, mirrored.weight.grad)):
        assert (mine - theirs).norm() / theirs.norm() < 1e-5
    return take_turns({"ShardTensor": shard_tensor, "by hand": by_hand, "by hand, again": by_hand}, 6 if quick else 30)


def threads_of(seconds: dict[str, list[Seconds]]) -> dict[str, list[Seconds]]:
    return {
        name: [one_round._replace(cpu=one_round.thread) for one_round in rounds] for name, rounds in seconds.items()
    }


def main() -> None:
    options = parser(__doc__)
    names = [*GOALS, *CONVS]
    options.add_argument("--only", nargs="+", choices=names, default=names, help="functions to measure")
    args = options.parse_args()
    heading("What functions of ShardTensors cost")
    results = {}
    for name in args.only:
        if name in GOALS:
            seconds, goal = threads_of(on_ranks(time_function, 2, name, args.quick)), GOALS[name]
        else:
            size, goal = CONVS[name]
            seconds = on_ranks(time_conv, 2, size, args.quick)
        peer, again = list(seconds)[1:]
        per = partial(compared, under=seconds[peer])
        ratio, noise = per(seconds["ShardTensor"])["_cpu"], per(seconds[again])["_cpu"]
        results[name] = round(ratio.ratio, 3)
        verdict = "" if goal is None else f"   goal {goal}: {'met' if ratio.ratio <= goal else 'MISSED'}"
        print(
            f"{name:16} / {peer:8} {ratio.ratio:6.3f} ± {ratio.interval:.3f} (again {noise.ratio:.3f} ± "
            f"{noise.interval:.3f}){verdict}",
            flush=True,
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
