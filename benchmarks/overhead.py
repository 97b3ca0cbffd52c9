"""Python per call of a layer and of an operator: ours against hand-written autograd functions with the same work.

One process, tensors of a few elements, and torch's `fake` process group of size 2, which communicates nothing: what is
left is the time of Python and of torch's dispatch. `hand` calls torch.distributed itself; ours minus hand is what this
package adds. Forward, and forward plus backward, CPU time, medians of batches that take turns.

    python benchmarks/overhead.py [--quick] [--batches 60] [--calls 200]
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from common import heading, parser, quiet  # first: sets the threads

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from handwritten import Column, Row
from torch.testing._internal.distributed.fake_pg import FakeStore

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends.c10d import C10dBackend
from neuronx_dist.parallel_layers import fuse_columns
from neuronx_dist.spmd import I, P, R, S

IN, OUT, TOKENS, SIZE = 8, 8, 4, 2
GOAL = 15.0  # µs per layer call over hand


class SequenceColumn(torch.autograd.Function):
    """Sequence first: `[seq/t, in] -> [seq, out/t]`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        full = x.new_empty(x.shape[0] * SIZE, *x.shape[1:])
        dist.all_gather_single(full, x)
        return F.linear(full, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        full = x.new_empty(x.shape[0] * SIZE, *x.shape[1:])
        gathering = dist.all_gather_single(full, x, async_op=True)
        flat = grad.view(-1, grad.shape[-1])
        partial = flat.mm(weight)
        grad_x = torch.empty_like(x)
        reducing = dist.reduce_scatter_single(grad_x, partial.view_as(full), async_op=True)
        gathering.wait()
        grad_weight = flat.t().mm(full.view(-1, full.shape[-1]))
        reducing.wait()
        return grad_x, grad_weight


class SequenceRow(torch.autograd.Function):
    """Sequence first: `[seq, in/t] -> [seq/t, out]`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        partial = F.linear(x, weight)
        out = partial.new_empty(x.shape[0] // SIZE, *partial.shape[1:])
        dist.reduce_scatter_single(out, partial)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        full = grad.new_empty(grad.shape[0] * SIZE, *grad.shape[1:])
        dist.all_gather_single(full, grad)
        flat = full.view(-1, full.shape[-1])
        return flat.mm(weight).view_as(x), flat.t().mm(x.view(-1, x.shape[-1]))


class ReduceForward(torch.autograd.Function):
    """Sum forward, `reduce_backward` or identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reduce_backward: bool) -> torch.Tensor:
        ctx.reduce_backward = reduce_backward
        out = x.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.reduce_backward:
            grad = grad.clone()
            dist.all_reduce(grad)
        return grad, None


class ReduceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        full = x.new_empty(x.shape[0] * SIZE, *x.shape[1:])
        dist.all_gather_single(full, x)
        return full

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        piece = grad.new_empty(grad.shape[0] // SIZE, *grad.shape[1:])
        dist.reduce_scatter_single(piece, grad)
        return piece


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        piece = x.new_empty(x.shape[0] // SIZE, *x.shape[1:])
        dist.reduce_scatter_single(piece, x)
        return piece

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        full = grad.new_empty(grad.shape[0] * SIZE, *grad.shape[1:])
        dist.all_gather_single(full, grad)
        return full


class Case(NamedTuple):
    """Two ways to the same work; a layer counts against the goal `layers` times."""

    name: str
    hand: Callable[[torch.Tensor], Any]
    ours: Callable[[torch.Tensor], Any]
    layers: int = 0


def cases() -> list[Case]:
    def column(**options: Any) -> nxd.ColumnParallelLinear:
        return nxd.ColumnParallelLinear(IN, OUT * SIZE, bias=False, gather_output=False, **options)

    def row(**options: Any) -> nxd.RowParallelLinear:
        return nxd.RowParallelLinear(IN * SIZE, OUT, bias=False, input_is_parallel=True, **options)

    single, rows = column(), row()
    sequence, sequence_rows = column(sequence_parallel_enabled=True), row(sequence_parallel_enabled=True)
    q, k, v = column(), column(), column()
    fuse_columns([q, k, v])
    return [
        Case("Column", lambda x: Column.apply(x, single.weight), single, 1),
        Case(
            "Columns q, k, v",
            lambda x: Column.apply(x, *(m.weight for m in (q, k, v))),
            lambda x: (q(x), k(x), v(x)),
            3,
        ),
        Case("Row", lambda x: Row.apply(x, rows.weight), rows, 1),
        Case("Column, sequence parallel", lambda x: SequenceColumn.apply(x, sequence.weight), sequence, 1),
        Case("Row, sequence parallel", lambda x: SequenceRow.apply(x, sequence_rows.weight), sequence_rows, 1),
        Case(
            "spmd.all_reduce(P, R)",
            lambda x: ReduceForward.apply(x, True),
            lambda x: spmd.all_reduce(x, "tp", src=P, dst=R),
        ),
        Case(
            "spmd.all_reduce(P, I)",
            lambda x: ReduceForward.apply(x, False),
            lambda x: spmd.all_reduce(x, "tp", src=P, dst=I),
        ),
        Case("spmd.convert(I, R)", ReduceBackward.apply, lambda x: spmd.convert(x, "tp", src=I, dst=R)),
        Case("spmd.all_gather(S(0), R)", Gather.apply, lambda x: spmd.all_gather(x, "tp", src=S(0), dst=R)),
        Case("spmd.reduce_scatter(P, S(0))", Scatter.apply, lambda x: spmd.reduce_scatter(x, "tp", src=P, dst=S(0))),
    ]


def microseconds(run: Callable[[], Any], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - start) / calls * 1e6


def compare(case: Case, batches: int, calls: int) -> dict[str, float]:
    """Medians in µs per call of hand and ours, and of their difference batch by batch."""
    x = torch.randn(TOKENS, 1, IN, requires_grad=True)
    out = case.hand(x)
    grads = [torch.ones_like(one) for one in (out if isinstance(out, tuple) else (out,))]

    def forward(call: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
        return lambda: call(x)

    def both(call: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.backward(call(x), grads)

    found: dict[str, float] = {}
    for kind, make in (("forward", forward), ("both", both)):
        hand, ours = make(case.hand), make(case.ours)
        rounds: list[tuple[float, float]] = []
        for batch in range(-1, batches):
            if batch % 2:
                pair = microseconds(hand, calls), microseconds(ours, calls)
            else:
                pair = (microseconds(ours, calls), microseconds(hand, calls))[::-1]
            if batch >= 0:
                rounds.append(pair)
        found[f"{kind}_hand"] = statistics.median(h for h, _ in rounds)
        found[f"{kind}_ours"] = statistics.median(o for _, o in rounds)
        found[f"{kind}_added"] = statistics.median(o - h for h, o in rounds)
    return {name: round(value, 1) for name, value in found.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--batches", type=int, default=60, help="pairs of batches, whose median is shown")
    options.add_argument("--calls", type=int, default=200, help="calls in a batch")
    args = options.parse_args()
    heading("Python per call, in µs of CPU time: a size-2 group that communicates nothing, tensors of 32 elements")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    print(f"{'':<30}{'forward':>27}{'forward + backward':>27}")
    print(f"{'':<30}" + f"{'hand':>9}{'ours':>9}{'added':>9}" * 2, flush=True)
    report: dict[str, dict[str, float]] = {}
    worst = slowest = 0.0
    with comm.as_rank(nxd.Mesh(SIZE, tp=SIZE), 0, C10dBackend()):
        calls = cases()
        linear = F.linear
        weight = torch.randn(OUT, IN, requires_grad=True)
        calls.insert(0, Case("F.linear, for scale", lambda x: linear(x, weight), lambda x: linear(x, weight)))
        quiet()
        for case in calls:
            found = compare(case, 5 if args.quick else args.batches, 50 if args.quick else args.calls)
            report[case.name] = found
            print(f"{case.name:<30}" + "".join(f"{value:>9.1f}" for value in found.values()), flush=True)
            if case.layers:
                worst = max(worst, found["forward_added"] / case.layers)
                slowest = max(slowest, (found["both_added"] - found["forward_added"]) / case.layers)
    dist.destroy_process_group()
    print(f"\nadded per layer call: at most {worst:.1f} µs (goal {GOAL:.0f}: {'met' if worst <= GOAL else 'MISSED'})")
    print(f"added per layer's backward: at most {slowest:.1f} µs")
    print(json.dumps({"added_per_call": round(worst, 2), "added_per_backward": round(slowest, 2), "cases": report}))


if __name__ == "__main__":
    main()
