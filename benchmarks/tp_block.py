"""The linear layers of a Llama block at tp=2, forward and backward: hand-written, ours, and torch's DTensor.

q/k/v (columns, one input-gradient collective) -> o (row) -> gate/up (columns, one collective) -> down (row), with the
same elementwise operations between them instead of attention and norms. `hand` is Megatron's f and g written straight
on torch.distributed: input gradients are all-reduced in place while the weight gradients are computed, outputs in
place. It runs a second time as `again`, to show the noise. All run in one job, turn by turn; a round gives each
variant's wall time (of the slower rank) and CPU time (of both), and what is reported is the median over the rounds of
a round's ratio to `hand`.

    python benchmarks/tp_block.py [--quick] [--tokens 512] [--hidden 256 1024 2048] [--repeats N]

The last line is JSON: `{"256": {"ours_over_hand": wall, "ours_over_hand_cpu": CPU, ...}, ...}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from common import Seconds, compared, heading, on_ranks, parser, take_turns  # first: sets the threads

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from handwritten import Column, Row
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import neuronx_dist as nxd
from neuronx_dist.parallel_layers import fuse_columns

TP = 2
COLUMNS = ("q", "k", "v", "gate", "up")
ROWS = ("o", "down")
VARIANTS = ("hand", "ours", "dtensor", "again")
GOAL = {256: 1.05}  # else 1.03
ROUNDS = ((512, 400), (1536, 100), (1 << 30, 40))  # up to this hidden size: this many

Columns = Callable[[torch.Tensor], Sequence[torch.Tensor]]
Linear = Callable[[torch.Tensor], torch.Tensor]


def block(x: torch.Tensor, qkv: Columns, o: Linear, gate_up: Columns, down: Linear) -> torch.Tensor:
    """`[batch, seq, hidden]`, the same on all ranks, to the same. What is not linear is equal for all variants."""
    q, k, v = qkv(x)
    x = x + o(q * k + v)
    gate, up = gate_up(x)
    return x + down(F.silu(gate) * up)


class Variant:
    """A block, and its parameters by name for the check that all compute the same."""

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        self.forward = forward
        self.params = params

    def run(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        out = self.forward(x)
        out.backward(grad)
        return out

    def clear(self, x: torch.Tensor) -> None:
        x.grad = None
        for param in self.params.values():
            param.grad = None


def shard(name: str, full: torch.Tensor, rank: int) -> torch.Tensor:
    return full.chunk(TP, 0 if name in COLUMNS else 1)[rank].contiguous()


def whole(full: dict[str, torch.Tensor]) -> Variant:
    """The block without any parallelism, which gives the values."""
    w = {name: value.clone().requires_grad_() for name, value in full.items()}
    return Variant(
        lambda x: block(
            x,
            lambda x: [F.linear(x, w[name]) for name in "qkv"],
            lambda x: F.linear(x, w["o"]),
            lambda x: [F.linear(x, w[name]) for name in ("gate", "up")],
            lambda x: F.linear(x, w["down"]),
        ),
        w,
    )


def hand(full: dict[str, torch.Tensor], rank: int) -> Variant:
    w = {name: shard(name, value, rank).requires_grad_() for name, value in full.items()}
    return Variant(
        lambda x: block(
            x,
            lambda x: Column.apply(x, w["q"], w["k"], w["v"]),
            lambda x: Row.apply(x, w["o"]),
            lambda x: Column.apply(x, w["gate"], w["up"]),
            lambda x: Row.apply(x, w["down"]),
        ),
        w,
    )


def ours(full: dict[str, torch.Tensor], rank: int) -> Variant:
    def column(name: str) -> nxd.ColumnParallelLinear:
        out_features, in_features = full[name].shape
        return nxd.ColumnParallelLinear(in_features, out_features, bias=False, gather_output=False)

    def row(name: str) -> nxd.RowParallelLinear:
        out_features, in_features = full[name].shape
        return nxd.RowParallelLinear(in_features, out_features, bias=False, input_is_parallel=True)

    q, k, v, gate, up = (column(name) for name in COLUMNS)
    o, down = (row(name) for name in ROWS)
    fuse_columns([q, k, v])
    fuse_columns([gate, up])
    params: dict[str, torch.Tensor] = {
        name: layer.weight for name, layer in zip((*COLUMNS, *ROWS), (q, k, v, gate, up, o, down))
    }
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(shard(name, full[name], rank))
    return Variant(lambda x: block(x, lambda x: (q(x), k(x), v(x)), o, lambda x: (gate(x), up(x)), down), params)


class Attention(nn.Module):
    def __init__(self, layers: dict[str, nn.Linear]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (layers[name] for name in "qkvo")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.q(x) * self.k(x) + self.v(x))


class MLP(nn.Module):
    def __init__(self, layers: dict[str, nn.Linear]) -> None:
        super().__init__()
        self.gate, self.up, self.down = (layers[name] for name in ("gate", "up", "down"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def dtensor(full: dict[str, torch.Tensor], rank: int) -> Variant:
    """The block as in torch's trainers: the input becomes a DTensor once, so q/k/v share one all-reduce in backward."""
    layers = {}
    for name, value in full.items():
        layers[name] = nn.Linear(value.shape[1], value.shape[0], bias=False)
        layers[name].weight = nn.Parameter(value.clone())
    model = nn.ModuleList([Attention(layers), MLP(layers)])
    entry = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    plan: dict[str, Any] = {"0": entry, "1": entry}
    for index, names in enumerate((("q", "k", "v", "o"), ("gate", "up", "down"))):
        plan |= {f"{index}.{name}": ColwiseParallel() if name in COLUMNS else RowwiseParallel() for name in names}
    parallelize_module(model, init_device_mesh("cpu", (TP,)), plan)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x + model[0](x)
        return x + model[1](x)

    return Variant(forward, {name: layer.weight for name, layer in layers.items()})


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def check(variants: dict[str, Variant], full: dict[str, torch.Tensor], x: torch.Tensor, grad: torch.Tensor) -> None:
    """Output, input gradient and every weight gradient of every variant are those of the whole block.

    Raises:
        AssertionError: one is not; the message names it.
    """

    def values(variant: Variant) -> dict[str, torch.Tensor]:
        results = {"out": variant.run(x, grad).detach(), "x": x.grad}
        results |= {name: param.grad for name, param in variant.params.items()}
        variant.clear(x)
        return {name: local(value) for name, value in results.items() if value is not None}

    expected = values(whole(full))
    expected |= {name: shard(name, expected[name], dist.get_rank()) for name in full}
    for kind, variant in variants.items():
        results = values(variant)
        for name, value in expected.items():
            error = ((results[name] - value).norm() / value.norm()).item()
            assert error < 1e-5, f"{kind}: {name} is off by {error:.1e} (relative)"


def time_size(hidden: int, tokens: int, repeats: int) -> dict[str, list[Seconds]]:
    """Each variant's seconds, round by round."""
    torch.manual_seed(0)
    nxd.initialize_model_parallel(tensor_model_parallel_size=TP)
    rank = dist.get_rank()
    mlp = (hidden * 8 // 3 + 63) // 64 * 64  # Llama's ratio
    sizes = dict.fromkeys("qkvo", (hidden, hidden)) | {
        "gate": (mlp, hidden),
        "up": (mlp, hidden),
        "down": (hidden, mlp),
    }
    full = {name: torch.randn(size) / size[1] ** 0.5 for name, size in sizes.items()}
    x = torch.randn(1, tokens, hidden, requires_grad=True)
    grad = torch.randn(1, tokens, hidden)
    variants = {
        "hand": hand(full, rank),
        "ours": ours(full, rank),
        "dtensor": dtensor(full, rank),
        "again": hand(full, rank),
    }
    check(variants, full, x, grad)

    def between(name: str) -> None:
        variants[name].clear(x)

    rounds = take_turns({name: partial(variants[name].run, x, grad) for name in VARIANTS}, repeats, between)
    nxd.destroy_model_parallel()
    return rounds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=512, help="tokens of the one sequence")
    options.add_argument("--hidden", type=int, nargs="+", default=[256, 1024, 2048], help="sizes to time")
    options.add_argument("--repeats", type=int, help="rounds for each size (default: by size, from 400 to 40)")
    args = options.parse_args()
    heading(f"Linear layers of a Llama block, forward and backward: tp={TP}, {args.tokens} tokens, float32, gloo")
    columns = f"{'/ hand':>8}{'±':>7}"
    print(f"{'hidden':>6}  {'variant':<8}{'wall ms':>9}{columns}{'CPU ms':>11}{columns}{'rounds':>9}")
    report: dict[str, dict[str, float]] = {}
    for hidden in args.hidden:
        repeats = args.repeats or (8 if args.quick else next(count for limit, count in ROUNDS if hidden <= limit))
        seconds = on_ranks(time_size, TP, hidden, args.tokens, repeats)
        report[str(hidden)] = {}
        for name in VARIANTS:
            cells = [f"{hidden:>6}  {name:<8}"]
            for (key, ratio), pad in zip(compared(seconds[name], seconds["hand"]).items(), (9, 11)):
                cells.append(f"{ratio.seconds * 1e3:>{pad}.2f}{ratio.ratio:>8.3f}{ratio.interval:>7.3f}")
                if name != "hand":
                    report[str(hidden)][f"{'hand' if name == 'again' else name}_over_hand{key}"] = round(ratio.ratio, 4)
            print("".join(cells) + f"{repeats:>9}", flush=True)
        over_hand, goal = report[str(hidden)]["ours_over_hand"], GOAL.get(hidden, 1.03)
        verdict = "met" if over_hand <= goal else "MISSED"
        print(f"        ours / hand {over_hand:.3f}, goal {goal:.2f}: {verdict}\n", flush=True)
    print("±: half-width of the median's 95 % interval. Wall: the slower rank. CPU: both ranks, all threads.")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
