"""Step time and saved bytes of a swapped Llama: nothing recomputed, norms, attention, both, full layers, a budget.

One process, eager attention with scores (the case that "attention" is for) and torch's fused kernel. A figure is CPU
time of forward and backward, median of the rounds, in which the variants take turns, and the measured peak of memory.

    python benchmarks/recompute.py [--quick]

The last line is JSON: for each variant the ratio of its time and of its peak to those without recomputation.
"""

from __future__ import annotations

import json
import time
from statistics import median
from typing import Any

from common import heading, parser, quiet  # first: sets the threads

# isort: split
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist.planning.memory import measure_peak

VARIANTS: dict[str, Any] = {
    "none": None,
    "norms": "norms",
    "attention": "attention",
    "attention and norms": ["attention", "norms"],
    "full": "full",
    "budget": None,
}


def model_of(attention: str, what: Any) -> Any:
    torch.manual_seed(0)
    sizes = dict(vocab_size=1024, hidden_size=256, intermediate_size=688, num_hidden_layers=4)
    heads = dict(num_attention_heads=8, num_key_value_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False, attn_implementation=attention)).train()
    if what is not None:
        nxd.recompute(model, what)
    return model


def step(model: Any, inputs: dict[str, torch.Tensor]) -> None:
    model(**inputs).loss.backward()
    model.zero_grad()


def peak(model: Any, inputs: dict[str, torch.Tensor]) -> int:
    with measure_peak(held=[*model.parameters(), *model.buffers(), *inputs.values()]) as meter:
        step(model, inputs)
    return meter.peak


def main() -> None:
    options: Any = parser(__doc__).parse_args()
    ratios: dict[str, dict[str, tuple[float, float]]] = {}
    for attention in ("eager", "sdpa"):
        heading(f"Llama, 4 layers of 256, 2 x 512 tokens, float32, {attention} attention")
        ids = torch.randint(0, 1024, (2, 512))
        inputs = {"input_ids": ids, "labels": ids}
        models = {name: model_of(attention, what) for name, what in VARIANTS.items()}
        peaks = {name: peak(model, inputs) for name, model in models.items() if name != "budget"}
        budget = (peaks["none"] + peaks["full"]) // 2
        print(nxd.recompute(models["budget"], memory=budget, inputs=inputs, optimizer_bytes=0))
        peaks["budget"] = peak(models["budget"], inputs)
        seconds: dict[str, list[float]] = {name: [] for name in models}
        quiet()
        for _ in range(2 if options.quick else 9):
            for name, model in models.items():
                began = time.process_time()
                step(model, inputs)
                seconds[name].append(time.process_time() - began)
        ratios[attention] = {}
        for name in models:
            figures = (median(seconds[name]) / median(seconds["none"]), peaks[name] / peaks["none"])
            ratios[attention][name] = figures
            cost = f"{median(seconds[name]) * 1e3:6.0f} ms  {peaks[name] / 2**20:6.1f} MiB"
            print(f"{name:20} {cost}  time x {figures[0]:.2f}  bytes x {figures[1]:.2f}")
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
