"""One GPU: what this package costs beside plain Hugging Face and torch, in one process. Medians of steps in turns.

    overhead   a bf16 Llama's step at tp 1 over the same step of plain transformers, eager         goal: at most 1.01
    mfu        model FLOPs of that step over the device's dense bf16 peak, eager and compiled        goal: at least 0.5
    zero1      a step of NeuronZero1Optimizer in a world of one over torch's AdamW(fused=True), with float32 masters
               that are written by hand, and without masters
    loss       time and peak memory of parallel_cross_entropy and F.cross_entropy, forward and backward
    save       seconds that an asynchronous save holds up training, beside a synchronous one

    python benchmarks/gpu.py [--quick] [--only overhead ...] [--peak 989] [--device cpu --size tiny]

FLOPs are counted as in PaLM (arXiv:2204.02311, appendix B): 6 N per token, and 12 L H Q T of attention. `--device cpu`
shows that the script works, and nothing about a GPU.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from common import heading, parser, ratio  # first: sets the threads

# isort: split
import torch
import torch.nn.functional as F

import neuronx_dist as nxd
from neuronx_dist import hf

# hidden, intermediate, layers, heads, key/value heads, vocabulary; sequences, tokens of each
SIZES = {
    "tiny": ((64, 128, 2, 4, 2, 256), (2, 32)),
    "1b": ((2048, 8192, 16, 32, 8, 128256), (4, 2048)),
}
# Dense bf16 TFLOP/s, from the makers' data sheets.
PEAKS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "MI300X": 1307.0}


def config(size: str) -> Any:
    from transformers import LlamaConfig

    hidden, intermediate, layers, heads, kv_heads, vocabulary = SIZES[size][0]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        use_cache=False,
    )


def models(size: str, device: torch.device) -> tuple[Any, Any]:
    """The same weights twice: plain transformers, and swapped for this package's layers."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with device:
        plain = LlamaForCausalLM(config(size)).to(torch.bfloat16)
    with torch.device("meta"):
        ours = LlamaForCausalLM(config(size)).to(torch.bfloat16)
    hf.swap(ours)
    hf.load_pretrained(ours, plain.state_dict(), device=device)
    return plain, ours


def batch(size: str, device: torch.device) -> dict[str, torch.Tensor]:
    rows, tokens = SIZES[size][1]
    ids = torch.randint(0, SIZES[size][0][-1], (rows, tokens), device=device)
    return {"input_ids": ids, "labels": ids}


def forward_and_backward(model: Any, inputs: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        model(**inputs).loss.backward()
        for param in model.parameters():
            param.grad = None

    return run


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds(variants: Mapping[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Wall seconds of each variant, in turns, after three rounds that are not measured."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(-3, repeats):
        names = list(variants) if turn % 2 else list(variants)[::-1]
        for name in names:
            synchronize(device)
            begin = time.perf_counter()
            variants[name]()
            synchronize(device)
            if turn >= 0:
                times[name].append(time.perf_counter() - begin)
    return times


def flops(size: str, model: Any) -> float:
    """Returns the FLOPs of one step, forward and backward."""
    hidden, _, layers, heads, _, _ = SIZES[size][0]
    rows, tokens = SIZES[size][1]
    parameters = sum(param.numel() for param in model.parameters())
    return rows * tokens * (6.0 * parameters + 12.0 * layers * heads * (hidden // heads) * tokens)


def _text(over: list[float], under: list[float]) -> str:
    median, interval = ratio(over, under)
    return f"{median:.3f} ± {interval:.3f}"


def overhead_and_mfu(size: str, device: torch.device, repeats: int, peak: float | None, parts: set[str]) -> None:
    plain, ours = models(size, device)
    inputs = batch(size, device)
    variants = {"plain": plain, "ours": ours, "plain again": plain}
    steps = {name: forward_and_backward(model, inputs) for name, model in variants.items()}
    if "mfu" in parts:
        steps["ours, compiled"] = forward_and_backward(torch.compile(ours), inputs)
    times = seconds(steps, repeats, device)
    if "overhead" in parts:
        print(f"overhead  ours over plain {_text(times['ours'], times['plain'])} (goal 1.01)")
        print(f"          plain again over plain {_text(times['plain again'], times['plain'])}")
    if "mfu" in parts:
        for name in ("plain", "ours", "ours, compiled"):
            rate = flops(size, ours) / statistics.median(times[name]) / 1e12
            share = "no peak is known: pass --peak" if peak is None else f"MFU {rate / peak:.3f} (goal 0.5)"
            print(f"mfu       {name}: {rate:.1f} TFLOP/s, {share}")


def zero1(size: str, device: torch.device, repeats: int) -> None:
    """The optimizer's step alone, in a world of one; gradients stay as they are."""
    plain, ours = models(size, device)
    inputs = batch(size, device)
    for model in (plain, ours):
        model(**inputs).loss.backward()
    is_fused = device.type != "cpu"
    params = list(plain.parameters())
    masters = [param.detach().float() for param in params]
    of_masters = torch.optim.AdamW(masters, lr=1e-4, fused=is_fused)
    sharded = nxd.NeuronZero1Optimizer(ours.parameters(), torch.optim.AdamW, lr=1e-4, fused=is_fused)
    gradients = [param.grad for param in ours.parameters()]
    in_bfloat16 = torch.optim.AdamW(params, lr=1e-4, fused=is_fused)

    @torch.no_grad()
    def by_hand() -> None:
        """Steps float32 masters: gradients into float32, a fused AdamW, masters into bfloat16."""
        for master in masters:
            master.grad = torch.empty_like(master) if master.grad is None else master.grad
        torch._foreach_copy_([master.grad for master in masters], [param.grad for param in params])
        of_masters.step()
        torch._foreach_copy_(params, masters)

    def step() -> None:
        sharded.step()
        for param, grad in zip(ours.parameters(), gradients):
            param.grad = grad

    times = seconds({"hand": by_hand, "bfloat16": in_bfloat16.step, "ours": step}, repeats, device)
    print(f"zero1     ours over AdamW on float32 masters by hand {_text(times['ours'], times['hand'])}")
    print(f"          ours over AdamW without masters, in bfloat16 {_text(times['ours'], times['bfloat16'])}")


def loss(size: str, device: torch.device, repeats: int) -> None:
    if device.type == "cpu":
        print("loss      peak memory is measured on an accelerator only")
        return
    rows, tokens = SIZES[size][1]
    vocabulary = SIZES[size][0][-1]

    logits = torch.randn(rows * tokens, vocabulary, dtype=torch.bfloat16, device=device, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows * tokens,), device=device)
    losses: dict[str, Callable[[], torch.Tensor]] = {
        "parallel_cross_entropy": lambda: nxd.parallel_cross_entropy(logits, targets).mean(),
        "F.cross_entropy in float32": lambda: F.cross_entropy(logits.float(), targets),
        "F.cross_entropy in bfloat16": lambda: F.cross_entropy(logits, targets),
    }

    def step(function: Callable[[], torch.Tensor]) -> None:
        function().backward()
        logits.grad = None

    times = seconds({name: partial(step, function) for name, function in losses.items()}, repeats, device)
    for name, function in losses.items():
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        step(function)
        peak = torch.accelerator.max_memory_allocated(device) - before
        print(f"loss      {name}: {statistics.median(times[name]) * 1e3:.2f} ms, {peak / 2**20:.0f} MiB")


def save(size: str, device: torch.device, repeats: int) -> None:
    _, ours = models(size, device)
    stalls: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            for is_async in (True, False):
                synchronize(device)
                begin = time.perf_counter()
                nxd.save_checkpoint(folder, f"{number}-{is_async}", ours, async_save=is_async, num_kept_ckpts=1)
                stalls[is_async].append(time.perf_counter() - begin)
                nxd.finalize_checkpoint()
    medians = {is_async: statistics.median(values) for is_async, values in stalls.items()}
    print(f"save      asynchronous: training waits {medians[True]:.3f} s; synchronous: {medians[False]:.3f} s")


PARTS = ("overhead", "mfu", "zero1", "loss", "save")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    options.add_argument("--device", default="cuda", help="device of torch")
    options.add_argument("--size", choices=SIZES, default="1b", help="of the Llama")
    options.add_argument("--peak", type=float, help="dense bf16 TFLOP/s of the device, if it is not in the table")
    args = options.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("gpu.py needs a CUDA device (torch.cuda.is_available() is False); see --device")
    device = nxd.init_distributed(args.device)
    nxd.initialize_model_parallel()
    heading(f"one device: {device}, Llama {args.size}")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peak = args.peak or next((value for part, value in PEAKS.items() if part in name), None)
    parts, repeats = set(args.only), 3 if args.quick else 20
    print(f"device    {name}")
    if parts & {"overhead", "mfu"}:
        overhead_and_mfu(args.size, device, repeats, peak, parts)
    if "zero1" in parts:
        zero1(args.size, device, repeats)
    if "loss" in parts:
        loss(args.size, device, repeats)
    if "save" in parts:
        save(args.size, device, repeats)


if __name__ == "__main__":
    main()
