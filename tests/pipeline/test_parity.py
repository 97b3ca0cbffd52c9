"""A pipeline gives the loss and the gradients of one process, whatever the forward does between its layers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import TracingError
from tests.support.pipeline_models import BATCH, HIDDEN, SEQ, VOCAB, Block, Model, batch, check_parity, make


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_any_number_of_stages_and_microbatches(pp: int, microbatches: int, tied: bool) -> None:
    """All pairs of the three without NXD_FULL=1: half of the cases, tied and untied by turns."""
    if not os.environ.get("NXD_FULL") and (pp in (1, 4)) ^ (microbatches in (1, 4)) ^ tied:
        pytest.skip("NXD_FULL=1")
    check_parity(Mesh(pp, pp=pp), make(tied=tied), batch(), microbatches)


@pytest.mark.parametrize("cuts", [["layers.0"], ["embed"], ["layers.3"], ["norm"]])
def test_any_cut(cuts: list[str]) -> None:
    check_parity(Mesh(2, pp=2), make(), batch(), 2, auto_partition=False, pipeline_cuts=cuts)


class Skip(Model):
    """Values of the first two stages are used in the third and the last, and on the way."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        second = self.layers[1](first)
        third = self.layers[2](second) * first.sigmoid()
        return self.layers[3](third + first) + second * x


class WeightOutside(Model):
    """The embedding's weight is read without calling it, in another stage; a position parameter lies on the model."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(SEQ, HIDDEN))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = super().body(x + self.position)
        return x + x @ self.embed.weight.T @ self.embed.weight * 0.01


class ReadAlone(Model):
    """The head's weight is read and the head is never called."""

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return F.cross_entropy(F.linear(self.norm(x), self.head.weight).flatten(0, 1), labels.flatten())


class SharedLayer(Model):
    """One block runs in two stages."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.layers[0], self.layers[1], self.layers[2], self.layers[0], self.layers[3]):
            x = layer(x)
        return x


class TupleOutput(Model):
    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return x.mean(), (super().loss(x, labels), x)


class DictOutput(Model):
    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"hidden": x, "loss": super().loss(x, labels), "nothing": None}


class Masks(Model):
    """A mask built in place, from the inputs and from nothing, used by every layer."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        mask = torch.zeros(SEQ, SEQ, dtype=torch.float64)
        mask[:, 0] = 1.0
        mask.add_(torch.ones(SEQ, SEQ, dtype=torch.float64).tril_())
        keep = (ids != 3).to(mask.dtype)[:, None, :] * mask
        keep[..., 0].clamp_(min=0.5)
        row = keep[0]
        row.mul_(2.0)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask=keep)
        return self.loss(x, labels)


class ChangedInPlace(Model):
    """Activations changed in place: on their way through a stage, through a view, and by assignment."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        result = x + 1.0
        y = self.layers[1](x)
        y[:, 0] = 0.0
        result.add_(y.detach())
        y = self.layers[2](y)
        y[:, 1].add_(result[:, 0])
        result.add_(1.0)
        return self.layers[3](y) + result


class Collected(Model):
    """Layers write into one buffer that is made before them."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.zeros(len(self.layers), *x.shape, dtype=x.dtype)
        half = seen.sum(0) + 0.5
        for index, layer in enumerate(self.layers):
            x = layer(x)
            seen[index] = x
        return x + seen.mean(0) * half


class NoGrad(Model):
    """A region without gradients, around a layer too."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.abs().mean(-1, keepdim=True)
            guide = self.layers[0](x)
        for layer in self.layers:
            x = layer(x) / (1 + scale)
        return x + guide


class Buffers(Model):
    """Buffers used directly; one is changed in place, by the stage that uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, HIDDEN))
        self.register_buffer("count", torch.zeros(()))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        self.count.add_(1)
        return x / self.count.clamp(max=1.0)


class OutOfOrder(Model):
    """Layers are registered in another order than they run in."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.norm = nn.LayerNorm(HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.embed = nn.Embedding(VOCAB, HIDDEN)


class PairBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, pair: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> Any:
        x, more = pair
        return torch.tanh(self.left(x)), {"other": self.right(more["other"]) + x, "count": more["count"] + 1}


class Containers(Model):
    """Layers take and give nested containers; one value in them is an integer tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PairBlock() for _ in range(4))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        pair: Any = (x, {"other": x, "count": torch.zeros((), dtype=torch.int64)})
        for layer in self.layers:
            pair = layer(pair)
        return pair[0] + pair[1]["other"] / pair[1]["count"]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 3  # not the derivative, so that a recorded inside would be seen


class OwnFunction(Model):
    """A custom autograd function between layers."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Double.apply(layer(x)) * 0.5
        return x


class Transposed(Model):
    """Activations cross a cut transposed, and are then viewed as only those strides allow."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x).transpose(0, 1)
            x = y.transpose(0, 1).view(-1, HIDDEN).view(x.shape)
        return x


class CutTransposed(Transposed):
    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.ModuleList(Turn() for _ in range(4))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer, turn in zip(self.layers, self.turns):
            x = turn(layer(x)).transpose(0, 1).view(-1, HIDDEN).view(x.shape)
        return x


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).transpose(0, 1)


class Attributes(Model):
    """`x.T`, iteration over a tensor, a branch on a shape, and a branch on a value that no input decides."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(x.shape[1])
        if steps.max() == SEQ - 1 and x.shape[-1] == HIDDEN:
            x = x + x.mT.mT * steps.double()[:, None]
        rows = [self.layers[0](row) for row in x]
        x = torch.stack(rows)
        for layer in self.layers[1:]:
            x = layer(x)
        return x


class Hooked(Model):
    """A hook on an activation, and hooks on a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.layers[2].register_forward_hook(lambda module, args, output: output * 3)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = super().body(x)
        x.register_hook(lambda grad: grad * 5)
        return x


MODELS: list[Any] = [
    Skip, WeightOutside, ReadAlone, Masks, ChangedInPlace, Collected, NoGrad, Buffers, Containers, OwnFunction,
    Transposed, CutTransposed, Attributes, Hooked,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("pp,microbatches", [pytest.param(1, 2, marks=pytest.mark.full), (2, 1), (4, 4)])
@pytest.mark.parametrize("model_class", MODELS, ids=lambda c: c.__name__)
def test_whatever_lies_between_layers(model_class: Any, pp: int, microbatches: int) -> None:
    model = make(model_class)
    example = {key: value[:2] for key, value in batch().items()}
    if model_class is CutTransposed:
        cuts = [f"turns.{i}" for i in ([], [1], [], [0, 1, 2])[pp - 1]]
        check_with_example(model, example, pp, microbatches, pipeline_cuts=cuts)
    elif model_class in (WeightOutside, ReadAlone):
        check_with_example(model, example, pp, microbatches)
    else:
        block = PairBlock if model_class is Containers else Block
        check_parity(Mesh(pp, pp=pp), model, batch(), microbatches, transformer_layer_cls=block)


@pytest.mark.parametrize(
    "model_class,pp,microbatches",
    [(SharedLayer, 2, 2), (OutOfOrder, 2, 2), pytest.param(OutOfOrder, 4, 4, marks=pytest.mark.slow)],
)
def test_layers_that_run_in_another_order(model_class: Any, pp: int, microbatches: int) -> None:
    """Layers are placed in the order in which they run, with example inputs or those of the first run."""
    model = make(model_class)
    check_with_example(model, {key: value[:2] for key, value in batch().items()}, pp, microbatches)
    check_parity(Mesh(pp, pp=pp), model, batch(), microbatches)


def check_with_example(model: nn.Module, example: dict[str, Any], pp: int, microbatches: int, **options: Any) -> None:
    from neuronx_dist.pipeline import create_partitions

    cuts = options.pop("pipeline_cuts", None) or create_partitions(pp, [f"layers.{i}" for i in range(4)])
    options = {"auto_partition": False, "pipeline_cuts": cuts, "example": example, **options}
    check_parity(Mesh(pp, pp=pp), model, batch(), microbatches, **options)


@pytest.mark.parametrize(
    "model_class,spec",
    [(TupleOutput, (False, (True, False))), (DictOutput, {"loss": True, "hidden": False})],
    ids=["tuple", "dict"],
)
def test_the_loss_among_outputs(model_class: Any, spec: Any) -> None:
    model = make(model_class)
    if model_class is TupleOutput:
        with pytest.raises(ValueError, match="marks 2 outputs"):
            check_parity(Mesh(2, pp=2), model, batch(), 2, (True, (True, False)))
        from tests.support.pipeline_models import reference, train

        losses, _ = train(Mesh(2, pp=2), model, batch(), 2, spec)
        expected, _ = reference(make(Model), batch(), 2)
        assert torch.allclose(losses[1], expected, atol=0, rtol=1e-12)
    else:
        check_parity(Mesh(2, pp=2), model, batch(), 2, spec)


def test_frozen_parameters_get_no_gradient_and_send_none() -> None:
    model = make()
    for part in (model.embed, model.layers[0], model.layers[2]):
        part.requires_grad_(False)
    check_parity(Mesh(4, pp=4), model, batch(), 4)


def test_tied_weights_with_data_parallel() -> None:
    """Rows are dealt to data-parallel ranks: the mean over them is the loss of all."""
    from tests.support.pipeline_models import error, on_ranks, reference

    model, mesh, inputs = make(tied=True), Mesh(4, pp=2), batch()
    loss, grads = reference(model, inputs)

    def use(pipeline: Any) -> Any:
        from neuronx_dist import comm

        rank = comm.rank("dp")
        mean = pipeline.run_train(**{k: v.chunk(2)[rank] for k, v in inputs.items()})
        return mean, {n: p.grad for n, p in pipeline.local_named_parameters()}

    results = on_ranks(
        mesh, model, use, num_microbatches=2, output_loss_value_spec=True, broadcast_and_average_loss=True
    )
    for mean, local in results:
        assert error(mean, loss) < 1e-10
        for name, grad in local.items():
            assert error(grad, grads[name]) < 1e-10


class ViewOverCut(Model):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x) + 1.0
        view = first[:, 0]
        y = self.layers[2](self.layers[1](x))
        view.add_(y[:, 0])
        return self.layers[3](y + first)


def test_memory_shared_over_a_cut_and_changed_in_place_is_refused() -> None:
    with pytest.raises(TracingError, match=r"test_parity.py:\d+: .* share memory, both are sent to pipeline stage 1"):
        check_parity(Mesh(2, pp=2), make(ViewOverCut), batch(), 2)


class StaleBuffer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(()))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x + self.count)
        for layer in self.layers[1:]:
            x = layer(x)
        self.count.add_(1)
        return x


def test_a_buffer_read_by_one_stage_and_changed_by_another_is_refused() -> None:
    with pytest.raises(TracingError, match=r"count is modified on pipeline stage 1 and used on stages \[0, 1\]"):
        check_parity(Mesh(2, pp=2), make(StaleBuffer), batch(), 2)


def test_batch_is_untouched_by_a_model_that_changes_its_inputs() -> None:
    class Editing(Model):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            labels[:, 0] = 1
            return super().forward(ids, labels)

    inputs = batch()
    before = inputs["labels"].clone()
    from tests.support.pipeline_models import on_ranks

    on_ranks(
        Mesh(2, pp=2), make(Editing), lambda pipeline: pipeline.run_train(**inputs), output_loss_value_spec=True,
        num_microbatches=2,
    )  # fmt: skip
    assert torch.equal(inputs["labels"], before)
    check_parity(Mesh(2, pp=2), make(Editing), inputs, 2)


def test_inputs_that_are_not_cut() -> None:
    """0-dim tensors, numbers, None; and a leaf in a container is cut like any other."""

    class Many(Model):
        def forward(self, ids: Any, labels: Any, scale: Any, power: int, nothing: Any, more: Any) -> Any:
            assert nothing is None
            loss = super().forward(ids, labels)
            return loss * scale + (more["weights"] ** power).mean()

    more = {"weights": torch.linspace(0, 1, BATCH, dtype=torch.float64)}
    inputs = {**batch(), "scale": torch.tensor(0.5, dtype=torch.float64), "power": 2, "nothing": None}
    from tests.support.pipeline_models import error, reference, train

    full, _ = reference(make(Many), {**inputs, "more": more})
    losses, _ = train(Mesh(2, pp=2), make(Many), {**inputs, "more": more}, 4)
    assert error(losses[1], full) < 1e-10
