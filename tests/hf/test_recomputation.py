"""Recomputed parts of swapped models: loss and gradients are equal to the bit, and fewer bytes are saved."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM
from transformers.modeling_utils import AttentionInterface

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.mesh import Mesh
from neuronx_dist.planning.layout import format_bytes, parse_bytes
from neuronx_dist.planning.meter import measure_peak
from neuronx_dist.planning.recompute import least_time
from tests.hf.models import SIZES, VOCAB, llama_config, reference_model
from tests.support.pool import processes

LENGTH = 64
_MOE = dict(
    SIZES,
    num_hidden_layers=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=32,
    decoder_sparse_step=1,
    initializer_range=0.2,
    use_cache=False,
)


def llama(attention: str = "eager", dropout: float = 0.3, layers: int = 2) -> Any:
    model = reference_model(llama_config(layers=layers, attention_dropout=dropout), LlamaForCausalLM)
    model.set_attn_implementation(attention)
    return model


def experts() -> Any:
    model = reference_model(Qwen2MoeConfig(**_MOE), Qwen2MoeForCausalLM)
    model.set_experts_implementation("eager")  # grouped products have no float64
    return model


def batch_of_rank() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    return nxd.get_batch_on_this_context_parallel_rank({"input_ids": ids, "labels": ids.clone()}, balance="zigzag")


def step(make: Callable[[], Any], prepare: Callable[[Any], Any], **options: Any) -> tuple[int, list[torch.Tensor]]:
    """Bytes that a rank has saved after the forward, and the loss and all gradients of a step."""
    nxd.model_parallel_manual_seed(3)
    model = nxd.hf.swap(make(), **options).train()
    prepare(model)
    nxd.model_parallel_manual_seed(3)
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes() * (storage.data_ptr() not in weights)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(**batch_of_rank()).loss
    loss.backward()
    return sum(saved.values()), [loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]


def compare(mesh: Mesh, make: Callable[[], Any], prepare: Callable[[Any], Any], **options: Any) -> list[float]:
    """Bytes saved on each rank, as a part of those without recomputation; values are equal to the bit."""
    ranks = comm.threads.run(mesh, lambda: (step(make, lambda model: None, **options), step(make, prepare, **options)))
    for (_, plain), (_, again) in ranks:
        assert len(plain) > 10 and all(map(torch.equal, again, plain))
    return [fewer / saved for (saved, _), (fewer, _) in ranks]


PARTS: dict[str, dict[str, Any]] = {
    "attention": dict(what="attention"),
    "norms": dict(what="norms"),
    "full": dict(what="full"),
    "full, offloaded": dict(what="full", offload=True),
    "attention and norms, offloaded": dict(what=["attention", "norms"], offload=True),
    "class and predicate": dict(what=["LlamaMLP", lambda module: type(module).__name__.startswith("SiLU")]),
    "functions": dict(functions=[F.softmax, F.dropout]),
    "functions and a class": dict(what="LlamaMLP", functions=lambda function: function is F.dropout),
}
LAYOUTS: dict[str, tuple[Mesh, Callable[[], Any], dict[str, Any]]] = {
    "one rank": (Mesh(1), llama, {}),
    "tp": (Mesh(2, tp=2), llama, {}),
    "tp, sequence parallel": (Mesh(2, tp=2), llama, {"sequence_parallel": True}),
    "tp, sdpa": (Mesh(2, tp=2), partial(llama, "sdpa", 0.0), {}),
    "ring": (Mesh(2, cp=2), partial(llama, "sdpa", 0.0), {}),
    "ring, tp": (Mesh(4, cp=2, tp=2), partial(llama, "sdpa", 0.0), {"sequence_parallel": True}),
    "experts": (Mesh(2, tp=2), experts, {}),
    "experts over ep": (Mesh(2, ep=2), experts, {}),
}


@pytest.mark.each_value
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.slow
def test_values_are_equal_to_the_bit(parts: str, layout: str) -> None:
    mesh, make, options = LAYOUTS[layout]
    what = dict(PARTS[parts])
    if make is experts and "LlamaMLP" in (what.get("what") or ()):
        what["what"] = "Qwen2MoeSparseMoeBlock"
    compare(mesh, make, lambda model: nxd.recompute(model, **what), **options)


def test_attention_at_tp_2_saves_no_scores() -> None:
    parts = compare(Mesh(2, tp=2), llama, lambda model: nxd.recompute(model, "attention"))
    assert max(parts) < 0.7


def in_pipeline(layers: int = 4, num_microbatches: int = 4, **options: Any) -> Any:
    return nxd.NxDPPModel(
        nxd.hf.swap(llama(layers=layers)),
        transformer_layer_cls="LlamaDecoderLayer",
        num_microbatches=num_microbatches,
        auto_partition=True,
        output_loss_value_spec={"loss": True},
        **options,
    ).train()


def whole_batch(length: int = LENGTH) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (4, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"virtual_pipeline_size": 2}, {"schedule": "zb_h1"}], ids=str)
def test_pipelines(options: dict[str, Any]) -> None:
    def train(**what: Any) -> tuple[Any, ...]:
        nxd.model_parallel_manual_seed(3)
        pipeline = in_pipeline(**options)
        if what:
            nxd.recompute(pipeline, **what)
        nxd.model_parallel_manual_seed(3)
        loss = pipeline.run_train(**whole_batch())
        return loss, [param.grad for param in pipeline.local_parameters()]

    def main() -> list[tuple[Any, ...]]:
        words = [dict(what="attention"), dict(what="full", offload=True), dict(what=["norms"], functions=[F.dropout])]
        return [train(), *(train(**what) for what in words)]

    for (expected, expected_grads), *others in comm.threads.run(Mesh(4, pp=2, tp=2), main):
        for loss, grads in others:
            assert (loss is None) == (expected is None) and (loss is None or torch.equal(loss, expected))
            assert len(grads) > 10 and all(map(torch.equal, grads, expected_grads))


@pytest.mark.slow
@pytest.mark.parametrize("words", ["attention", "norms", "full", ["attention", "norms"]], ids=str)
def test_predicted_bytes_are_the_measured_ones(words: Any) -> None:
    """At the smallest budget all of these parts are recomputed: a byte less is refused, with that figure."""

    def refused(model: Any, budget: int) -> int:
        with pytest.raises(ValueError, match="is too small: .* recomputed this rank needs") as error:
            nxd.recompute(model, words, memory=budget, inputs=batch_of_rank())
        return int(re.search(r"\((\d+) bytes\)", str(error.value))[1])  # type: ignore[index]

    def in_layers(model: Any) -> None:
        for layer in model.model.layers:
            nxd.checkpoint_wrapper(layer) if words == "full" else nxd.recompute(layer, words)

    def main() -> None:
        plain = nxd.hf.swap(llama(layers=3)).train()
        least = refused(plain, 1)
        assert refused(plain, least - 1) == least
        predicted = nxd.recompute(plain, words, memory=least, inputs=batch_of_rank())
        assert predicted.peak == least and f"peak {format_bytes(least)} of" in str(predicted)
        assert {name.partition(".self_attn")[0] for name in predicted.modules} == {
            f"model.layers.{i}" for i in range(3)
        }
        saved, _ = step(partial(llama, layers=3), lambda model: None)
        fewer, _ = step(partial(llama, layers=3), in_layers)
        assert predicted.saved_before - predicted.saved == pytest.approx(saved - fewer, rel=0.02)

        nxd.model_parallel_manual_seed(3)
        inputs = batch_of_rank()
        state = 8 * sum(param.numel() for param in plain.parameters())
        with measure_peak(parameters=[*plain.parameters(), *plain.buffers(), *inputs.values()]) as meter:
            plain(**inputs).loss.backward()
        assert meter.peak + state == pytest.approx(predicted.peak, rel=0.02)

    comm.threads.run(Mesh(1), main)


@pytest.mark.slow
def test_a_budget_recomputes_the_cheapest_parts_that_each_stage_needs() -> None:
    """Stage 0 has two microbatches in flight, stage 1 one: it needs less."""

    def main() -> tuple[Any, ...]:
        pipeline = in_pipeline()
        plain = nxd.recompute(in_pipeline(), memory="1 GiB", inputs=whole_batch())
        assert not plain.modules and "nothing" in str(plain)
        budget = plain.peak - plain.saved // 8
        found = nxd.recompute(pipeline, memory=budget, inputs=whole_batch())
        assert found.peak <= budget < found.peak_before == plain.peak
        inputs = whole_batch()
        pipeline.run_train(**inputs)
        for param in pipeline.local_parameters():
            param.grad = None
        state = 8 * sum(param.numel() for param in pipeline.local_parameters())
        held = [*pipeline.local_parameters(), *pipeline.local_buffers(), *inputs.values()]
        with measure_peak(held=held) as meter:
            pipeline.run_train(**inputs)
        assert meter.peak + state == pytest.approx(found.peak, rel=0.02)
        return found.in_flight, found.parts, pipeline.peak_in_flight

    first, last = comm.threads.run(Mesh(2, pp=2), main)
    assert first[1] and last[1] and {part.what for part in (*first[1], *last[1])} == {"attention"}
    assert (first[0], last[0]) == (first[2], last[2]) == (2, 1)


def test_the_least_time_is_that_of_all_combinations() -> None:
    draw = Random(0)
    for _ in range(20):
        tables = {
            str(unit): [(0, 0.0, ()), *((draw.randrange(50), draw.random(), (str(word),)) for word in range(3))]
            for unit in range(4)
        }
        need = draw.randrange(1, 1 + sum(max(row[0] for row in table) for table in tables.values()))
        chosen = dict(least_time(tables, need))
        rows = [next(row for row in table if row[2] == chosen.get(unit, ())) for unit, table in tables.items()]
        sums = (tuple(map(sum, zip(*((f, t) for f, t, _ in rows)))) for rows in product(*tables.values()))
        assert sum(row[0] for row in rows) >= need
        assert sum(row[1] for row in rows) == pytest.approx(min(time for freed, time in sums if freed >= need))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(memory="24 GB"), "a memory budget needs inputs"),
        (dict(memory="24"), r'memory=.24. is no number of bytes: write "24 GB" or "24 GiB"'),
        (dict(memory="0 GB"), "must be more than 0"),
        (dict(memory=float("inf")), "must be more than 0, and finite"),
        (dict(memory=True), "memory=True is no number of bytes"),
        (dict(functions=[nn.ReLU]), "functions has .*ReLU.*: pass functions of torch"),
        (dict(functions=["relu"]), "functions has 'relu': pass functions of torch"),
        (dict(memory="1 GB", what="mlp"), "what='mlp' is not one of 'full', 'attention', 'norms'"),
        (dict(memory="1 GB", functions=[F.silu]), "leave out memory or functions"),
        (dict(what="atention"), "has no layer 'atention'; nearest"),
    ],
    ids=range(10),
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    inputs = {} if message.startswith("a memory") else {"inputs": whole_batch()}
    with pytest.raises(ValueError, match=message):
        nxd.recompute(llama(), **inputs, **arguments)
    with pytest.raises(TypeError, match="inputs is a Tensor; pass arguments by name"):
        nxd.recompute(llama(), memory="1 GB", inputs=torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no module of this Linear calls an attention function in its forward"):
        nxd.recompute(nn.Linear(2, 2), "attention")


@pytest.mark.parametrize("swap", [False, True])
def test_recomputed_layers_have_no_cache(swap: bool) -> None:
    def run(*words: str) -> tuple[list[torch.Tensor], Any]:
        model = llama(dropout=0.0).train()
        model.config.use_cache = True  # transformers' default
        model = nxd.hf.swap(model) if swap else model
        for word in words:
            nxd.recompute(model, word)
        out = model(**whole_batch(16))
        out.loss.backward()
        if words:
            assert out.past_key_values.get_seq_length() == 0
        return [param.grad for param in model.parameters()], model

    def main() -> None:
        expected, _ = run()
        for word in ("full", "LlamaAttention"):
            grads, model = run(word)
            assert all(map(torch.equal, grads, expected))
        with torch.no_grad():
            cache = model(**whole_batch(16)).past_key_values
        with pytest.raises(ValueError, match="LlamaAttention receives a DynamicCache of 16 tokens"):
            model(**whole_batch(16), past_key_values=cache)

    comm.threads.run(Mesh(1), main) if swap else main()


def test_attention_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark installs itself as it is loaded."""
    monkeypatch.setattr(AttentionInterface, "get_interface", inspect.unwrap(AttentionInterface.get_interface))
    before = AttentionInterface.get_interface
    model = llama()
    nxd.recompute(model, "attention")
    stored = pickle.dumps(model)
    assert AttentionInterface.get_interface is not before
    AttentionInterface.get_interface = before
    again = pickle.loads(stored)
    assert AttentionInterface.get_interface is not before
    again(**whole_batch(16)).loss.backward()


@pytest.mark.slow
def test_a_budget_with_offloaded_inputs() -> None:
    model = llama()
    plain = nxd.recompute(model, memory="1 GB", inputs=whole_batch(), offload=True)
    found = nxd.recompute(model, memory=plain.peak - 1, inputs=whole_batch(), offload=True)
    assert found.modules and found.peak < plain.peak and "extra time" in str(found)


@pytest.mark.slow
def test_the_smallest_budget_is_the_least_peak_and_has_the_unit_of_the_budget() -> None:
    """The last layer needs more when it is recomputed as a whole than its attention alone: its backward comes first."""

    def main() -> None:
        model = nxd.hf.swap(llama(dropout=0.0)).train()
        with pytest.raises(ValueError, match=r"memory=1.0 KB is too small: .* needs 2.7 MB \(\d+ bytes\)") as error:
            nxd.recompute(model, memory="1 KB", inputs=batch_of_rank())
        least = int(re.search(r"\((\d+) bytes\)", str(error.value))[1])  # type: ignore[index]
        found = nxd.recompute(model, memory=f"{least} B", inputs=batch_of_rank())
        assert found.peak == least and [part.what for part in found.parts] == ["full", "attention"]
        assert "peak 2.7 MB of 2.7 MB" in str(found)

    comm.threads.run(Mesh(1), main)


def test_bytes_by_their_units() -> None:
    assert [parse_bytes(text) for text in ("24 GB", "1.5GiB", "3 kb", 7, 2e9)] == [
        24 * 10**9,
        3 * 2**29,
        3000,
        7,
        2 * 10**9,
    ]


def gradients(wrap: Callable[[Any], Any], **what: Any) -> list[torch.Tensor]:
    model = llama("sdpa", 0.0)
    if what:
        nxd.recompute(model, **what)
    wrap(model)(**whole_batch(16)).loss.backward()
    return [param.grad for param in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["attention", "norms", "full"])
def test_compiled(words: str) -> None:
    def compiled(model: Any) -> Any:
        return torch.compile(model, backend="aot_eager")

    for actual, expected in zip(gradients(compiled, what=words), gradients(compiled), strict=True):
        assert torch.equal(actual, expected)


def ddp_step() -> None:
    def wrap(model: Any) -> Any:
        return DistributedDataParallel(model)

    for what in (dict(what=["attention", "norms"]), dict(what="full", offload=True), dict(functions=[F.silu])):
        assert all(map(torch.equal, gradients(wrap, **what), gradients(wrap)))
    found = nxd.recompute(wrap(llama()), memory="1 GB", inputs=whole_batch())
    assert found.peak == nxd.recompute(llama(), memory="1 GB", inputs=whole_batch()).peak
    assert nxd.recompute(wrap(llama())).modules == ("model.layers.0", "model.layers.1")


@pytest.mark.process
def test_inside_ddp() -> None:
    processes(2).run(ddp_step, mesh=dict(tp=1, pp=1))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(2, tp=2), Mesh(2, cp=2)], ids=str)
def test_the_check_accepts_it(mesh: Mesh) -> None:
    def step(model: Any, optimizer: Any, batch: dict[str, torch.Tensor]) -> None:
        part = nxd.get_batch_on_this_context_parallel_rank(batch, "zigzag")
        items = nxd.global_num_items(part["labels"])
        model(**part, num_items_in_batch=items).loss.backward()
        nxd.reduce_gradients(model)

    ids = torch.zeros(2, 8, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "position_ids": ids}
    for what in (dict(what=["attention", "norms"]), dict(what="full", offload=True), dict(functions=[F.silu])):

        def make(what: dict[str, Any] = what) -> Any:
            with torch.device("meta"):
                model = LlamaForCausalLM(llama_config())
            model = nxd.hf.swap(model)
            nxd.recompute(model, **what)
            return model

        report = spmd.check(make, batch, mesh, step=step)
        assert report.ok, str(report)


class Plain(nn.Module):
    """Attention that is not transformers', by torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.other = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, mask, 0.2).transpose(1, 2).flatten(2))
        return x + self.other(x, x, x, need_weights=False)[0]


def test_any_module() -> None:
    def run(**what: Any) -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(0)
        model, x = Plain(), torch.randn(2, 40, 16)
        if what:
            assert nxd.recompute(model, **what).modules
        saved: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = model(x)
        out.square().mean().backward()
        return sum(saved.values()), [param.grad for param in model.parameters()]

    saved, expected = run()
    for what in (dict(what="attention"), dict(what=["norms", "attention"], offload=True)):
        fewer, grads = run(**what)
        assert fewer < 0.7 * saved and all(map(torch.equal, grads, expected))
    model = Plain()
    found = nxd.recompute(model, "attention", memory="1 MB", inputs={"x": torch.randn(2, 40, 16)})
    assert not found.modules
    found = nxd.recompute(model, "attention", memory=found.peak - 1, inputs={"x": torch.randn(2, 40, 16)})
    assert found.modules == ("",) and found.peak < found.peak_before
