"""Output layer and cross entropy over a sharded vocabulary, forward and backward: in one function, and in two.

`ours` is `parallel_linear_cross_entropy`, `ours, none` the same by token, whose backward computes the logits again.
`two` is the linear function and `parallel_cross_entropy`, `two, in place` with `inplace_logits=True`. At tp 1
`torch` is `F.linear_cross_entropy` (torch 2.15) without options, which holds all logits, and `torch, chunks` with
default options. `log p, entropy` is `parallel_linear_logprobs`, whose loss has the same value.

All run in one job, turn by turn. A round gives each variant's wall time (of the slowest rank) and CPU time (of all);
reported is the median over the rounds of a round's ratio to `two`. Memory is the most that is alive at one time beside
the operands, over the bytes of this rank's logits.

    python benchmarks/linear_cross_entropy.py [--quick] [--tp 1 2] [--vocab 32768 131072] [--tokens 4096] [--width 256]

The last line is JSON: `{"tp 2, 32768": {"ours_over_two": wall, "ours_over_two_cpu": CPU, "ours_memory": ...}, ...}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from common import Seconds, compared, heading, on_ranks, parser, take_turns  # first: sets the threads

# isort: split
import torch
import torch.nn.functional as F

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.planning.meter import measure_peak

GOAL = {"time": 1.15, "memory": 0.25}  # of `ours`


def variants(tp: int) -> dict[str, Callable[..., torch.Tensor]]:
    """Functions of (x, weight, labels) to the mean loss."""
    fused = nxd.parallel_linear_cross_entropy
    results: dict[str, Callable[..., torch.Tensor]] = {
        "two": lambda x, w, labels: nxd.parallel_cross_entropy(reduced_linear(x, w), labels).mean(),
        "two, in place": lambda x, w, labels: nxd.parallel_cross_entropy(
            reduced_linear(x, w), labels, inplace_logits=True
        ).mean(),
        "ours": fused,
        "ours, none": lambda x, w, labels: fused(x, w, labels, reduction="none").mean(),
        "log p, entropy": lambda x, w, labels: -nxd.parallel_linear_logprobs(x, w, labels)[0].mean(),
    }
    if tp == 1 and hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        results["torch"] = lambda x, w, labels: F.linear_cross_entropy(x, w, labels)
        results["torch, chunks"] = lambda x, w, labels: F.linear_cross_entropy(x, w, labels, options=options)
    return results


def reduced_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A column-parallel layer's output, `[tokens, vocab/tp]`."""
    return F.linear(spmd.convert(x, "tp", src=spmd.I, dst=spmd.R), weight)


def measure(tp: int, vocab: int, tokens: int, width: int, dtype: torch.dtype, rounds: int) -> Any:
    """Each variant's seconds, round by round; and its memory."""
    nxd.initialize_model_parallel(tensor_model_parallel_size=tp)
    torch.manual_seed(0)
    x, labels = torch.randn(tokens, width, dtype=dtype, requires_grad=True), torch.randint(0, vocab, (tokens,))
    torch.manual_seed(comm.rank("tp") + 1)
    weight = (torch.randn(vocab // tp, width) / width**0.5).to(dtype).requires_grad_()
    functions = variants(tp)

    def run(name: str) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(functions[name](x, weight, labels), (x, weight))

    expected, memory = run("two"), {}
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for name in functions:
        with measure_peak() as meter:
            found = run(name)
        for grad, other in zip(found, expected, strict=True):
            error = ((grad.float() - other.float()).norm() / other.float().norm()).item()
            assert error < tolerance, f"{name}: a gradient is off by {error:.1e} (relative)"
        memory[name] = (meter.peak - x.nbytes - weight.nbytes) / (tokens * (vocab // tp) * x.element_size())
    seconds = take_turns({name: partial(run, name) for name in functions}, rounds)
    nxd.destroy_model_parallel()
    return seconds, memory


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    options.add_argument("--vocab", type=int, nargs="+", default=[32768, 131072])
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument("--width", type=int, default=256, help="hidden size")
    options.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options.add_argument("--repeats", type=int, default=9, help="rounds")
    args = options.parse_args()
    heading(f"Output layer and cross entropy: {args.tokens} tokens of {args.width}, {args.dtype}, gloo")
    columns = f"{'/ two':>8}{'±':>7}"
    print(f"{'tp':>2}{'vocab':>8}  {'variant':<14}{'wall ms':>9}{columns}{'CPU ms':>11}{columns}{'memory':>9}")
    report: dict[str, dict[str, float]] = {}
    for tp in args.tp:
        for vocab in args.vocab:
            rounds = 2 if args.quick else args.repeats
            sizes = (vocab, args.tokens, args.width, getattr(torch, args.dtype), rounds)
            report[f"tp {tp}, {vocab}"] = _show(tp, vocab, *on_ranks(measure, tp, tp, *sizes))
    print("±: half-width of the median's 95 % interval. Memory: over the bytes of a rank's logits, gradients included.")
    print(json.dumps(report))


def _show(tp: int, vocab: int, seconds: dict[str, list[Seconds]], memory: dict[str, float]) -> dict[str, float]:
    result: dict[str, float] = {}
    for name in seconds:
        cells = [f"{tp:>2}{vocab:>8}  {name:<14}"]
        for (key, ratio), pad in zip(compared(seconds[name], seconds["two"]).items(), (9, 11)):
            cells.append(f"{ratio.seconds * 1e3:>{pad}.1f}{ratio.ratio:>8.3f}{ratio.interval:>7.3f}")
            result[f"{name}_over_two{key}"] = round(ratio.ratio, 4)
        result[f"{name}_memory"] = round(memory[name], 3)
        print("".join(cells) + f"{memory[name]:>9.3f}", flush=True)
    met = result["ours_over_two_cpu"] <= GOAL["time"] and memory["ours"] <= GOAL["memory"]
    goals = f"{GOAL['time']} in CPU time, {GOAL['memory']} of the logits in memory"
    print(f"          ours: {'met' if met else 'MISSED'}, goals {goals}\n", flush=True)
    return result


if __name__ == "__main__":
    main()
