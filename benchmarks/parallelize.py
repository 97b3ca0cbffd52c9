"""A Llama block at tp=2, forward and backward, by `parallelize`, `hf.swap` and torch's DTensor; and compiling a Llama.

The block is transformers' own decoder layer, without dropout, on hidden states that need a gradient. `swap` cuts its
linear layers by `hf.swap`, `dtensor` by `parallelize_module` (the input of attention and of MLP is made a DTensor
once), `emitted` is what `parallelize` writes under the policy `tp` with the costs of a CPU. `again` is `swap` once
more, to show the noise. All are checked against the whole block, and their collectives are counted. They run in one
job, turn by turn; a round gives each variant's wall time (of the slower rank) and CPU time (of both), and what is
reported is the median over the rounds of a round's ratio to `swap`.

Before that, `swap` at tp 1 beside transformers' own block (`whole`, and `again`), in one process: layers of tp 1 are
to add nothing.

Compiling is timed at Llama-3-8B shapes on meta, for 8 ranks: CPU seconds of each step, in a process for each number of
layers; what is imported and remembered once in a process is in them.

    python benchmarks/parallelize.py [--quick] [--tokens 512] [--hidden 256 1024] [--repeats N] [--layers 4 32]

The last line is JSON: `{"alone": {"256": CPU of swap over whole}, "step": {"256": {"emitted_over_swap_cpu": CPU, ...}},
"compile": {"32": {"record": s, ...}}}`.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from common import Seconds, compared, heading, on_ranks, parser, take_turns  # first: sets the threads

# isort: split
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm, hf
from neuronx_dist.parallelize import ComputeConfig, parallelize
from neuronx_dist.parallelize.choose.exact import choose
from neuronx_dist.parallelize.emit.emitted_class import emitted_program
from neuronx_dist.parallelize.example import Example
from neuronx_dist.parallelize.prove.smaller import smaller_program
from neuronx_dist.parallelize.prove.verify import verify
from neuronx_dist.planning.costs import H100
from neuronx_dist.weights.shard_spec import gather_full, spec_of

TP = 2
VARIANTS = ("swap", "emitted", "dtensor", "again")
ALONE = ("whole", "swap", "again")
ALONE_GOAL = 1.01
GOALS = {256: {"swap": 1.0, "dtensor": 0.8}, 1024: {"swap": 1.0}}
ROUNDS = ((512, 400), (1 << 30, 100))  # up to this hidden size: this many
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
STEPS = ("record", "choose", "emit", "smaller", "proof")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


class Block(nn.Module):
    """A decoder layer: `[batch, seq, hidden]` and the rotary tables `[batch, seq, head]` to `[batch, seq, hidden]`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        out = self.layer(x, position_embeddings=(cos, sin))
        return out if isinstance(out, torch.Tensor) else out[0]


def llama(hidden: int) -> LlamaForCausalLM:
    """The same values on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=(hidden * 8 // 3 + 63) // 64 * 64,  # Llama's ratio
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 128,
            num_hidden_layers=1,
            vocab_size=128,
        )
    )


def swapped(hidden: int) -> nn.Module:
    return Block(hf.swap(llama(hidden)).model.layers[0])


def dtensor(hidden: int) -> nn.Module:
    block = Block(llama(hidden).model.layers[0])
    replicated = {"hidden_states": Replicate()}
    plan: dict[str, Any] = {
        "layer.self_attn": PrepareModuleInput(input_kwarg_layouts=replicated, desired_input_kwarg_layouts=replicated),
        "layer.mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
    }
    plan |= {f"layer.{name}": ColwiseParallel() for name in COLUMNS}
    plan |= {f"layer.{name}": RowwiseParallel() for name in ROWS}
    parallelize_module(block, init_device_mesh("cpu", (TP,)), plan)
    return block


def emitted(hidden: int, arguments: dict[str, torch.Tensor], folder: str) -> nn.Module:
    block = Block(llama(hidden).model.layers[0])
    config = ComputeConfig(plan_ngpus=TP, runtime_ngpus=TP, pas_config={"costs": "cpu"})
    parallel = parallelize(block, arguments, "tp", config, gen_savedir=folder)
    assert isinstance(parallel, nn.Module)
    return parallel


class Variant:
    """A block, its step, and its gradients."""

    def __init__(self, module: nn.Module, arguments: dict[str, torch.Tensor], grad: torch.Tensor) -> None:
        self.module, self.arguments, self.grad = module, arguments, grad

    def run(self) -> torch.Tensor:
        out: torch.Tensor = self.module(**self.arguments)
        out.backward(self.grad)
        return out

    def clear(self) -> None:
        self.arguments["x"].grad = None
        for parameter in self.module.parameters():
            parameter.grad = None

    def values(self) -> dict[str, torch.Tensor | None]:
        """Output and gradients, whole."""
        values = {"out": self.run().detach(), "x": self.arguments["x"].grad}
        for name, parameter in self.module.named_parameters():
            values[name] = None if parameter.grad is None else whole(parameter.grad, parameter)
        self.clear()
        return values


def whole(grad: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else gather_full(grad, spec_of(parameter))


def check(variants: dict[str, Variant], whole_block: Variant) -> None:
    """Output, input gradient and every weight gradient of every variant are those of the whole block.

    Raises:
        AssertionError: one is not; the message names it.
    """
    expected = whole_block.values()
    for name, variant in variants.items():
        values = variant.values()
        for key, value in expected.items():
            error = ((values[key] - value).norm() / value.norm()).item()
            assert error < 1e-5, f"{name}: {key} is off by {error:.1e} (relative)"


def collectives(variant: Variant) -> str:
    """The collectives of a step that go through `comm`; those of DTensor do not."""
    with comm.record() as calls:
        variant.run()
    variant.clear()
    counts = Counter((call.verb, call.shape) for call in calls)
    return ", ".join(f"{count} {verb} {list(shape)}" for (verb, shape), count in counts.items()) or "none"


def time_block(hidden: int, tokens: int, repeats: int) -> tuple[dict[str, list[Seconds]], dict[str, str]]:
    """Each variant's seconds, round by round, and its collectives."""
    nxd.initialize_model_parallel(tensor_model_parallel_size=TP)
    torch.manual_seed(1)
    x = torch.randn(1, tokens, hidden, requires_grad=True)
    angles = torch.randn(1, tokens, 64)
    arguments = {"x": x, "cos": angles.cos(), "sin": angles.sin()}
    grad = torch.randn(1, tokens, hidden)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    modules = {
        "swap": swapped(hidden),
        "emitted": emitted(hidden, arguments, folder[0]),
        "dtensor": dtensor(hidden),
        "again": swapped(hidden),
    }
    variants = {name: Variant(module, arguments, grad) for name, module in modules.items()}
    check(variants, Variant(Block(llama(hidden).model.layers[0]), arguments, grad))
    issued = {name: collectives(variants[name]) for name in ("swap", "emitted")}
    rounds = take_turns({name: variants[name].run for name in VARIANTS}, repeats, lambda name: variants[name].clear())
    shutil.rmtree(folder[0], ignore_errors=True)
    nxd.destroy_model_parallel()
    return rounds, issued


def time_alone(hidden: int, tokens: int, repeats: int) -> dict[str, list[Seconds]]:
    """Each variant's seconds at tp 1, round by round."""
    nxd.initialize_model_parallel()
    torch.manual_seed(1)
    x, angles = torch.randn(1, tokens, hidden, requires_grad=True), torch.randn(1, tokens, 64)
    arguments, grad = {"x": x, "cos": angles.cos(), "sin": angles.sin()}, torch.randn(1, tokens, hidden)
    modules = {"whole": Block(llama(hidden).model.layers[0]), "swap": swapped(hidden)}
    modules["again"] = Block(llama(hidden).model.layers[0])
    variants = {name: Variant(module, arguments, grad) for name, module in modules.items()}
    check(variants, variants["again"])
    rounds = take_turns({name: variants[name].run for name in ALONE}, repeats, lambda name: variants[name].clear())
    nxd.destroy_model_parallel()
    return rounds


def report_alone(hidden: int, tokens: int, repeats: int) -> float:
    seconds = on_ranks(time_alone, 1, hidden, tokens, repeats)
    for name in ALONE[1:]:
        ratio = compared(seconds[name], seconds["whole"])["_cpu"]
        verdict = f", goal {ALONE_GOAL}: {'met' if ratio.ratio <= ALONE_GOAL else 'MISSED'}" if name == "swap" else ""
        times = f"{ratio.seconds * 1e3:.2f} over {ratio.base * 1e3:.2f} ms of CPU"
        print(f"{hidden:>6}  tp 1, {name}: {times}: {ratio.ratio:.4f} ± {ratio.interval:.4f}{verdict}", flush=True)
    return round(compared(seconds["swap"], seconds["whole"])["_cpu"].ratio, 4)


def report_block(hidden: int, tokens: int, repeats: int) -> dict[str, float]:
    seconds, issued = on_ranks(time_block, TP, hidden, tokens, repeats)
    report: dict[str, float] = {}
    for name in VARIANTS:
        cells = [f"{hidden:>6}  {name:<8}"]
        for (key, figure), pad in zip(compared(seconds[name], seconds["swap"]).items(), (9, 11)):
            cells.append(f"{figure.seconds * 1e3:>{pad}.2f}{figure.ratio:>8.3f}{figure.interval:>7.3f}")
            if name != "swap":
                report[f"{'swap' if name == 'again' else name}_over_swap{key}"] = round(figure.ratio, 4)
        print("".join(cells) + f"{repeats:>9}", flush=True)
    for name, text in issued.items():
        print(f"        collectives of {name}: {text}")
    for base, goal in GOALS.get(hidden, {}).items():
        ratio = compared(seconds["emitted"], seconds[base])["_cpu"].ratio
        report[f"emitted_over_{base}_cpu"] = round(ratio, 4)
        verdict = "met" if ratio <= goal else "MISSED"
        print(f"        emitted / {base}, CPU: {ratio:.3f}, goal {goal:.2f}: {verdict}")
    print(flush=True)
    return report


def llama_of(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, words: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=inner,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            vocab_size=words,
            num_hidden_layers=layers,
            use_cache=False,
        )
    )


def compile_times(layers: int) -> dict[str, float]:
    """CPU seconds of each step from a module to proven source, and the number of calls; `smaller`: 2 narrow layers."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = llama_of(layers, 4096, 14336, 32, 8, 128256)
    tokens = torch.empty(1, 4096, dtype=torch.long, device="meta")
    example = Example(model, {"input_ids": tokens, "labels": tokens})
    few = torch.zeros(1, 16, dtype=torch.long)
    smaller = Example(llama_of(2, 64, 96, 16, 8, 48), {"input_ids": few, "labels": few})
    seconds: dict[str, float] = {}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = function()
        seconds[name] = round(time.process_time() - start, 3)
        return result

    config = ComputeConfig(plan_ngpus=8, runtime_ngpus=8)
    program = timed("record", lambda: example.program(training=True))
    division = timed("choose", lambda: choose(program, "tp", 8, costs=H100))
    emitted = timed("emit", lambda: emitted_program(example, [division]))
    small = timed("smaller", lambda: smaller_program([division], smaller, config))
    timed("proof", lambda: verify(emitted, small))
    return {"calls": len(program.calls), **seconds}


def report_compiling(layers: list[int]) -> dict[str, dict[str, float]]:
    report: dict[str, dict[str, float]] = {}
    print(f"{'layers':>6}{'calls':>7}{'record':>9}{'choose':>9}{'emit':>9}{'smaller':>9}{'proof':>9}   CPU seconds")
    for count in layers:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            times = pool.apply(compile_times, (count,))
        report[str(count)] = times
        print(f"{count:>6}{times['calls']:>7}" + "".join(f"{times[name]:>9.3f}" for name in STEPS), flush=True)
    return report


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=512, help="tokens of the one sequence")
    options.add_argument("--hidden", type=int, nargs="*", default=[256, 1024], help="sizes of a step to time")
    options.add_argument("--repeats", type=int, help="rounds for each size (default: by size, 400 or 100)")
    options.add_argument("--layers", type=int, nargs="*", default=[4, 32], help="of the models to compile")
    args = options.parse_args()
    heading(f"A Llama block, forward and backward: tp={TP}, {args.tokens} tokens, float32, gloo")
    repeats = {
        hidden: args.repeats or (8 if args.quick else next(count for limit, count in ROUNDS if hidden <= limit))
        for hidden in args.hidden
    }
    alone = {str(hidden): report_alone(hidden, args.tokens, repeats[hidden]) for hidden in args.hidden}
    columns = f"{'/ swap':>8}{'±':>7}"
    print(f"\n{'hidden':>6}  {'variant':<8}{'wall ms':>9}{columns}{'CPU ms':>11}{columns}{'rounds':>9}")
    step = {}
    for hidden in args.hidden:
        step[str(hidden)] = report_block(hidden, args.tokens, repeats[hidden])
    print("±: half-width of the median's 95 % interval. Wall: the slower rank. CPU: both ranks, all threads.\n")
    compiling = report_compiling([2] if args.quick else args.layers)
    print(json.dumps({"alone": alone, "step": step, "compile": compiling}))


if __name__ == "__main__":
    main()
