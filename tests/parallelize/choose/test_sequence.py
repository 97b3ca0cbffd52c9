"""Llama of transformers, divided along the sequence: keys and values go around the ranks."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from neuronx_dist import comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, EmittedProgramError, IRGraph, explain, parallelize
from neuronx_dist.planning.costs import Costs
from neuronx_dist.spmd import S
from tests.parallelize.support.hf_models import HEADS, HIDDEN
from tests.parallelize.support.parity import assert_equal, trained, trained_parallel

pytestmark = pytest.mark.slow

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
LENGTH = 24
SLOW_LINKS = Costs(flops=1e8, bandwidth=1e9, launch=1e-7, link_bandwidth=1e8, link_latency=1e-7)


class Llama(nn.Module):
    """Llama with norms in float64, which transformers computes in float32, and the loss of labels."""

    def __init__(self, **config: int) -> None:
        super().__init__()
        self.model = transformers.LlamaModel(transformers.LlamaConfig(**{**HIDDEN, **HEADS, **config}))
        width = self.model.config.hidden_size
        for module in self.model.modules():
            for name in dict(module.named_children()):
                if name.endswith("norm"):
                    setattr(module, name, nn.RMSNorm(width, self.model.config.rms_norm_eps))
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.model(input_ids=ids, use_cache=False).last_hidden_state
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def llama(length: int = LENGTH, **config: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(64, (1, length + 1))
    return Llama(**config).double(), {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def by_sequence(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    """A policy: each rank has a piece of the sequence; weights are whole."""
    ranks = config.plan_ngpus
    cuts = {"embedding": (0, 1), "scaled_dot_product_attention": (1, 2), "linear": (0, 1)}
    for node in graph.operations:
        if node.name in cuts:
            idx, dim = cuts[node.name]
            for rank, part in enumerate(graph.partition(node, node.algorithm("dim"), idx=idx, dim=dim, num=ranks)):
                graph.assign(part, rank)
    return graph


def ring_and_heads(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    """The sequence over a first axis of two ranks, the heads over a second one."""
    graph.later.sizes = (2,)
    for node in graph.select(name="scaled_dot_product_attention"):
        graph.constraints.strategies[node.call] = [lambda strategy: strategy.name.startswith("ring_attention")]
    graph.later.decide.append(cut_heads)
    return graph


def cut_heads(inner: IRGraph, local: Any) -> None:
    for node in inner.select(name="ring_attention"):
        inner.constraints.strategies[node.call] = [lambda strategy: strategy.operands[0] == S(1)]


@pytest.mark.parametrize("ranks, policy", [(2, by_sequence), (4, by_sequence), (4, ring_and_heads)])
def test_trained(ranks: int, policy: Any, tmp_path: Path) -> None:
    """Losses, every gradient and weights after 3 steps, float64 at 1e-10; `spmd.check` passes on the way."""
    module, arguments = llama()
    wanted = trained(module, arguments, SGD, 3, 1)
    has = trained_parallel(module, arguments, SGD, 3, ComputeConfig(ranks, ranks), policy, tmp_path)
    assert_equal(has, wanted, 1e-10)
    (source,) = tmp_path.rglob("gencode0.py")
    assert "composites.ring_attention(" in source.read_text()


class Hidden(nn.Module):
    """Causal attention behind padding on the left: finite numbers hide all keys from the first rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 24, dtype=torch.float64)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).split(8, -1))
        hidden = torch.ones(8, 8, dtype=torch.bool, device=x.device).triu(1) | padded[:, None, None]
        mask = torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, torch.finfo(x.dtype).min)
        return F.scaled_dot_product_attention(q, k, v, mask)


def test_rows_that_finite_numbers_hide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of all keys, as in one process without torch's fused kernel; a ring that forgets keys is refused."""
    arguments = {"x": torch.randn(1, 8, 8, dtype=torch.float64), "padded": torch.arange(8)[None] < 3}
    with sdpa_kernel(SDPBackend.MATH):
        wanted = trained(Hidden(), arguments, SGD, 2, 1)
    has = trained_parallel(Hidden(), arguments, SGD, 2, ComputeConfig(2, 2), by_sequence, tmp_path / "right")
    assert_equal(has, wanted, 1e-10)
    monkeypatch.setattr("neuronx_dist.attention.ring._largest", lambda mask: mask.new_zeros((*mask.shape[:-1], 1)))
    with pytest.raises(EmittedProgramError, match="other values than one process.*: result 0 on rank 0"):
        parallelize(Hidden(), arguments, by_sequence, ComputeConfig(2, 2), gen_savedir=tmp_path / "wrong")


def bytes_of(event: Any) -> int:
    """Bytes that one of two ranks sends for a collective."""
    return event.dtype.itemsize * prod(event.shape) * {"all_to_all": 1, "reduce_scatter": 1}.get(event.verb, 2) // 2


def test_autodist_finds_the_ring(tmp_path: Path) -> None:
    """One head cannot be divided. Bytes are the predicted ones; nothing that is saved has the entire sequence."""
    module, arguments = llama(96, num_attention_heads=1, num_key_value_heads=1)
    config = ComputeConfig(2, 2, pas_config={"costs": SLOW_LINKS})
    parallel_class = parallelize(
        type(module), arguments, "autodist", config, gen_savedir=tmp_path, module_fn=lambda: module
    )
    costs = explain(parallel_class)
    (row,) = [row for row in costs["calls"] if row["function"] == "scaled_dot_product_attention"]
    assert row["times"] == 2 and row["strategy"] == "ring_attention of S(2) of operand 0"
    assert "inside scaled_dot_product_attention" in str(costs) and "ring_attention of S(2)" in str(costs)

    def rank() -> tuple[list[Any], list[Any]]:
        parallel, shapes = parallel_class(), []
        with comm.record() as calls, torch.autograd.graph.saved_tensors_hooks(seen(shapes), lambda x: x):
            parallel(**arguments).backward()
        return list(calls), shapes

    events, shapes = threads.run(config.mesh(), rank)[0]
    predicted = sum(entry["forward_bytes"] + entry["backward_bytes"] for entry in costs["collectives"])
    assert predicted == sum(map(bytes_of, events)) > 0
    assert not [shape for shape in shapes if 96 in shape], shapes


def test_keys_go_around_in_the_dtype_of_autocast(tmp_path: Path) -> None:
    """Bytes of keys that are float32 outside of the attention, as behind rotary embeddings."""

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16):
                return F.scaled_dot_product_attention(x, x, x)

    x, config = torch.randn(1, 2, 8, 4, requires_grad=True), ComputeConfig(2, 2)
    parallel_class = parallelize(Attention, {"x": x}, by_sequence, config, gen_savedir=tmp_path)

    def rank() -> list[Any]:
        with comm.record() as calls:
            parallel_class()(x.detach().requires_grad_()).sum().backward()
        return list(calls)

    calls = threads.run(config.mesh(), rank)[0]
    predicted = sum(
        entry["forward_bytes"] + entry["backward_bytes"] for entry in explain(parallel_class)["collectives"]
    )
    assert predicted == sum(map(bytes_of, calls)) > 0
    assert {call.dtype for call in calls if call.verb == "exchange"} == {torch.bfloat16, torch.float32}  # of gradients


def seen(shapes: list[Any]) -> Any:
    def pack(x: Tensor) -> Tensor:
        if x.is_floating_point():
            shapes.append(tuple(x.shape))
        return x

    return pack
