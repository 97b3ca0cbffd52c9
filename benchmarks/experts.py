"""Experts over ep=2, forward and backward, two gloo processes: CPU of both over a hand-written uneven all-to-all.

By hand: one exchange of counts and one of rows each way by `dist.all_to_all_single`, in an autograd function, and a
loop of products over this rank's experts. All variants have the same tokens, choices and weights; their outputs and
gradients are compared first. Counted by `comm.record`: collectives and bytes that a rank sends for each token.

    python benchmarks/experts.py [--quick]

Goal: ours / by hand <= 1.05.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from common import compared, heading, on_ranks, parser, take_turns  # first: sets the threads

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import MixtralConfig, MixtralForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm, hf
from neuronx_dist.modules.moe import ExpertMLPs

EXPERTS, TOP_K = 8, 2
SIZES = ((64, 64, 256), (512, 1024, 2048))  # hidden and intermediate size, tokens of a rank


class Exchange(torch.autograd.Function):
    """Rows to the ranks of their experts; backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.sizes = sent, received
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        sent, received = ctx.sizes
        out = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), sent, received)
        return out, None, None


def by_hand(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, matrices: Sequence[torch.Tensor]
) -> torch.Tensor:
    """`[tokens, h]` to the weighted sum of each token's experts; `matrices` `[experts/ep, in, out]`."""
    gate_up, down = matrices
    ranks, here = dist.get_world_size(), len(gate_up)
    choices = index.flatten()
    order = choices.argsort(stable=True)
    counts = torch.bincount(choices, minlength=EXPERTS).view(ranks, here)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
    rows = Exchange.apply(x.index_select(0, order // TOP_K), sent, received)
    experts = torch.arange(ranks * here).remainder_(here).repeat_interleave(arriving.flatten())
    by_expert = experts.argsort(stable=True)
    parts = []
    for part, first, second in zip(
        rows.index_select(0, by_expert).split(arriving.sum(0).tolist()), gate_up.unbind(), down.unbind(), strict=True
    ):
        gate, up = (part @ first).chunk(2, -1)
        parts.append((F.silu(gate) * up) @ second)
    back = Exchange.apply(torch.cat(parts).index_select(0, by_expert.argsort()), received, sent)
    chosen = torch.zeros(len(choices), x.shape[1]).index_copy(0, order, back)
    return (chosen.unflatten(0, index.shape) * weights.unsqueeze(-1)).sum(1)


def measure(hidden: int, inner: int, tokens: int, quick: bool) -> dict[str, Any]:
    nxd.initialize_model_parallel(expert_model_parallel_size=2)
    rank, here = dist.get_rank(), EXPERTS // 2
    random = torch.Generator().manual_seed(0)
    gate_up = torch.randn(EXPERTS, hidden, 2 * inner, generator=random) / hidden**0.5
    down = torch.randn(EXPERTS, inner, hidden, generator=random) / inner**0.5
    x = torch.randn(2, tokens, hidden, generator=random)[rank]
    affinities = torch.randn(2, tokens, EXPERTS, generator=random)[rank].softmax(-1)
    weights, index = affinities.topk(TOP_K, dim=-1)
    mine = slice(rank * here, (rank + 1) * here)

    ours: Any = ExpertMLPs(EXPERTS, TOP_K, hidden, inner, "silu", True, None)
    hand = [torch.nn.Parameter(gate_up[mine].clone()), torch.nn.Parameter(down[mine].clone())]
    with torch.no_grad():
        ours.mlp_op.gate_up_proj.weight.copy_(gate_up[mine])
        ours.mlp_op.down_proj.weight.copy_(down[mine])
    config = MixtralConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=32,
    )
    swapped: Any = hf.swap(MixtralForCausalLM(config)).model.layers[0].mlp.experts
    with torch.no_grad():
        swapped.gate_up_proj.copy_(gate_up[mine].transpose(1, 2))
        swapped.down_proj.copy_(down[mine].transpose(1, 2))

    calls = {
        "by hand": lambda y: by_hand(y, index, weights, hand),
        "ExpertMLPs": lambda y: ours(y, affinities, index),
        "swapped Mixtral": lambda y: swapped(y, index, weights),
        "by hand again": lambda y: by_hand(y, index, weights, hand),
    }

    def step(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.clone().requires_grad_()
        out = calls[name](y)
        out.backward(x)
        return out, y.grad  # type: ignore[return-value]

    expected = step("by hand")
    for name in calls:
        for found, wanted in zip(step(name), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    counts = {}
    for name in ("ExpertMLPs", "swapped Mixtral"):
        with comm.record() as events:
            step(name)
        verbs = Counter(event.verb for event in events)
        counts[name] = dict(verbs), sum(event.bytes for event in events) / tokens
    times = take_turns({name: lambda name=name: step(name) for name in calls}, 4 if quick else 40)
    return {
        "counts": counts,
        "ratios": {name: compared(times[name], times["by hand"])["_cpu"] for name in times},
    }


def main() -> None:
    options = parser(__doc__).parse_args()
    heading(f"Experts over ep=2: {EXPERTS} experts, {TOP_K} of each token, float32, forward and backward")
    for hidden, inner, tokens in SIZES:
        results = on_ranks(measure, 2, hidden, inner, tokens, options.quick)
        print(f"hidden {hidden}, intermediate {inner}, {tokens} tokens of a rank")
        for name, found in results["ratios"].items():
            verbs, sent = results["counts"].get(name, ({}, 0))
            ratio = f"{found.ratio:6.3f} ± {found.interval:.3f} of by hand"
            counted = f"  {sent:,.0f} bytes a token, {verbs}" if verbs else ""
            print(f"  {name:16} {found.seconds * 1e3:8.2f} ms of CPU  {ratio}{counted}", flush=True)


if __name__ == "__main__":
    main()
