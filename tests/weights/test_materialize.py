"""A model built on meta gets the same weights at any layout, one whole tensor at a time."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers.embedding import ParallelEmbedding
from neuronx_dist.parallel_layers.linear import ColumnParallelLinear, RowParallelLinear
from neuronx_dist.spmd import named_specs
from neuronx_dist.weights.materialize import materialize
from neuronx_dist.weights.shard_spec import gather_full
from tests.support.locks import SeeingLock

materialize_module = importlib.import_module("neuronx_dist.weights.materialize")
SEEDS = [8342909361095637454, 9123201858914554096, 1257156980456206624]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(8, 24, gather_output=False, stride=2)
        self.down = RowParallelLinear(24, 8, input_is_parallel=True)
        self.norm = nn.LayerNorm(8)


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = ParallelEmbedding(16, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = ColumnParallelLinear(8, 16, bias=False, gather_output=False)
        if tied:
            self.head.weight = self.embedding.weight


def _on_meta(build: Any = Model) -> Any:
    with torch.device("meta"):
        return build()


def _full(seed: int = 0, build: Any = Model, **options: Any) -> dict[str, torch.Tensor]:
    model = materialize(_on_meta(build), seed, **options)
    return {name: gather_full(param, spec).clone() for name, param, spec in named_specs(model)}


def _at(tp: int, *args: Any, **options: Any) -> dict[str, torch.Tensor]:
    results = threads.run(Mesh(tp, tp=tp), lambda: _full(*args, **options))
    for result in results[1:]:
        assert all(torch.equal(weight, results[0][name]) for name, weight in result.items())
    return results[0]


def test_equal_at_any_tp() -> None:
    whole = _at(1)
    assert whole["blocks.0.up.weight"].shape == (24, 8) and whole["embedding.weight"].shape == (16, 8)
    for tp in (2, 4):
        split = _at(tp)
        assert split.keys() == whole.keys()
        for name, weight in whole.items():
            assert torch.equal(split[name], weight), name


def test_names_and_seeds_make_the_difference() -> None:
    first, again, other = _at(1, 0), _at(1, 0), _at(1, 1)
    for name in ("blocks.0.up.weight", "embedding.weight", "blocks.1.down.bias"):
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])
    assert not torch.equal(first["blocks.0.up.weight"], first["blocks.1.up.weight"])


def test_distributions_are_those_of_the_unsharded_layers() -> None:
    weights = _at(2)
    assert weights["blocks.0.up.weight"].abs().max() <= 8**-0.5  # nn.Linear: U(+-1/sqrt(fan_in))
    assert weights["blocks.0.down.weight"].abs().max() <= 24**-0.5
    assert weights["blocks.0.up.bias"].abs().max() <= 8**-0.5
    assert torch.equal(weights["blocks.0.norm.weight"], torch.ones(8))
    assert torch.equal(weights["blocks.0.norm.bias"], torch.zeros(8))
    assert 0.5 < weights["embedding.weight"].std() < 1.5  # nn.Embedding: N(0, 1)


def test_the_callers_random_state_is_untouched() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    _at(1)
    assert torch.equal(torch.rand(4), expected)


def test_dtype_is_a_rounding_and_nothing_else() -> None:
    wide, narrow, double = _at(2), _at(2, dtype=torch.bfloat16), _at(1, dtype=torch.float64)
    for name, weight in wide.items():
        assert torch.equal(narrow[name], weight.bfloat16()) and torch.equal(double[name], weight.double()), name


def test_tied_weights_are_drawn_once_and_stay_tied() -> None:
    def rank() -> None:
        model = _on_meta(lambda: Model(tied=True))
        optimizer = torch.optim.SGD(model.parameters())
        materialize(model, 0)
        assert model.head.weight is model.embedding.weight and not model.head.weight.is_meta
        assert any(param is model.head.weight for param in optimizer.param_groups[0]["params"])

    threads.run(Mesh(2, tp=2), rank)
    tied, untied = _at(2, build=lambda: Model(tied=True)), _at(1)
    assert torch.equal(tied["embedding.weight"], untied["embedding.weight"])


def test_shards_do_not_keep_whole_tensors_alive() -> None:
    def rank() -> None:
        for param in materialize(_on_meta(), 0).parameters():
            assert param.untyped_storage().nbytes() == param.numel() * param.element_size()

    threads.run(Mesh(2, tp=2), rank)


def test_one_whole_tensor_at_a_time() -> None:
    """The initialiser sees a module of which all but one tensor is on meta."""
    real: list[list[str]] = []

    def init(module: nn.Module) -> None:
        real.append([name for name, param in module.named_parameters() if not param.is_meta])
        for param in module.parameters():
            param.fill_(1.0)

    weights = threads.run(Mesh(1), lambda: _full(init_fn=init))[0]
    assert all(len(names) == 1 for names in real) and len(real) == len(weights)
    assert all(bool((weight == 1).all()) for weight in weights.values())


def test_values_that_are_there_stay() -> None:
    def rank() -> None:
        model = _on_meta()
        model.blocks[1].norm = nn.LayerNorm(8)
        nn.init.constant_(model.blocks[1].norm.weight, 5.0)
        materialize(model, 0)
        assert bool((model.blocks[1].norm.weight == 5).all())

    threads.run(Mesh(1), rank)


def test_an_init_fn_may_leave_modules_to_the_default() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)

    weights = _at(2, init_fn=init)
    assert 0.005 < weights["blocks.0.up.weight"].std() < 0.02
    default = _at(1)
    assert torch.equal(weights["blocks.0.up.bias"], default["blocks.0.up.bias"])
    assert torch.equal(weights["embedding.weight"], default["embedding.weight"])


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(3))
        self.register_buffer("steps", torch.arange(4))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Lookup):
            nn.init.ones_(module.table)


def test_what_nothing_initialises_is_named() -> None:
    with pytest.raises(ValueError, match=r"buffer 'steps' \[4\] of Lookup .*init_fn"):
        threads.run(Mesh(1), lambda: materialize(_on_meta(Lookup), 0))

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([Lookup()])

        def _init_weights(self, module: nn.Module) -> None:
            pass

    with pytest.raises(ValueError, match=r"buffer 'inner.0.steps'"):
        threads.run(Mesh(1), lambda: materialize(_on_meta(Bare), 0))
    with pytest.raises(ValueError, match=r"parameter 'inner.0.table' \[3\]"):
        threads.run(Mesh(1), lambda: materialize(_on_meta(lambda: _without_convention(Bare())), 0))


def _without_convention(model: Any) -> Any:
    model.inner[0]._init_weights = None
    return model


def test_buffers_from_an_init_fn() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, Lookup):
            module.steps.copy_(torch.arange(4))

    def rank() -> None:
        model = materialize(_on_meta(Lookup), 0, init_fn=init)
        assert torch.equal(model.steps, torch.arange(4)) and bool((model.table == 1).all())

    threads.run(Mesh(1), rank)


def test_the_default_dtype_changes_no_value() -> None:
    """Weights are drawn in float32, whatever the program's default is."""
    with comm.as_rank(Mesh(1), 0):
        usual = materialize(_on_meta(), seed=1).state_dict()
        torch.set_default_dtype(torch.float64)
        try:
            values = materialize(_on_meta(), seed=1).state_dict()
        finally:
            torch.set_default_dtype(torch.float32)
    for name, value in values.items():
        assert torch.equal(value.float(), usual[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_initialiser_is_given_the_whole_module_in_the_dtype_that_it_was_built_with(dtype: torch.dtype) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = ColumnParallelLinear(8, 24, gather_output=False, dtype=dtype)
            self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))

    seen = []

    def init(module: nn.Module) -> None:
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if not tensor.is_meta:
                seen.append((name, tensor.shape))
            assert tensor.dtype in (torch.float32 if not tensor.is_meta else dtype, torch.int64)
            if not tensor.is_meta:
                nn.init.constant_(tensor, 2)

    with comm.as_rank(Mesh(2, tp=2), 1):
        model = materialize(_on_meta(Counting), 0, init_fn=init)
    assert model.up.weight.dtype == dtype and model.up.weight.shape == (12, 8) and bool((model.up.weight == 2).all())
    assert model.steps.dtype == torch.int64 and model.steps.tolist() == [2, 2, 2]
    assert seen == [("weight", (24, 8)), ("bias", (24,)), ("steps", (3,))]


def test_values_are_drawn_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator that initialisers draw from is one for all threads."""
    lock = SeeingLock(lambda: None)
    monkeypatch.setattr(materialize_module, "_GENERATOR", lock)
    locked: list[bool] = []
    state = torch.get_rng_state()

    def init(module: nn.Module) -> None:
        locked.append(lock.locked())
        assert not torch.is_grad_enabled()
        nn.init.ones_(module.weight)

    with comm.as_rank(Mesh(1), 0), torch.device("meta"):
        model = nn.Linear(2, 2, bias=False)
    with comm.as_rank(Mesh(1), 0):
        materialize(model, 0, init_fn=init)
    assert locked == [True] and torch.equal(torch.get_rng_state(), state)


def test_values_of_a_seed_and_a_name_stay_what_they_are() -> None:
    """A job that goes on with another version has the same model."""
    seed_of = materialize_module.seed_of
    assert [seed_of(0, "a"), seed_of(0, "b"), seed_of(1, "a")] == SEEDS
    assert all(0 <= seed_of(0, str(number)) < 2**63 for number in range(64))


def test_the_order_in_which_initialisers_are_asked() -> None:
    """A function that is given, the layer's own method, the nearest convention around it, torch's reset."""
    calls: list[str] = []

    class Layer(nn.Module):
        def __init__(self, init_method: Any = None, convention: bool = False) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2))
            self.init_method = init_method
            if convention:
                self._init_weights = lambda module: calls.append("own convention")

        def reset_parameters(self) -> None:
            calls.append("reset")
            nn.init.ones_(self.weight)

    class Whole(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.inner = nn.Sequential(layer)

        def _init_weights(self, module: nn.Module) -> None:
            calls.append("convention")  # of the parent, and of the layer

    def method(weight: torch.Tensor) -> None:
        calls.append("method")
        weight[0] = 1.0  # not all of it

    for layer, expected in (
        (Layer, "given convention convention reset"),
        (lambda: Layer(method), "given method convention convention reset"),
        (lambda: Layer(None, True), "given own convention reset"),
        (lambda: Layer(method, True), "given method own convention reset"),
    ):
        calls.clear()
        with torch.device("meta"):
            model = Whole(layer())
        with comm.as_rank(Mesh(1), 0):
            materialize(model, 0, init_fn=lambda module: calls.append("given"))
        assert " ".join(calls) == expected and model.inner[0].weight.tolist() == [1, 1]


def test_boolean_buffers() -> None:
    """Both values are set: GPT-Neo's causal masks. A buffer that nothing sets is refused."""

    class Masked(nn.Module):
        def __init__(self, is_set: bool) -> None:
            super().__init__()
            self.is_set = is_set
            self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())

        def reset_parameters(self) -> None:
            if self.is_set:
                self.mask.copy_(torch.ones(3, 3, dtype=torch.bool).tril())

    with torch.device("meta"):
        modules = [Masked(is_set) for is_set in (True, False)]
    assert torch.equal(materialize(modules[0], 0).mask, Masked(True).mask)
    with pytest.raises(ValueError, match="buffer 'mask'"):
        materialize(modules[1], 0)
