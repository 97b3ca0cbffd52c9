"""A transformer block at tp=2 and the example's Llama, forward and backward: compiled beside eager.

The block is written with parallel layers (RMSNorm, fused q/k/v, attention, o, RMSNorm, fused gate/up, down), with and
without sequence parallelism; the model is the Llama of `neuronx-dist train`, swapped by `hf.swap` (it needs
transformers). Each is compiled as one graph (`fullgraph=True`). Eager code runs a second time as `again`, to show the
noise. All run in one job, turn by turn; what is reported is the median over the rounds of a round's ratio to `eager`.

    python benchmarks/compile.py [--quick] [--tokens 512] [--hidden 256 1024] [--repeats N] [--backend inductor]

The last line is JSON: `{"block 256": {"compiled_over_eager": wall, "compiled_over_eager_cpu": CPU, ...}, ...}`.
"""

from __future__ import annotations

import copy
import json
import shutil
import statistics
from collections.abc import Callable
from typing import Any

from common import heading, on_ranks, parser, ratio, take_turns  # first: sets the threads

# isort: split
import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import hf
from neuronx_dist.parallel_layers import RMSNorm, fuse_columns

TP, HEADS = 2, 8
Step = Callable[[], torch.Tensor]


class Block(nn.Module):
    """`[seq, batch, hidden]`, with sequence parallelism `[seq/tp, batch, hidden]`, to the same."""

    def __init__(self, hidden: int, sequence_parallel: bool) -> None:
        super().__init__()
        options = dict(bias=False, sequence_parallel_enabled=sequence_parallel)
        column = dict(gather_output=False, **options)
        self.norm1 = RMSNorm(hidden, sequence_parallel_enabled=sequence_parallel)
        self.norm2 = RMSNorm(hidden, sequence_parallel_enabled=sequence_parallel)
        self.q, self.k, self.v = (nxd.ColumnParallelLinear(hidden, hidden, **column) for _ in range(3))
        self.o = nxd.RowParallelLinear(hidden, hidden, input_is_parallel=True, **options)
        self.gate, self.up = (nxd.ColumnParallelLinear(hidden, 4 * hidden, **column) for _ in range(2))
        self.down = nxd.RowParallelLinear(4 * hidden, hidden, input_is_parallel=True, **options)
        fuse_columns([self.q, self.k, self.v])
        fuse_columns([self.gate, self.up])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (z.unflatten(-1, (HEADS // TP, -1)).permute(1, 2, 0, 3) for z in (self.q(y), self.k(y), self.v(y)))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attention.permute(2, 0, 1, 3).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def step_of_block(block: nn.Module, hidden: int, tokens: int, sequence_parallel: bool) -> Step:
    x = torch.randn(tokens // TP if sequence_parallel else tokens, 1, hidden, requires_grad=True)

    def step() -> torch.Tensor:
        x.grad = None
        out: torch.Tensor = block(x)
        out.sum().backward()
        return out.detach()

    return step


def llama() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = dict(hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8)
    config = LlamaConfig(num_key_value_heads=4, vocab_size=256, bos_token_id=None, eos_token_id=0, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return hf.materialize(hf.swap(model), 0)


def step_of_model(model: nn.Module, tokens: int) -> Step:
    ids = torch.randint(0, 256, (1, tokens))

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids, num_items_in_batch=tokens - 1, use_cache=False).loss
        loss.backward()
        return loss.detach()

    return step


def compare(make: Callable[[], Any], step_of: Callable[[Any], Step], rounds: int, backend: str) -> dict[str, float]:
    """Median ratios to eager, and how far the gradients are from those of eager code."""
    eager = make()
    model = copy.deepcopy(eager)
    model.compile(backend=backend, fullgraph=True)
    models = {"eager": eager, "compiled": model, "again": copy.deepcopy(eager)}
    steps: dict[str, Step] = {}
    for name, module in models.items():
        torch.manual_seed(1)
        steps[name] = step_of(module)
        steps[name]()
    pairs = list(zip(eager.parameters(), models["compiled"].parameters()))
    error = max(((a.grad - b.grad).norm() / a.grad.norm()).item() for a, b in pairs)

    def clear(name: str) -> None:
        for param in models[name].parameters():
            param.grad = None

    clear("eager"), clear("compiled"), clear("again")
    by_step = take_turns(steps, rounds, clear)
    found = {"error": error, "ms": statistics.median(seconds.wall for seconds in by_step["eager"]) * 1e3}
    for name in ("compiled", "again"):
        for part in ("wall", "cpu"):
            series = [[getattr(seconds, part) for seconds in by_step[variant]] for variant in (name, "eager")]
            suffix = "" if part == "wall" else "_cpu"
            found[f"{name}_over_eager{suffix}"], found[f"{name}_notch{suffix}"] = ratio(*series)
    return found


def measure(hiddens: list[int], tokens: int, rounds: int, backend: str) -> dict[str, dict[str, float]]:
    nxd.initialize_model_parallel(TP)
    torch.manual_seed(0)
    report = {}
    for hidden in hiddens:
        for sequence_parallel, name in ((False, "block"), (True, "block, sequence parallel")):
            report[f"{name} {hidden}"] = compare(
                lambda: Block(hidden, sequence_parallel),  # noqa: B023 - called at once
                lambda block: step_of_block(block, hidden, tokens, sequence_parallel),  # noqa: B023
                rounds if hidden <= 512 else max(5, rounds // 4),
                backend,
            )
    report["Llama of the example"] = compare(llama, lambda model: step_of_model(model, tokens), rounds, backend)
    nxd.destroy_model_parallel()
    return report


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=512)
    options.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    options.add_argument("--repeats", type=int, default=60, help="rounds; a quarter of it at hidden sizes above 512")
    options.add_argument("--backend", default="inductor", help="of torch.compile")
    args = options.parse_args()
    if args.backend == "inductor" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        print("no C++ compiler, which inductor needs on the CPU: the backend is aot_eager")
        args.backend = "aot_eager"
    heading(f"Compiled code ({args.backend}) over eager at tp={TP}, gloo, {args.tokens} tokens, float32")
    rounds = 5 if args.quick else args.repeats
    report = on_ranks(measure, TP, args.hidden, args.tokens, rounds, args.backend)
    print(f"{'':<34}{'eager ms':>9}{'compiled':>17}{'CPU':>7}{'eager again':>13}{'error':>9}")
    for name, figures in report.items():
        wall, notch = figures["compiled_over_eager"], figures["compiled_notch"]
        print(
            f"{name:<34}{figures['ms']:>9.1f}{wall:>9.3f} ± {notch:.3f}{figures['compiled_over_eager_cpu']:>7.3f}"
            f"{figures['again_over_eager']:>13.3f}{figures['error']:>9.0e}"
        )
    print(
        json.dumps({name: {key: round(value, 4) for key, value in figures.items()} for name, figures in report.items()})
    )


if __name__ == "__main__":
    main()
