"""Cross entropy of vocabulary-sharded logits, forward and backward: hand-written, ours, Megatron's algorithm, torch's.

`hand` is lean, straight on torch.distributed, and overwrites its logits: they become exp(z - max), one all-reduce sums
what the loss needs, backward multiplies by gradient / sum once. `ours` has `inplace_logits=True`, `ours, new` leaves
the logits as they are; `leaf` is the same of logits that are a leaf of autograd, and `hand, leaf` is `hand` with
exp(z - max) in new memory. `megatron` is the algorithm of Megatron-LM (arXiv:1909.08053): in place too, three
all-reduces, normalised in forward. `loss_parallel` is torch's, on DTensors. `again` is `hand` again, for the noise.

All run in one job, turn by turn, on logits that are made anew, outside of what is timed; a round gives each variant's
wall time (of the slowest rank) and CPU time (of all), and what is reported is the median over the rounds of a round's
ratio to `hand`. Memory is the most that is alive at one time, the logits among it, over the bytes of the logits.

    python benchmarks/cross_entropy.py [--quick] [--tp 2 4] [--vocab 32768 131072] [--tokens 512] [--dtype float32]

The last line is JSON: `{"tp 2, 32768": {"ours_over_hand": wall, "ours_over_hand_cpu": CPU, "ours_memory": ...}, ...}`.
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
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import neuronx_dist as nxd
from neuronx_dist.planning.meter import measure_peak

VARIANTS = ("hand", "ours", "ours, new", "hand, leaf", "leaf", "megatron", "loss_parallel", "again")
GOAL = 1.0  # of `ours`, in time and memory

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def own_labels(labels: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the labels in this rank's `size` columns, and which are on other ranks."""
    local = labels - dist.get_rank() * size
    elsewhere = (local < 0) | (local >= size)
    return local.masked_fill_(elsewhere, 0), elsewhere


class Hand(torch.autograd.Function):
    """The logits' memory holds exp(z - max), and then the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, new: bool = False) -> torch.Tensor:
        z = logits if logits.dtype == torch.float32 else logits.float()
        highest = z.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        z = torch.sub(z, highest.unsqueeze(-1), out=None if new else z.detach())
        local, elsewhere = own_labels(labels, z.shape[-1])
        predicted = z.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill_(elsewhere, 0.0)
        sums = torch.stack([predicted, z.exp_().sum(-1)])
        dist.all_reduce(sums)
        ctx.save_for_backward(z, local, elsewhere, sums[1])
        ctx.dtype = logits.dtype
        return sums[1].log() - sums[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        z, local, elsewhere, total = ctx.saved_tensors
        z.mul_((grad / total).unsqueeze(-1))
        z.scatter_add_(-1, local.unsqueeze(-1), (-grad).masked_fill_(elsewhere, 0.0).unsqueeze(-1))
        return z.to(ctx.dtype), None, None


class Megatron(torch.autograd.Function):
    """The logits' memory holds the softmax, and then the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        z = logits if logits.dtype == torch.float32 else logits.float()
        highest = z.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        z -= highest.unsqueeze(-1)
        local, elsewhere = own_labels(labels, z.shape[-1])
        rows = torch.arange(len(z))
        predicted = z[rows, local]
        predicted[elsewhere] = 0.0
        torch.exp(z, out=z)
        total = z.sum(-1)
        dist.all_reduce(predicted)
        dist.all_reduce(total)
        z.div_(total.unsqueeze(-1))
        ctx.save_for_backward(z, rows, local, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() - predicted

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        z, rows, local, elsewhere = ctx.saved_tensors
        z[rows, local] -= 1.0 - elsewhere.float()
        z.mul_(grad.unsqueeze(-1))
        return z.to(ctx.dtype), None


def gradient_of(loss: Callable[..., torch.Tensor], logits: torch.Tensor, *args: Any) -> torch.Tensor:
    labels, grad = args
    edge = get_gradient_edge(logits)
    return torch.autograd.grad(loss(logits, labels), edge, grad)[0]


def _leaf(logits: torch.Tensor) -> torch.Tensor:
    return logits.detach().requires_grad_()


def of_torch(mesh: Any, logits: torch.Tensor, labels: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    with loss_parallel():
        whole = DTensor.from_local(logits, mesh, [Shard(1)], run_check=False)
        targets = DTensor.from_local(labels, mesh, [Replicate()], run_check=False)
        losses = F.cross_entropy(whole, targets, reduction="none")
        grads = DTensor.from_local(grad, mesh, [Replicate()], run_check=False)
        return torch.autograd.grad(losses, logits, grads)[0]


def variants(tp: int) -> dict[str, Loss]:
    mesh = init_device_mesh("cpu", (tp,))
    return {
        "hand": partial(gradient_of, Hand.apply),
        "ours": partial(gradient_of, partial(nxd.parallel_cross_entropy, inplace_logits=True)),
        "ours, new": partial(gradient_of, nxd.parallel_cross_entropy),
        "hand, leaf": lambda logits, *args: gradient_of(lambda *x: Hand.apply(*x, True), _leaf(logits), *args),
        "leaf": lambda logits, *args: gradient_of(nxd.parallel_cross_entropy, _leaf(logits), *args),
        "megatron": partial(gradient_of, Megatron.apply),
        "loss_parallel": partial(of_torch, mesh),
        "again": partial(gradient_of, Hand.apply),
    }


def measure(tp: int, vocab: int, tokens: int, dtype: torch.dtype, rounds: int) -> Any:
    """Each variant's seconds, round by round; and its memory."""
    nxd.initialize_model_parallel(tensor_model_parallel_size=tp)
    torch.manual_seed(0)
    labels, grad = torch.randint(0, vocab, (tokens,)), torch.rand(tokens)
    torch.manual_seed(dist.get_rank() + 1)
    source = (3 * torch.randn(tokens, vocab // tp)).to(dtype).requires_grad_()
    functions = variants(tp)
    logits = [source * 1]

    def run(name: str) -> torch.Tensor:
        return functions[name](logits[0], labels, grad)

    def made_anew(name: str = "") -> None:
        logits.clear()
        logits.append(source * 1)

    expected, memory = run("hand").clone(), {}
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for name in VARIANTS:
        made_anew()
        error = ((run(name) - expected).norm() / expected.norm()).item()
        assert error < tolerance, f"{name}: the gradient is off by {error:.1e} (relative)"
        logits.clear()
        with measure_peak() as meter:
            made_anew()
            run(name)
        memory[name] = meter.peak / expected.nbytes
    made_anew()
    seconds = take_turns({name: partial(run, name) for name in VARIANTS}, rounds, made_anew)
    nxd.destroy_model_parallel()
    return seconds, memory


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tp", type=int, nargs="+", default=[2, 4])
    options.add_argument("--vocab", type=int, nargs="+", default=[32768, 131072])
    options.add_argument("--tokens", type=int, default=512)
    options.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the logits")
    options.add_argument("--repeats", type=int, default=30, help="rounds")
    args = options.parse_args()
    heading(f"Cross entropy over the vocabulary, forward and backward: {args.tokens} tokens, {args.dtype}, gloo")
    columns = f"{'/ hand':>8}{'±':>7}"
    print(f"{'tp':>2}{'vocab':>8}  {'variant':<14}{'wall ms':>9}{columns}{'CPU ms':>11}{columns}{'memory':>9}")
    report: dict[str, dict[str, float]] = {}
    for tp in args.tp:
        for vocab in args.vocab:
            rounds = 4 if args.quick else args.repeats
            seconds, memory = on_ranks(measure, tp, tp, vocab, args.tokens, getattr(torch, args.dtype), rounds)
            report[f"tp {tp}, {vocab}"] = _show(tp, vocab, seconds, memory)
    print("±: half-width of the median's 95 % interval. Wall: the slowest rank. CPU: all ranks, all threads.")
    print(json.dumps(report))


def _show(tp: int, vocab: int, seconds: dict[str, list[Seconds]], memory: dict[str, float]) -> dict[str, float]:
    result: dict[str, float] = {}
    for name in VARIANTS:
        cells = [f"{tp:>2}{vocab:>8}  {name:<14}"]
        for (key, ratio), pad in zip(compared(seconds[name], seconds["hand"]).items(), (9, 11)):
            cells.append(f"{ratio.seconds * 1e3:>{pad}.1f}{ratio.ratio:>8.3f}{ratio.interval:>7.3f}")
            if name != "hand":
                result[f"{name}_over_hand{key}"] = round(ratio.ratio, 4)
        result[f"{name}_memory"] = round(memory[name], 3)
        print("".join(cells) + f"{memory[name]:>9.2f}", flush=True)
    met = result["ours_over_hand_cpu"] <= GOAL and memory["ours"] <= GOAL * memory["hand"] * 1.01
    print(f"          ours / hand: {'met' if met else 'MISSED'}, goal {GOAL:.2f} in CPU time and memory\n", flush=True)
    return result


if __name__ == "__main__":
    main()
