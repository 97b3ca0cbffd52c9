"""Placement blocks no model that can run: layers without parameters, or called in another order than registered."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import NxDPPModel
from neuronx_dist.pipeline import model as pipeline_model
from neuronx_dist.program.recorder import record
from tests.support.pipeline_models import (
    HIDDEN,
    SEQ,
    VOCAB,
    Block,
    Model,
    batch,
    check_parity,
    error,
    make,
    on_ranks,
    reference,
)

pytestmark = pytest.mark.slow  # together more than the fast tier has room for

OPTIONS: dict[str, Any] = {"num_microbatches": 2, "output_loss_value_spec": True}


class HeadFirst(Model):
    """Registered the other way round: head, norm, layers from the last to the first, embedding."""

    def __init__(self, layers: int = 4, tied: bool = False) -> None:
        super().__init__(layers, tied)
        modules = dict(self._modules)
        self._modules.clear()
        for name in ("head", "norm", "layers", "embed"):
            self._modules[name] = modules[name]

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class NormFirst(Model):
    """A model whose last norm is registered before the layers, as in OPT."""

    def __init__(self, layers: int = 4, tied: bool = False) -> None:
        super().__init__(layers, tied)
        layers_, head = self._modules.pop("layers"), self._modules.pop("head")
        self._modules.update(layers=layers_, head=head)


def trained(pipeline: NxDPPModel, steps: int = 3) -> Any:
    """Losses, and the weights of this stage after some steps."""
    optimizer = torch.optim.SGD(pipeline.local_parameters(), lr=0.1)
    losses = []
    for seed in range(steps):
        optimizer.zero_grad()
        losses.append(pipeline.run_train(**batch(seed=seed)))
        optimizer.step()
    return losses, {name: param.detach() for name, param in pipeline.local_named_parameters()}


def check_training(mesh: Mesh, model: nn.Module, ranks: list[Any], steps: int = 3) -> None:
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    losses = []
    for seed in range(steps):
        optimizer.zero_grad()
        losses.append(alone(**batch(seed=seed)))
        losses[-1].backward()
        optimizer.step()
    expected = {name: p.detach() for name, p in alone.named_parameters(remove_duplicate=False)}
    assert all(error(a, b.detach()) < 1e-10 for a, b in zip(ranks[-1][0], losses, strict=True))
    found = {name for _, local in ranks for name in local}
    assert {name for name, _ in alone.named_parameters()} <= found
    for _, local in ranks:
        assert all(error(value, expected[name]) < 1e-10 for name, value in local.items())


@pytest.mark.each_pair
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_class", [HeadFirst, NormFirst])
@pytest.mark.parametrize("pp", [2, 4])
def test_trace_after_the_constructor_places_by_the_order_of_calls(
    pp: int, model_class: type[Model], tied: bool
) -> None:
    """Then an optimizer gets the parameters that the stage trains."""
    model = make(model_class, tied=tied)

    def use(pipeline: NxDPPModel) -> Any:
        pipeline.trace(kwargs=batch(rows=2))
        assert "norm.weight" in dict(pipeline.local_named_parameters()) or not pipeline.is_last_stage()
        return trained(pipeline)

    check_training(Mesh(pp, pp=pp), model, on_ranks(Mesh(pp, pp=pp), model, use, **OPTIONS))


@pytest.mark.each_value
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pp", [2, 4])
def test_the_first_run_places_if_nobody_asked_for_parameters_before(pp: int, tied: bool) -> None:
    check_parity(Mesh(pp, pp=pp), make(HeadFirst, tied=tied), batch(), 2)

    def use(pipeline: NxDPPModel) -> Any:
        return pipeline.run_eval(**batch()), *trained(pipeline)

    model = make(NormFirst, tied=tied)
    results = on_ranks(Mesh(pp, pp=pp), model, use, **OPTIONS)
    assert error(results[-1][0], reference(model, batch())[0]) < 1e-10
    check_training(Mesh(pp, pp=pp), model, [result[1:] for result in results])


@pytest.mark.each_value
@pytest.mark.parametrize("model_class", [HeadFirst, NormFirst])
@pytest.mark.parametrize("pp,options", [(2, {}), (4, {}), (2, {"virtual_pipeline_size": 2}), (2, {"tied": True})])
def test_with_input_names_the_constructor_places_by_the_order_of_calls(
    pp: int, options: dict[str, Any], model_class: type[Model]
) -> None:
    """NxD's script: names of inputs, an optimizer, training; its constructor traces the model too."""
    model = make(model_class, tied="tied" in options)
    options = {**OPTIONS, **options, "input_names": ["ids", "labels"]}
    options.pop("tied", None)
    check_training(Mesh(pp, pp=pp), model, on_ranks(Mesh(pp, pp=pp), model, trained, **options))


class Projected(Model):
    """Takes floating-point features: a projection comes first."""

    def __init__(self) -> None:
        super().__init__()
        modules = dict(self._modules)
        self._modules.clear()
        self.project = nn.Linear(3, HIDDEN)
        self._modules.update({name: modules[name] for name in ("layers", "norm", "head")})

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        return self.loss(self.body(self.project(features)), labels)


def test_a_model_that_takes_no_ids_is_placed_by_registration() -> None:
    """The constructor's inputs do not fit it, and nothing of that is seen."""
    model, inputs = make(Projected), batch()
    inputs = {"features": torch.randn(*inputs.pop("ids").shape, 3, dtype=torch.double), **inputs}

    def use(pipeline: NxDPPModel) -> Any:
        names = {name.split(".")[0] for name, _ in pipeline.local_named_parameters()}
        return names, pipeline.run_train(**inputs)

    (first, _), (last, loss) = on_ranks(Mesh(2, pp=2), model, use, input_names=["features", "labels"], **OPTIONS)
    assert first == {"project", "layers"} and last == {"layers", "norm", "head"}
    assert error(loss, reference(model, inputs, 2)[0]) < 1e-10


@pytest.mark.parametrize("model_class,count", [(Model, 0), (NormFirst, 1)])
def test_only_a_doubtful_order_is_recorded_by_the_constructor(
    model_class: type[Model], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = []
    monkeypatch.setattr(pipeline_model, "record", lambda *args: recorded.append(args) or record(*args))
    with comm.as_rank(Mesh(2, pp=2), 0):
        NxDPPModel(make(model_class), Block, auto_partition=True, input_names=["ids", "labels"], **OPTIONS)
    assert len(recorded) == count


USES = [
    lambda pipeline: [*pipeline.local_parameters()],
    lambda pipeline: [*pipeline.parameters()],
    lambda pipeline: pipeline.local_named_parameters(),
    lambda pipeline: pipeline.local_state_dict(),
    lambda pipeline: pipeline.load_state_dict(pipeline.original_module.state_dict(), strict=False),
    lambda pipeline: pipeline.to(torch.float64),
    lambda pipeline: [*pipeline.local_buffers()],
    lambda pipeline: [*pipeline.buffers()],
    lambda pipeline: [*pipeline.local_modules()],
    lambda pipeline: [*pipeline.local_children()],
]


@pytest.mark.parametrize("use", USES)
def test_after_that_placement_is_settled_and_the_error_names_what_works(use: Any) -> None:
    """An optimizer may hold the parameters by then, and would not get those that come."""
    where = r"norm \(.*pipeline_models.py:\d+\) is used by pipeline stage 1, but its parameters are on stage 0"
    misplaced = where + r".* call trace\(kwargs=\{\.\.\.example inputs\.\.\.\}\) right after NxDPPModel\(\)\.$"

    def rank(pipeline: NxDPPModel) -> None:
        use(pipeline)
        with pytest.raises(ValueError, match=misplaced):
            pipeline.run_train(**batch())
        with pytest.raises(RuntimeError, match=r"trace: the model has been partitioned, at cuts \['layers.1'\]"):
            pipeline.trace(kwargs=batch())

    on_ranks(Mesh(2, pp=2), make(NormFirst), rank, **OPTIONS)


def test_what_other_stages_hold_is_kept_until_placement_is_settled() -> None:
    """And freed then."""

    def use(pipeline: NxDPPModel) -> Any:
        tensors = [tensor for _, _, tensor in pipeline._put_away]
        there = len(tensors)
        pipeline.trace(kwargs=batch())
        again = len(pipeline._put_away)
        pipeline.close_placement()
        return there, again, len(pipeline._put_away)

    parameters = len([*make().parameters()])
    ranks = on_ranks(Mesh(2, pp=2), make(), use, **OPTIONS)
    assert sum(there for there, _, _ in ranks) == parameters
    assert all(there == again and left == 0 for there, again, left in ranks)


def test_delayed_initialisation_of_what_comes_to_a_stage() -> None:
    """On meta there is nothing to move: what comes is initialised, what was initialised and goes is dropped."""

    def initialise(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 0.01 * param.numel())

    def use(pipeline: NxDPPModel) -> Any:
        pipeline.trace(kwargs=batch())
        return trained(pipeline)

    model = make(NormFirst)
    for module in model.modules():
        if module._parameters:
            initialise(module)
    ranks = on_ranks(Mesh(2, pp=2), copy.deepcopy(model).to("meta"), use, param_init_fn=initialise, **OPTIONS)
    check_training(Mesh(2, pp=2), model, ranks)


# --- modules without parameters, and with parts -----------------------------------------------------------------------


class Dropping(Model):
    """Layers without parameters, registered at the end, called everywhere."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.drop = nn.Dropout(rate)
        self.act = nn.Tanh()

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.act(layer(self.drop(x)))
        return self.drop(x)


@pytest.mark.each_value
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("pp", [2, 4])
def test_layers_without_parameters_belong_to_whoever_calls_them(pp: int, traced: bool) -> None:
    """To several stages too; drawing random numbers or not."""
    model = make(Dropping)
    check_parity(Mesh(pp, pp=pp), model, batch(), 2)

    def use(pipeline: NxDPPModel) -> Any:
        if traced:
            pipeline.trace(kwargs=batch())
        optimizer = torch.optim.SGD(pipeline.local_parameters(), lr=0.1)
        loss = pipeline.run_train(**batch())
        optimizer.step()
        return loss

    losses = on_ranks(Mesh(pp, pp=pp), make(Dropping, rate=0.5), use, **OPTIONS)
    assert (
        torch.isfinite(losses[-1]) and error(losses[-1], reference(model, batch())[0]) > 1e-8
    )  # parity is below 1e-10


class Between(nn.Module):
    """A stage between has an activation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.act = nn.Tanh()
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return F.cross_entropy(self.head(self.act(self.embed(ids))).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("traced", [False, True])
def test_a_stage_without_parameters_is_one_if_calls_go_through_it(traced: bool) -> None:
    """The last here has only the loss."""
    model, options = make(Between), {**OPTIONS, "transformer_layer_cls": None, "auto_partition": False}
    for cuts in (["embed", "act"], ["embed", "act", "head"]):
        mesh = Mesh(len(cuts) + 1, pp=len(cuts) + 1)

        def use(pipeline: NxDPPModel) -> Any:
            if traced:
                pipeline.trace(kwargs=batch())
            assert bool([*pipeline.local_parameters()]) is (pipeline.stage in (0, 2))
            loss = pipeline.run_train(**batch())
            return loss, {name: param.grad for name, param in pipeline.local_named_parameters()}

        loss, grads = reference(model, batch(), 2)
        ranks = on_ranks(mesh, model, use, **options, pipeline_cuts=cuts)
        assert error(ranks[-1][0], loss) < 1e-10
        for _, local in ranks:
            assert all(error(grad, grads[name]) < 1e-10 for name, grad in local.items() if name in grads)
        assert {name for _, local in ranks for name in local} >= grads.keys()


class LooksOnly(Between):
    """Between the two layers nothing is computed: a parameter's dtype is looked at, and a mask made of the inputs."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embed(ids)
        mask = self.act((ids != 0).to(self.head.weight.dtype))
        return F.cross_entropy((self.head(x) * mask[..., None]).flatten(0, 1), labels.flatten())


def test_a_stage_through_which_no_call_goes_is_refused() -> None:
    """Values of inputs alone may be computed anywhere and are no work; nor is a parameter that is only inspected."""
    options = {**OPTIONS, "transformer_layer_cls": None, "auto_partition": False, "pipeline_cuts": ["embed", "act"]}
    nothing = r"pipeline stage 1 of 3 is empty: .* between cuts 'embed' and 'act'"
    for use in (lambda p: p.trace(kwargs=batch()), lambda p: p.run_train(**batch())):
        with pytest.raises(ValueError, match=nothing):
            on_ranks(Mesh(3, pp=3), make(LooksOnly), use, **options)


class Attending(Model):
    """torch's attention between the layers: it has a parameter of its own, and a child that it does not call."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)
        self.last = last

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(super().body(x)) if self.last else super().body(self.attend(x))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


@pytest.mark.each_value
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("pp", [2, 4])
def test_multihead_attention_of_torch_is_one_call(pp: int, last: bool) -> None:
    model = make(Attending, last=last)
    check_parity(Mesh(pp, pp=pp), model, batch(), 2)

    def use(pipeline: NxDPPModel) -> Any:
        pipeline.trace(kwargs=batch())
        return trained(pipeline)

    check_training(Mesh(pp, pp=pp), model, on_ranks(Mesh(pp, pp=pp), model, use, **OPTIONS))


def test_a_parameter_of_a_container_is_where_the_container_begins() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(HIDDEN))
            self.norm = nn.LayerNorm(HIDDEN)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * self.scale

    class Ended(Model):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Scaled()

    ranks = on_ranks(Mesh(2, pp=2), make(Ended), trained, **OPTIONS)
    assert "norm.scale" in ranks[1][1] and "norm.scale" not in ranks[0][1]
    check_training(Mesh(2, pp=2), make(Ended), ranks)


def test_the_advice_names_leaf_module_cls_where_it_helps() -> None:
    """A cut through a module that reads its children's weights."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(HIDDEN, HIDDEN)
            self.norm = nn.LayerNorm(HIDDEN)
            self.down = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x @ (self.up.weight @ self.down.weight))

    class Fusing(Model):
        def __init__(self) -> None:
            super().__init__()
            self.fused = Fused()

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return self.fused(super().body(x))

    options = {**OPTIONS, "auto_partition": False}
    advice = r"fused.down.weight .* stage 0, but .* on stage 1, .* or list 'Fused' in leaf_module_cls, so that fused is"
    with pytest.raises(ValueError, match=advice):
        on_ranks(Mesh(2, pp=2), make(Fusing), trained, **options, pipeline_cuts=["fused.norm"])
    cut_around: Any = {**options, "leaf_module_cls": ["Fused"], "pipeline_cuts": ["layers.3"]}
    check_training(Mesh(2, pp=2), make(Fusing), on_ranks(Mesh(2, pp=2), make(Fusing), trained, **cut_around))


def test_a_weight_is_read_by_its_other_name() -> None:
    """The head's weight is the embedding's: what is looked up on the last stage is what that stage holds."""

    class Reading(Model):
        def loss(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return F.cross_entropy(F.linear(self.norm(x), self.head.weight).flatten(0, 1), labels.flatten())

    model = make(Reading, tied=True)
    check_training(Mesh(2, pp=2), model, on_ranks(Mesh(2, pp=2), model, trained, **OPTIONS))


def test_example_inputs_of_any_batch_size_and_without_labels() -> None:
    class Optional(NormFirst):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            x = self.body(self.embed(ids))
            return x if labels is None else self.loss(x, labels)

    def use(pipeline: NxDPPModel) -> Any:
        pipeline.trace(args=[torch.zeros(1, SEQ, dtype=torch.long)])
        return trained(pipeline)

    # The norm and the head are not called without labels: they are where registration has them.
    with pytest.raises(ValueError, match="norm .* is used by pipeline stage 1, but its parameters are on stage 0"):
        on_ranks(Mesh(2, pp=2), make(Optional), use, **OPTIONS, input_names=["ids", "labels"])


def test_at_one_stage_there_is_nothing_to_settle() -> None:
    """And parameters are where they are."""
    with comm.as_rank(Mesh(1), 0):
        pipeline = NxDPPModel(make(HeadFirst), transformer_layer_cls=Block, output_loss_value_spec=True)
        assert [*pipeline.local_parameters()]
        pipeline.trace(kwargs=batch(), leaf_modules=["Block"])
        assert error(pipeline.run_train(**batch()), reference(make(HeadFirst), batch())[0]) < 1e-10
