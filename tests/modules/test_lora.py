"""Adapters: training on every layout equals one process, where they equal the formula; errors."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.modules.lora import LoraConfig, LoraModel, get_lora_model
from neuronx_dist.modules.lora.layer import WholeLinear
from neuronx_dist.modules.lora.model import adapters_of
from neuronx_dist.modules.lora.tp_layer import LoraParallelLinear
from neuronx_dist.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_dist.parallel_layers import ColumnParallelLinear, RowParallelLinear
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.hf.parity import AllInFloat64
from tests.support.more_architectures import OF_TRANSFORMERS
from tests.support.synthetic import relative_error

HIDDEN, HEADS, ROWS, SEQ, STEPS = 8, 4, 4, 8, 3
DATA = [
    torch.randn(ROWS, SEQ, HIDDEN, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(3)
]


class Net(nn.Module):
    """Attention over fused q, k, v, a gated MLP whose first layer has two blocks, and a plain head."""

    def __init__(self, sequence_parallel: bool, kv: int = HIDDEN, kv_replicas: int = 1) -> None:
        super().__init__()
        shared: dict[str, Any] = dict(
            dtype=torch.float64, sequence_parallel_enabled=sequence_parallel, sequence_dimension=1
        )
        self.qkv_proj = GQAQKVColumnParallelLinear(
            HIDDEN, [HIDDEN, kv], gather_output=False, kv_size_multiplier=kv_replicas, **shared
        )
        self.o_proj = RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=True, **shared)
        self.gate_up = ColumnParallelLinear(HIDDEN, 4 * HIDDEN, gather_output=False, stride=2, **shared)
        self.down = RowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True, bias=False, **shared)
        self.norm = nxd.LayerNorm(HIDDEN, sequence_parallel_enabled=sequence_parallel, dtype=torch.float64)
        self.sequence_parallel = sequence_parallel
        self.head = ColumnParallelLinear(HIDDEN, 2 * HIDDEN, dtype=torch.float64)  # gathers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence_parallel:
            x = nxd.parallel_layers.mappings.scatter_to_sequence_parallel_region(x, 1)
        q, k, v = (y.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for y in self.qkv_proj(self.norm(x)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(out.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        x = x + self.down(F.silu(gate) * up)
        if self.sequence_parallel:
            x = nxd.parallel_layers.mappings.gather_from_sequence_parallel_region(x, 1, to_model_parallel=False)
        return self.head(x)


class Loss(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


CONFIG = LoraConfig(lora_rank=3, lora_alpha=6, target_modules=["qkv_proj", "o_proj", "gate_up", "down", "head"])


def _draw_b(model: nn.Module) -> None:
    """Gives each B values, equal at any degree; of zeros the gradient of A is zero."""
    for name, layer in adapters_of(model).items():
        for key, param in layer.lora_B.named_parameters():
            spec = spec_of(param)
            generator = torch.Generator().manual_seed(sum(map(ord, f"{name}{key}")))
            whole = torch.randn(spec.full_shape or param.shape, generator=generator, dtype=torch.float64) / 4
            with torch.no_grad():
                param.copy_(spec.local_slice(whole, comm.rank(spec.axis) if spec.axis else 0))


def adapted(sequence_parallel: bool, kv: int = HIDDEN, kv_replicas: int = 1, dropout: float = 0.0) -> LoraModel:
    torch.manual_seed(0)
    net = Net(sequence_parallel, kv, kv_replicas)
    model = get_lora_model(net, LoraConfig(**{**CONFIG.__dict__, "lora_dropout": dropout}))
    _draw_b(net)
    assert isinstance(model, LoraModel)
    return model


Result = tuple[list[float], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def _train(sequence_parallel: bool, kv: int = HIDDEN, kv_replicas: int = 1, zero1: bool = False) -> Result:
    """Returns losses, the reduced gradients of steps, and the weights at the end, whole."""
    model = adapted(sequence_parallel, kv, kv_replicas)
    trained = [param for param in model.parameters() if param.requires_grad]
    options: dict[str, Any] = dict(lr=0.1, momentum=0.9)
    optimizer: Any = torch.optim.SGD(trained, **options)
    if zero1:
        optimizer = nxd.NeuronZero1Optimizer(trained, torch.optim.SGD, grad_clipping=False, **options)
    losses, grads = [], []
    rows = ROWS // comm.size("dp")
    for x in DATA:
        loss = model(x[comm.rank("dp") * rows :][:rows]).pow(2).mean()
        loss.backward()
        nxd.reduce_gradients(model, average_over_data=not zero1)
        losses.append(float(comm.all_reduce(loss.detach(), "dp") / comm.size("dp")))
        grads.append({} if zero1 else {n: _whole(p.grad, p) for n, p in model.named_parameters() if p.requires_grad})
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads, {name: _whole(param, param) for name, param in model.named_parameters()}


def _whole(tensor: torch.Tensor | None, param: torch.Tensor) -> torch.Tensor:
    assert tensor is not None
    return gather_full(tensor, spec_of(param))


@cache
def _alone(kv: int) -> Result:
    return comm.threads.run(Mesh(1), _train, False, kv)[0]


# Mesh, sequence parallelism, features and replicas of keys and values, ZeRO-1.
LAYOUTS = [
    (Mesh(2, tp=2), False, HIDDEN, 1, False),
    (Mesh(2, tp=2), True, HIDDEN, 1, False),
    (Mesh(4, tp=4), True, HIDDEN, 1, False),
    (Mesh(4, tp=4), False, HIDDEN // 2, 2, False),
    (Mesh(4, tp=2), True, HIDDEN, 1, True),
    (Mesh(2), False, HIDDEN, 1, True),
]


@pytest.mark.parametrize(("mesh", "sequence_parallel", "kv", "replicas", "zero1"), LAYOUTS, ids=str)
def test_training_equals_one_process(mesh: Mesh, sequence_parallel: bool, kv: int, replicas: int, zero1: bool) -> None:
    losses, grads, weights = _alone(kv)
    for found in comm.threads.run(mesh, _train, sequence_parallel, kv, replicas, zero1):
        assert found[0] == pytest.approx(losses, abs=1e-12)
        for step, expected in enumerate(grads):
            for name, grad in found[1][step].items():
                assert relative_error(grad, expected[name]) < 1e-10, (step, name)
        assert zero1 or found[1][0].keys() == grads[0].keys()
        assert found[2].keys() == weights.keys()
        for name, weight in found[2].items():
            assert relative_error(weight, weights[name]) < 1e-10, name
    assert all("lora_" in name for name in grads[0])


def test_the_sum_over_tp_of_the_replicated_matrix_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronx_dist.modules.lora.tp_layer._replicated", lambda part, base: part.weight)
    with pytest.raises(AssertionError):
        compare(Mesh(2, tp=2), False)
    monkeypatch.setattr("neuronx_dist.modules.lora.tp_layer.WholeLinear", _without_sum)
    with pytest.raises(AssertionError):
        compare(Mesh(2, tp=2), True)


def _without_sum(rows: int, columns: int, initialise: Any, is_partial: bool, like: torch.Tensor) -> WholeLinear:
    return WholeLinear(rows, columns, initialise, False, like)


def test_a_loop_without_a_reduction_over_tp_is_right() -> None:
    """Without sequence parallelism a script for NxD reduces gradients over the data alone."""

    def main() -> dict[str, torch.Tensor]:
        model = adapted(False)
        model(DATA[0]).square().mean().backward()
        return {name: _whole(param.grad, param) for name, param in model.named_parameters() if param.requires_grad}

    alone = comm.threads.run(Mesh(1), main)[0]
    for grads in comm.threads.run(Mesh(2, tp=2), main):
        for name, grad in grads.items():
            assert relative_error(grad, alone[name]) < 1e-10, name


def test_one_process_equals_the_formula() -> None:
    """The weights W + s B A of the layers, in the model without adapters, give the outputs and the gradients of x."""

    def main() -> None:
        model = adapted(False)
        plain = Net(False)
        weights = {
            name.replace(".base_layer", ""): p.detach() for name, p in model.named_parameters() if "lora" not in name
        }
        for name, layer in adapters_of(model).items():
            for letter in ("_q", "_k", "_v") if name == "qkv_proj" else ("",):
                b, a = getattr(layer.lora_B, f"weight{letter}"), layer.lora_A.weight
                weights[f"{name}.weight{letter}"] = weights[f"{name}.weight{letter}"] + 2.0 * b @ a
        plain_weights = dict(plain.named_parameters())
        assert plain_weights.keys() == weights.keys()
        with torch.no_grad():
            for name, param in plain_weights.items():
                param.copy_(weights[name])
        inputs = [DATA[0].clone().requires_grad_() for _ in range(2)]
        outputs = [net(x) for net, x in zip((model, plain), inputs)]
        torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
        for out in outputs:
            out.square().sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-11, atol=1e-11)

    comm.threads.run(Mesh(1), main)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_activations_need_no_collective_of_adapters(sequence_parallel: bool) -> None:
    """A layer with an adapter calls what the layer calls, and one sum of a small gradient, `[r, in]` or `[out, r]`."""

    def calls(with_adapters: bool) -> list[tuple[str, int]]:
        model = adapted(sequence_parallel) if with_adapters else Net(sequence_parallel)
        x = DATA[0].clone().requires_grad_()
        with comm.record() as record:
            model(x).sum().backward()
        return [(call.verb, math.prod(call.shape)) for call in record if ":" not in call.verb]

    for with_adapters, without in comm.threads.run(Mesh(2, tp=2), lambda: (calls(True), calls(False))):
        if sequence_parallel:  # the gathered input of a column layer is saved for A, and not gathered again in backward
            for _ in ("qkv_proj", "gate_up"):
                without.remove(("all_gather", ROWS * SEQ * HIDDEN // 2))
        layers = 1 if sequence_parallel else 5  # the head has no sequence parallelism
        assert sorted(with_adapters) == sorted([*without, *[("all_reduce", HIDDEN * 3)] * layers])
        assert len(without) > 4


class Doubled(ColumnParallelLinear):
    def forward(self, input: torch.Tensor) -> Any:
        return super().forward(input) * 2


def test_layers_whose_forward_an_adapter_would_leave_out_are_refused() -> None:
    with comm.as_rank(Mesh(1), 0):
        wrapped = ColumnParallelLinear(4, 4)
        wrapped.forward = partial(ColumnParallelLinear.forward, wrapped)  # type: ignore[method-assign]
        for layer in (Doubled(4, 4), wrapped):
            with pytest.raises(ValueError, match="0 is a .* with another forward than ColumnParallelLinear's"):
                get_lora_model(nn.Sequential(layer), LoraConfig(target_modules=["0"]))


@pytest.mark.parametrize("layer_type", [ColumnParallelLinear, nn.Linear])
def test_hooks_of_a_layer_are_those_of_its_adapter(layer_type: type[nn.Module]) -> None:
    with comm.as_rank(Mesh(1), 0):
        layer, seen = layer_type(4, 4), []
        handle = layer.register_forward_hook(lambda module, args, out: seen.append(out) or 2 * out)
        model = get_lora_model(nn.Sequential(layer), LoraConfig(lora_rank=2, target_modules=["0"]))
        torch.nn.init.normal_(model.module[0].lora_B.weight)
        doubled = model(torch.ones(1, 4))
        handle.remove()
        assert len(seen) == 1 and torch.equal(doubled, 2 * seen[0]) and torch.equal(model(torch.ones(1, 4)), seen[0])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_adapters_on_swapped_gpt2_are_those_of_one_process(sequence_parallel: bool) -> None:
    """Loss, all gradients, merged weights and the loss with these."""
    gpt2 = next(architecture for architecture in OF_TRANSFORMERS if architecture.name == "GPT-2")

    def step(swapped: bool) -> dict[str, torch.Tensor]:
        module = gpt2.make(1)
        if swapped:
            nxd.hf.swap(module, sequence_parallel=sequence_parallel)
        config = LoraConfig(lora_rank=2, target_modules=["c_attn", "c_proj", "c_fc"])
        torch.manual_seed(0)
        model: Any = get_lora_model(module, config)
        _draw_b(module)
        with AllInFloat64():
            loss = model(**gpt2.inputs()).loss
            loss.backward()
            nxd.reduce_gradients(model)
            found = {name: _whole(x.grad, x) for name, x in model.named_parameters() if x.requires_grad}
            model.eval().merge_lora()
            found |= {f"merged {name}": _whole(x, x) for name, x in model.named_parameters()}
            return {**found, "loss": loss.detach(), "merged": model(**gpt2.inputs()).loss.detach()}

    expected = comm.threads.run(Mesh(1), step, False)[0]
    assert sum("lora_B" in name for name in expected) == 2 * 4  # one layer; gradients and merged weights
    for found in comm.threads.run(Mesh(2, tp=2), step, True):
        assert found.keys() == expected.keys()
        assert {name: e for name in expected if (e := relative_error(found[name], expected[name])) > 1e-10} == {}


@pytest.mark.parametrize("zero1", [False, True])
def test_an_optimizer_that_was_made_before_the_adapters_is_refused(zero1: bool) -> None:
    """Such an optimizer would train nothing: its parameters are frozen."""

    def main() -> None:
        model = Net(False)
        config = nxd.neuronx_distributed_config(optimizer_config={"zero_one_enabled": zero1})
        optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters())
        adapted = get_lora_model(model, LoraConfig(target_modules=["o_proj"]))
        adapted(DATA[0]).sum().backward()
        with pytest.raises(RuntimeError, match="has the frozen weight of o_proj, and not its adapter. If it was made"):
            optimizer.step()
        torch.optim.AdamW(adapted.parameters()).step()
        torch.optim.AdamW([param for param in adapted.parameters() if param.requires_grad]).step()
        base = torch.optim.SGD([param for name, param in adapted.named_parameters() if "lora" not in name])
        with pytest.raises(RuntimeError, match="if another optimizer has the adapters, leave out parameters that do"):
            base.step()

    comm.threads.run(Mesh(1), main)


def test_initial_values_do_not_depend_on_the_degree() -> None:
    def main() -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        model = get_lora_model(Net(False), CONFIG)
        return {name: _whole(param, param) for name, param in model.named_parameters() if "lora_" in name}

    alone = comm.threads.run(Mesh(1), main)[0]
    assert all(bool(value.any()) == ("lora_A" in name) for name, value in alone.items())
    for values in comm.threads.run(Mesh(4, tp=4), main):
        for name, value in values.items():
            assert torch.equal(value, alone[name]), name


def test_dropout_is_that_of_the_whole_input() -> None:
    """Ranks draw one mask where they have one input, so that the column layers' outputs are those of one process."""

    def main() -> torch.Tensor:
        model = adapted(False, dropout=0.5)
        torch.manual_seed(9)
        return torch.cat([model.head(DATA[0]).detach()])

    alone = comm.threads.run(Mesh(1), main)[0]
    for out in comm.threads.run(Mesh(2, tp=2), main):
        torch.testing.assert_close(out, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layer", ["linear", "embedding", "conv", "conv1d"])
def test_plain_layers(layer: str) -> None:
    """Output and merged weight of an adapter on a plain layer are those of the formula."""
    torch.manual_seed(0)
    made: Any = {
        "linear": lambda: nn.Linear(4, 6),
        "embedding": lambda: nn.Embedding(5, 6),
        "conv": lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1),
        "conv1d": lambda: Conv1D(6, 4),
    }[layer]()
    x: Any = {"embedding": torch.tensor([[0, 4, 2]]), "conv": torch.randn(2, 2, 7, 7)}.get(layer, torch.randn(3, 4))
    with comm.as_rank(Mesh(1), 0):
        model: Any = LoraModel(nn.Sequential(made), LoraConfig(lora_rank=2, target_modules=["0"]))
        assert torch.equal(model(x), made(x))
        with torch.no_grad():
            for param in (*model.module[0].lora_A.parameters(), *model.module[0].lora_B.parameters()):
                param.normal_()
        out = model(x)
        assert not torch.allclose(out, made(x))
        model.merge_lora()
        torch.testing.assert_close(made(x), out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(x), out, rtol=1e-5, atol=1e-5)


def test_what_is_trained() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2)

    def trained(**options: Any) -> set[str]:
        model = LoraModel(Model(), LoraConfig(lora_rank=1, target_modules="a", **options))
        return {name for name, param in model.named_parameters() if param.requires_grad}

    with comm.as_rank(Mesh(1), 0):
        adapters = {"a.lora_A.weight", "a.lora_B.weight"}
        assert trained() == adapters
        assert trained(bias="lora_only") == adapters | {"a.base_layer.bias"}
        assert trained(bias="all") == adapters | {"a.base_layer.bias", "b.bias", "c.bias"}
        assert trained(modules_to_save=["c"]) == adapters | {"c.weight", "c.bias"}


BAD = {
    "no target": (
        dict(target_modules=["q_prj"]),
        "no layer of Net matches target_modules=\\['q_prj'\\]; nearest: qkv_proj",
    ),
    "class": (dict(target_modules=["norm"]), "norm is a LayerNorm; possible are ColumnParallelLinear"),
    "unknown model": (dict(), "no known config.model_type .got None.: pass target_modules"),
}


def test_adapters_of_a_model_that_has_some_are_refused() -> None:
    with comm.as_rank(Mesh(1), 0):
        model = get_lora_model(Net(False), CONFIG)
        with pytest.raises(ValueError, match="this Net has adapters, such as that of qkv_proj: load others"):
            get_lora_model(model, CONFIG)


@pytest.mark.parametrize("case", BAD)
def test_targets_that_cannot_have_adapters_are_refused(case: str) -> None:
    options, message = BAD[case]
    with comm.as_rank(Mesh(1), 0), pytest.raises(ValueError, match=message):
        get_lora_model(Net(False), LoraConfig(**options))


@pytest.mark.parametrize(
    "options", [dict(lora_rank=0), dict(lora_dropout=1.5), dict(bias="some"), dict(init_lora_weights="x")]
)
def test_wrong_options_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        LoraConfig(**options)


@pytest.mark.parametrize("name, near", [("r", "lora_rank, or pass PEFT's"), ("lora_aplha", "lora_alpha")])
def test_unknown_options_are_refused_with_the_nearest_name(name: str, near: str) -> None:
    options: Any = {name: 4}
    with pytest.raises(TypeError, match=f"LoraConfig has no option '{name}'; nearest: {near}"):
        LoraConfig(**options)


@pytest.mark.parametrize("sums", [True, False])
def test_a_step_is_checked(sums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not sums:
        monkeypatch.setattr("neuronx_dist.modules.lora.tp_layer.WholeLinear", _without_sum)

    def model_fn() -> nn.Module:
        return get_lora_model(Loss(True), replace(CONFIG, target_modules=["qkv_proj", "o_proj", "gate_up", "down"]))

    report = nxd.spmd.check(model_fn, DATA[0], dict(tp=2))
    assert report.ok == sums, str(report)
    assert sums or "qkv_proj.lora_B.weight_q" in str(report)


def _formula(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Returns the output of a net with adapters from whole weights, by torch alone."""

    def linear(name: str, x: torch.Tensor, letter: str = "") -> torch.Tensor:
        delta = weights[f"{name}.lora_B.weight{letter}"] @ weights[f"{name}.lora_A.weight"] * CONFIG.scaling
        weight, bias = (weights.get(f"{name}.base_layer.{kind}{letter}") for kind in ("weight", "bias"))
        assert weight is not None
        return F.linear(x, weight + delta, bias)

    y = F.layer_norm(x, [HIDDEN], weights["norm.weight"], weights["norm.bias"])
    heads = (linear("qkv_proj", y, f"_{letter}").unflatten(-1, (HEADS, -1)).transpose(1, 2) for letter in "qkv")
    x = x + linear("o_proj", F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
    gate, up = linear("gate_up", x).chunk(2, dim=-1)
    return linear("head", x + linear("down", F.silu(gate) * up))


def compare(mesh: Mesh, sequence_parallel: bool) -> None:
    """Compares loss and gradients of a net with adapters with those of the formula."""

    def main() -> None:
        model = adapted(sequence_parallel)
        weights = {name: _whole(param, param).clone() for name, param in model.named_parameters()}
        loss = model(DATA[0]).square().mean()
        loss.backward()
        nxd.reduce_gradients(model)
        for name, weight in weights.items():
            weight.requires_grad_("lora_" in name)
        expected = _formula(weights, DATA[0]).square().mean()
        expected.backward()
        assert abs(float(loss.detach() - expected.detach())) < 1e-12
        for name, param in model.named_parameters():
            if param.requires_grad:
                assert relative_error(_whole(param.grad, param), _whole(weights[name].grad, DATA[0])) < 1e-10, name

    comm.threads.run(mesh, main)


def compare_row(**options: Any) -> None:
    """Compares a row layer with an adapter with the formula: output, gradient of the input and of the adapter."""

    def main() -> None:
        torch.manual_seed(1)
        base = RowParallelLinear(8, 6, dtype=torch.float64, **options)
        layer = LoraParallelLinear(base, LoraConfig(lora_rank=2, lora_alpha=4))
        with torch.no_grad():
            layer.lora_B.weight.copy_(torch.randn(6, 2, dtype=torch.float64))
            base.bias.copy_(torch.randn(6, dtype=torch.float64))
        whole = {name: _whole(param, param).clone().requires_grad_() for name, param in layer.named_parameters()}
        x, y = (torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) for _ in range(2))
        x.requires_grad_(), y.requires_grad_()
        out = layer(x if not options.get("input_is_parallel") else x.chunk(2, dim=-1)[comm.rank("tp")])
        summed = out if options.get("reduce_output", True) else comm.all_reduce(out.detach(), "tp")
        weight = whole["base_layer.weight"] + 2.0 * whole["lora_B.weight"] @ whole["lora_A.weight"]
        expected = F.linear(y, weight, whole["base_layer.bias"])
        torch.testing.assert_close(summed, expected, rtol=1e-12, atol=1e-12)
        out.square().sum().backward() if options.get("reduce_output", True) else out.sum().backward()
        (expected.square() if options.get("reduce_output", True) else expected).sum().backward()
        nxd.reduce_gradients(layer)
        if not options.get("input_is_parallel"):
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-11, atol=1e-11)
        for name in ("lora_A.weight", "lora_B.weight"):
            grad = _whole(layer.get_parameter(name).grad, layer.get_parameter(name))
            torch.testing.assert_close(grad, whole[name].grad, rtol=1e-11, atol=1e-11)

    comm.threads.run(Mesh(2, tp=2), main)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_those_of_the_formula(sequence_parallel: bool) -> None:
    compare(Mesh(2, tp=2), sequence_parallel)


@pytest.mark.parametrize("options", [dict(), dict(reduce_output=False, input_is_parallel=True)], ids=str)
def test_row_layers_that_split_their_input_or_do_not_sum(options: Any) -> None:
    compare_row(**options)
