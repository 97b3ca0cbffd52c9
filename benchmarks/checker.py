"""Cost of the type checker: `SpmdTypeMode` over no mode, beside a mode that does nothing and the published package.

One process, one thread, CPU time; all variants take turns, and every figure is a median over the rounds. Operators are
called on tensors of a few elements, so that what is left is Python: µs that a mode adds to a call, by the types of its
operands. Then a transformer block (attention and MLP), forward: time with a mode over time without, of plain code and
of hand-written tensor-parallel code with this package's operators (as one rank of two; nothing is sent). The smallest,
8 tokens of 64 values, is as little work as 25 calls of torch can be; `bare` is what any mode costs there.

The published package (`pip install --no-deps spmd_types==0.3.1`) is optional; without it its column is empty. It checks
the plain block only, for its operators want process groups.

    python benchmarks/checker.py [--quick] [--rounds 60] [--calls 200] [--blocks 1x8x64 8x64x64 ...] [--json FILE]

The last line is JSON: `{"operators": {"add": {"no mode": µs, "bare": µs added, "R": ...}}, "blocks": {...}}`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from common import heading, notch, parser, quiet  # first: sets the threads

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, SpmdTypeMode, V, all_reduce, assert_type, convert

try:
    import spmd_types as peer
    from spmd_types.checker import typecheck as peer_typecheck
except ImportError:
    peer = peer_typecheck = None

Run = Callable[[], Any]
Context = Callable[[], AbstractContextManager[Any]]

BLOCKS = ("1x8x64", "8x64x64", "8x64x128", "8x64x256")  # batch, tokens, hidden size
HEAD = 16
GOALS = {"C": 8.0, "Python": 14.0, "getter": 4.0}  # µs over no mode
BLOCK_GOAL = 1.4
TYPES = {"R": R, "I": I, "V": V, "P": P, "S": S(0)}

# name: kind, function of (x, y, w), operands that are P where x is P, whether it is legal for P
OPERATORS: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Any], str]] = {
    "add": ("C", lambda x, y, w: torch.add(x, y), "xy"),
    "x * y": ("C", lambda x, y, w: x * y, "x"),
    "x * 0.5": ("C", lambda x, y, w: x * 0.5, "x"),
    "linear": ("C", lambda x, y, w: F.linear(x, w), "x"),
    "matmul": ("C", lambda x, y, w: x @ w, "x"),
    "sum": ("C", lambda x, y, w: x.sum(-1), "x"),
    "gelu": ("C", lambda x, y, w: F.gelu(x), ""),
    "add_": ("C", lambda x, y, w: x.add_(y), "xy"),
    "cat": ("C", lambda x, y, w: torch.cat([x, y], dim=1), "xy"),
    "view": ("C", lambda x, y, w: x.view(4, 2, 4), "x"),
    "transpose": ("C", lambda x, y, w: x.transpose(0, 1), "x"),
    "x[:, 1:3]": ("C", lambda x, y, w: x[:, 1:3], "x"),
    "chunk": ("C", lambda x, y, w: x.chunk(2, dim=-1), "x"),
    "layer_norm": ("Python", lambda x, y, w: F.layer_norm(x, (8,)), ""),
    "softmax": ("Python", lambda x, y, w: F.softmax(x, dim=-1), ""),
    "dropout": ("Python", lambda x, y, w: F.dropout(x, 0.1), "x"),
    "x.shape": ("getter", lambda x, y, w: x.shape, "x"),
    "x.dtype": ("getter", lambda x, y, w: x.dtype, "x"),
    "size": ("getter", lambda x, y, w: x.size(0), "x"),
}


class Nothing(TorchFunctionMode):
    """A mode that does nothing: the cost of any mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def seconds(run: Run, context: Context, calls: int) -> float:
    with context():
        start = time.process_time()
        for _ in range(calls):
            run()
        return (time.process_time() - start) / calls


def take_turns(variants: dict[str, tuple[Run, Context]], rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds per call of every variant, round by round."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for turn in range(-2, rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found = seconds(*variants[name], calls if turn >= 0 else 3)
            if turn >= 0:
                times[name].append(found)
    return times


def added(over: Sequence[float], under: Sequence[float]) -> float:
    """Median of the differences of paired measurements, in µs."""
    return statistics.median(a - b for a, b in zip(over, under)) * 1e6


def small(mode: SpmdTypeMode | None, kind: Any, others: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, y, w = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8, 8)
    if mode is not None:
        with mode:
            assert_type(x, {"tp": kind})
            assert_type(y, {"tp": others})
            assert_type(w, {"tp": kind if kind in (I, V) else R})
    return x, y, w


def operators(mode: SpmdTypeMode, rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """By operator: µs without a mode, and what the modes add."""
    found: dict[str, dict[str, float]] = {}
    print(f"{'µs per call':<14}{'no mode':>9}{'bare':>8}  " + "".join(f"{name:>7}" for name in TYPES), end="")
    print(f"{'package':>10}{'goal':>6}", flush=True)
    for name, (kind, function, partial) in OPERATORS.items():
        variants: dict[str, tuple[Run, Context]] = {}

        def bound(operands: tuple[Tensor, Tensor, Tensor], function: Any = function) -> Run:
            return lambda: function(*operands)

        plain = small(None, None, None)
        variants["no mode"] = bound(plain), nullcontext
        variants["bare"] = bound(plain), Nothing
        for letter, given in TYPES.items():
            if given is not P or "x" in partial:
                others = given if given is not P or "y" in partial else R
                variants[letter] = bound(small(mode, given, others)), lambda: mode
        if peer is not None:
            variants["package"] = bound(declared(small(None, None, None))), peer_typecheck
        seconds = take_turns(variants, rounds, calls)
        row = {"no mode": statistics.median(seconds["no mode"]) * 1e6}
        row.update((name, added(seconds[name], seconds["no mode"])) for name in variants if name != "no mode")
        found[name] = row
        goal = GOALS[kind]
        shown = "".join(f"{row[letter]:>7.2f}" if letter in row else f"{'-':>7}" for letter in TYPES)
        over = max(row[letter] for letter in TYPES if letter in row) > goal
        print(f"{name:<14}{row['no mode']:>9.2f}{row['bare']:>+8.2f}  {shown}", end="")
        print(f"{row.get('package', float('nan')):>10.1f}{goal:>6.0f}{'  over' if over else ''}", flush=True)
    return found


# --- a block ---


def parameters(hidden: int, ranks: int) -> dict[str, Tensor]:
    """The block's weights, of one of `ranks`."""
    torch.manual_seed(0)
    shapes = {"qkv": (3 * hidden // ranks, hidden), "o": (hidden, hidden // ranks), "up": (4 * hidden // ranks, hidden),
              "down": (hidden, 4 * hidden // ranks)}  # fmt: skip
    tensors = {name: (torch.randn(shape) * shape[1] ** -0.5).requires_grad_() for name, shape in shapes.items()}
    for name in ("norm1", "norm2"):
        tensors[name] = torch.ones(hidden, requires_grad=True)
    return tensors


def attention(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    batch, tokens, _ = x.shape
    q, k, v = (
        piece.reshape(batch, tokens, -1, HEAD).transpose(1, 2) for piece in F.linear(x, w["qkv"]).chunk(3, dim=-1)
    )
    scores = torch.matmul(q, k.transpose(-2, -1)) * HEAD**-0.5
    mixed = torch.matmul(F.softmax(scores, dim=-1), v)
    return F.linear(mixed.transpose(1, 2).reshape(batch, tokens, -1), w["o"])


def mlp(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w["up"])), w["down"])


def plain_block(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    x = x + attention(F.layer_norm(x, x.shape[-1:], w["norm1"]), w)
    return x + mlp(F.layer_norm(x, x.shape[-1:], w["norm2"]), w)


def parallel_block(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """The same at tp=2: x and the norms' weights are I, columns then rows of weights are on each rank."""
    h = convert(F.layer_norm(x, x.shape[-1:], w["norm1"]), "tp", src=I, dst=R)
    x = x + all_reduce(attention(h, w), "tp", src=P, dst=I)
    h = convert(F.layer_norm(x, x.shape[-1:], w["norm2"]), "tp", src=I, dst=R)
    return x + all_reduce(mlp(h, w), "tp", src=P, dst=I)


SHARDED = {"qkv": S(0, 3), "o": S(1), "up": S(0), "down": S(1), "norm1": I, "norm2": I}


def declared(tensors: Any) -> Any:
    """Tensors that the published package takes for R over tp."""
    axis = peer.MeshAxis.of(2, 1)
    for x in tensors.values() if isinstance(tensors, dict) else tensors:
        peer.assert_type(x, {axis: peer.R})
    return tensors


def blocks(mode: SpmdTypeMode, batch: int, tokens: int, hidden: int, rounds: int) -> dict[str, float]:
    """Ratios to the block without a mode."""
    variants: dict[str, tuple[Run, Context]] = {}
    plain, parallel = parameters(hidden, 1), parameters(hidden, 2)
    x, y = torch.randn(batch, tokens, hidden), torch.randn(batch, tokens, hidden)
    with mode:
        for name, weight in plain.items():
            assert_type(weight, {"tp": R})
            assert_type(parallel[name], {"tp": SHARDED[name]})
        assert_type(x, {"tp": R})
        assert_type(y, {"tp": I})
    for name, context in (("no mode", nullcontext), ("bare", Nothing), ("ours", lambda: mode)):
        variants[f"plain, {name}"] = (lambda: plain_block(x, plain)), context
        variants[f"parallel, {name}"] = (lambda: parallel_block(y, parallel)), context
    if peer is not None:
        weights, z = declared(parameters(hidden, 1)), declared([x.clone()])[0]
        variants["plain, package"] = (lambda: plain_block(z, weights)), peer_typecheck
    seconds = take_turns(variants, rounds, 20 if batch * tokens < 64 else 4)
    found: dict[str, float] = {}
    for code in ("plain", "parallel"):
        base = seconds[f"{code}, no mode"]
        found[f"{code} ms"] = statistics.median(base) * 1e3
        for name in ("bare", "ours", "package"):
            ratios = [a / b for a, b in zip(seconds.get(f"{code}, {name}", []), base)]
            if ratios:
                found[f"{code}, {name}"] = statistics.median(ratios)
                found[f"{code}, {name}, half-width"] = notch(ratios)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, help="rounds of every measurement (default: 60)")
    options.add_argument("--calls", type=int, default=200, help="calls of an operator in a row")
    options.add_argument("--blocks", nargs="*", default=BLOCKS, help="batch x tokens x hidden size")
    options.add_argument("--json", metavar="FILE", help="write the figures to FILE too")
    args = options.parse_args()
    rounds = args.rounds or (6 if args.quick else 60)
    heading("What the type checker adds, CPU time; 'package' is " + _package())
    torch.set_num_threads(1)
    quiet()
    with comm.as_rank(Mesh(2, tp=2), 0):
        mode = SpmdTypeMode()
        report: dict[str, Any] = {"operators": operators(mode, rounds, args.calls), "blocks": {}}
        print(f"\nforward of a block, over no mode (goal of ours: {BLOCK_GOAL})\n")
        print(f"{'block':<10}{'code':<10}{'ms':>8}{'bare':>14}{'ours':>14}{'package':>14}", flush=True)
        for shape in args.blocks:
            found = report["blocks"][shape] = blocks(mode, *map(int, shape.split("x")), rounds=rounds)
            for code in ("plain", "parallel"):
                line = f"{shape:<10}{code:<10}{found[f'{code} ms']:>8.2f}"
                for name in ("bare", "ours", "package"):
                    key = f"{code}, {name}"
                    shown = f"{found[key]:.2f} ± {found[f'{key}, half-width']:.2f}" if key in found else "-"
                    line += f"{shown:>14}"
                print(line + ("  over" if found[f"{code}, ours"] > BLOCK_GOAL else ""), flush=True)
    text = json.dumps(report, default=float)
    print(text)
    if args.json:
        with open(args.json, "w") as file:
            file.write(text + "\n")


def _package() -> str:
    if peer is None:
        return "not installed"
    from importlib.metadata import version

    return f"spmd_types {version('spmd_types')}"


if __name__ == "__main__":
    main()
