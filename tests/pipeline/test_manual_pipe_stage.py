"""Models as a list of layers: `manual_pp_partition`, its functions, shared weights, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import NxDPPModel, PipelineStageModule
from neuronx_dist.pipeline.manual_pipe_stage import LayerList
from tests.support.pipeline_models import BATCH, HIDDEN, SEQ, VOCAB, Block, batch, error, on_ranks

pytestmark = pytest.mark.slow  # together more than the fast tier has room for

PP2 = Mesh(2, pp=2)


class Paired(Block):
    """Takes and returns a list: activations, and what was embedded, which skips over all layers."""

    def forward(self, x: list[torch.Tensor]) -> list[torch.Tensor]:  # type: ignore[override]
        return [super().forward(x[0]), x[1]]


class Embedding(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> Any:
        x = super().forward(ids)
        return [x, 2 * x]


class Join(nn.Module):
    def forward(self, x: list[torch.Tensor]) -> torch.Tensor:
        return x[0] + x[1].tanh()


def layers(blocks: int = 4, lists: bool = False, tied: bool = False) -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        embedding = (Embedding if lists else nn.Embedding)(VOCAB, HIDDEN)
        middle = [(Paired if lists else Block)() for _ in range(blocks)]
        join: list[nn.Module] = [Join()] if lists else []
        result = [embedding, *middle, *join, nn.Linear(HIDDEN, VOCAB, bias=False)]
    if tied:
        PipelineStageModule.mark_weight_sharing([(result[0], "weight"), (result[-1], "weight")], "embedding")
    return [layer.double() for layer in result]


def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def expected(model: Sequence[nn.Module], microbatches: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients, in one process and a plain loop."""
    whole = nn.ModuleList(copy.deepcopy(list(model)))
    losses = []
    for ids, labels in zip(batch()["ids"].chunk(microbatches), batch()["labels"].chunk(microbatches)):
        x: Any = ids
        for layer in whole:
            x = layer(x)
        losses.append(loss_fn(x, labels))
    torch.stack(losses).mean().backward()
    named = whole.named_parameters(remove_duplicate=False)
    return torch.stack(losses).mean().detach(), {f"layers.{n}": p.grad for n, p in named}  # type: ignore[misc]


def run(model: list[nn.Module], mesh: Mesh, **options: Any) -> list[dict[str, torch.Tensor]]:
    """Compares with one process; local gradients by stage."""

    def use(pipeline: NxDPPModel) -> Any:
        pipeline.register_shared_weights()
        loss = pipeline.run_train(inputs=batch()["ids"], labels=batch()["labels"])
        return loss, {n: p.grad for n, p in pipeline.local_named_parameters()}

    options = {
        "manual_pp_partition": True, "manual_pp_loss_fn": loss_fn, "num_microbatches": 4, "transformer_layer_cls": None,
        "auto_partition": False, "broadcast_and_average_loss": True, **options,
    }  # fmt: skip
    results = on_ranks(mesh, model, use, **options)
    loss, grads = expected(model, options["num_microbatches"])
    assert all(error(found, loss) < 1e-10 for found, _ in results)
    for _, local in results:
        assert all(error(grad, grads[name]) < 1e-10 for name, grad in local.items())
    assert set().union(*(local for _, local in results)) >= {n for n, p in LayerList(model).named_parameters()}
    return [local for _, local in results]


def layers_of(grads: dict[str, torch.Tensor]) -> set[int]:
    return {int(name.split(".")[1]) for name in grads}


@pytest.mark.each_pair
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_list_of_layers_trains_as_one_process(pp: int, lists: bool, tied: bool) -> None:
    run(layers(lists=lists, tied=tied), Mesh(pp, pp=pp))


@pytest.mark.parametrize(
    "options",
    [{"schedule": "gpipe"}, {"virtual_pipeline_size": 2}, {"schedule": "zb_h1"}, {"schedule": "zb_v"}],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True])
def test_every_schedule(options: dict[str, Any], tied: bool) -> None:
    run(layers(tied=tied), PP2, **options)


def test_the_remainder_is_on_the_last_stages() -> None:
    stages = [layers_of(grads) for grads in run(layers(blocks=5), Mesh(4, pp=4))]
    assert stages == [{0}, {1, 2}, {3, 4}, {5, 6}]
    whole = layers(blocks=5)
    alone = [PipelineStageModule(whole, 4, stage) for stage in range(4)]
    assert [[whole.index(layer) for layer in run.stage_modules] for run in alone] == [[0], [1, 2], [3, 4], [5, 6]]
    x: Any = batch()["ids"]
    for single in alone:
        x = single(x)
    assert error(loss_fn(x.detach(), batch()["labels"]), expected(whole, 1)[0]) < 1e-10


def test_the_users_division() -> None:
    def one_first(layers: Sequence[nn.Module], num_stages: int) -> dict[nn.Module, int]:
        return {layer: min(number, num_stages - 1) for number, layer in enumerate(layers)}

    stages = run(layers(), PP2, manual_pp_stage_partition_fn=one_first)
    assert [layers_of(grads) for grads in stages] == [{0}, {1, 2, 3, 4, 5}]
    chunks = run(layers(), PP2, manual_pp_stage_partition_fn=one_first, virtual_pipeline_size=2)
    assert [layers_of(grads) for grads in chunks] == [{0, 2}, {1, 3, 4, 5}]
    whole = layers()
    assert list(PipelineStageModule(whole, 2, 0, one_first).stage_modules) == whole[:1]


def test_evaluation_gives_loss_and_output() -> None:
    model = layers()

    def use(pipeline: NxDPPModel) -> Any:
        return pipeline.run_eval(return_outputs=True, inputs=batch()["ids"], labels=batch()["labels"])

    options = {"manual_pp_partition": True, "auto_partition": False, "transformer_layer_cls": None}
    (_, none), (loss, outputs) = on_ranks(PP2, model, use, manual_pp_loss_fn=loss_fn, num_microbatches=2, **options)
    assert none is None and error(loss, expected(model, 2)[0]) < 1e-10
    assert [list(output.shape) for _, output in outputs] == [[BATCH // 2, SEQ, VOCAB]] * 2
    values = [loss_fn(output, labels) for (_, output), labels in zip(outputs, batch()["labels"].chunk(2))]
    assert all(error(value, of_microbatch) < 1e-10 for value, (of_microbatch, _) in zip(values, outputs))
    assert error(torch.stack(values).mean(), loss) < 1e-10
    # Without a loss function the last layer's output is what evaluation returns.
    only = on_ranks(PP2, model, lambda p: p.run_eval(inputs=batch()["ids"]), num_microbatches=2, **options)
    assert only[0] is None and all(torch.equal(a, b) for a, (_, b) in zip(only[1], outputs))


def test_a_loss_function_that_is_a_module() -> None:
    class Head(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).transpose(1, 2)

    model = [*layers()[:-1], Head(HIDDEN, VOCAB).double()]

    def use(pipeline: NxDPPModel) -> Any:
        return pipeline.run_train(inputs=batch()["ids"], labels=batch()["labels"])

    options = {"manual_pp_partition": True, "auto_partition": False, "transformer_layer_cls": None}
    for smoothing in (0.0, 0.3):
        loss = on_ranks(PP2, model, use, manual_pp_loss_fn=nn.CrossEntropyLoss(label_smoothing=smoothing), **options)[1]
        x: Any = batch()["ids"]
        for layer in model:
            x = layer(x)
        assert error(loss, F.cross_entropy(x.detach(), batch()["labels"], label_smoothing=smoothing)) < 1e-10


class InSequence(nn.Linear):
    """Takes a tensor or a sequence, and returns a sequence, as the layers of NxD's tests of manual pipelines do."""

    sequence: type = list

    def forward(self, x: Any) -> Any:
        return self.sequence([super().forward(x[0] if isinstance(x, (list, tuple)) else x)])


class InTuple(InSequence):
    sequence = tuple


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("layer_class", [InSequence, InTuple])
@pytest.mark.parametrize("in_list", [False, True])
def test_the_loss_gets_the_first_entry_of_a_sequence(pp: int, layer_class: type[InSequence], in_list: bool) -> None:
    """So does NxD, of the last layer's output and of the labels."""
    torch.manual_seed(0)
    model = [layer_class(HIDDEN, HIDDEN).double() for _ in range(4)]
    x, y = torch.randn(BATCH, HIDDEN, dtype=torch.double), torch.arange(BATCH) % HIDDEN

    def use(pipeline: NxDPPModel) -> Any:
        loss = pipeline.run_train(inputs=[x] if in_list else x, labels=[y, x] if in_list else y)
        return loss, {name: param.grad for name, param in pipeline.local_named_parameters()}

    options = {"manual_pp_partition": True, "auto_partition": False, "transformer_layer_cls": None}
    options |= {"num_microbatches": 2, "broadcast_and_average_loss": True, "manual_pp_loss_fn": nn.CrossEntropyLoss()}
    results = on_ranks(Mesh(pp, pp=pp), model, use, **options)  # type: ignore[arg-type]
    whole = nn.Sequential(*copy.deepcopy(model))
    loss = F.cross_entropy(whole(x)[0], y)
    loss.backward()
    assert all(error(value, loss.detach()) < 1e-10 for value, _ in results)
    grads = {name: grad for _, local in results for name, grad in local.items()}
    assert len(grads) == 8
    assert all(error(grads[f"layers.{name}"], param.grad) < 1e-10 for name, param in whole.named_parameters())


def test_sharing_makes_one_parameter() -> None:
    first, second = nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 3))
    PipelineStageModule.mark_weight_sharing([(first, "weight"), (second, "0.weight")])
    assert second[0].weight is first.weight and second[0].bias is not first.bias
    with pytest.raises(
        ValueError, match=r"weight of Linear has shape \[2, 3\], but the first weight, 0.weight, has \[3, 2\]"
    ):
        PipelineStageModule.mark_weight_sharing([(second, "0.weight"), (nn.Linear(3, 2), "weight")], "b")
    with pytest.raises(ValueError, match="Sequential has no parameter 'weight'; its parameters are 0.weight, 0.bias"):
        PipelineStageModule.mark_weight_sharing([(first, "weight"), (second, "weight")])
    with pytest.raises(ValueError, match="expected at least two"):
        PipelineStageModule.mark_weight_sharing([(first, "weight")])


def by(stages: Any) -> dict[str, Any]:
    return {"manual_pp_stage_partition_fn": lambda layers, num_stages: stages(layers)}


@pytest.mark.parametrize(
    "module,options,message",
    [
        (nn.Linear(1, 1), {}, r"manual_pp_partition: module is a list of layers \(modules\), got Linear"),
        ([nn.Linear(1, 1), 3], {}, "module is a list of layers"),
        ([], {}, "at least one layer, without repetition; got 0"),
        ([nn.Linear(1, 1)], {}, "2 stages .* need at least as many layers, got 1"),
        ([nn.Linear(1, 1)] * 2, {}, "got 2, of which 1 are distinct. To tie .*mark_weight_sharing"),
        (layers(), {"auto_partition": True}, "auto_partition does not go with manual_pp_partition: .*partition_fn"),
        (layers(), {"pipeline_cuts": ["layers.0"]}, "pipeline_cuts does not go with manual_pp_partition"),
        (layers(), by(lambda layers: {layers[0]: 0}), r"returned no stage of layer 1 \(Block\); .* of the 6 layers"),
        (layers(), by(lambda layers: [0] * 6), r"returned no dict, but \[0, 0.*; it must return {layer: stage}"),
        (layers(), by(lambda layers: {i: i // 3 for i in range(6)}), r"are not the layers: 0 \(int\); .* as a key"),
        (layers(), by(lambda layers: dict.fromkeys(layers, 0)), "returned no layer for stage 1"),
        (layers(), by(lambda layers: {x: i for i, x in enumerate(layers)}), "stage 2 for layer 2, .* none of 0 to 1"),
        (layers(), by(lambda layers: {x: i % 2 for i, x in enumerate(layers)}), "descend, from 1 to 0 at layer 2"),
        (layers(), {"manual_pp_stage_partition_fn": 3}, "manual_pp_stage_partition_fn must be a function, got 3"),
        (layers(), {"manual_pp_loss_fn": 3}, "manual_pp_loss_fn must be a function, got 3"),
        (layers(), {"manual_pp_partition": False}, "module is a list, and belongs to manual_pp_partition=True"),
        (nn.Linear(1, 1), {"manual_pp_partition": False, "manual_pp_loss_fn": loss_fn}, "^manual_pp_loss_fn bel"),
        (nn.Linear(1, 1), {"manual_pp_partition": False, "manual_pp_stage_partition_fn": max}, "^manual_pp_stage_part"),
    ],
)  # fmt: skip
def test_what_does_not_go(module: Any, options: dict[str, Any], message: str) -> None:
    with comm.as_rank(PP2, 0), pytest.raises(ValueError, match=message):
        NxDPPModel(module, **{"manual_pp_partition": True, **options})


def test_labels_are_asked_for() -> None:
    with comm.as_rank(Mesh(1), 0), pytest.raises(ValueError, match="manual_pp_loss_fn, .*, needs labels: pass labels="):
        NxDPPModel(layers(), manual_pp_partition=True, manual_pp_loss_fn=loss_fn).run_train(inputs=batch()["ids"])


def test_the_stage_index_is_checked() -> None:
    with pytest.raises(ValueError, match="stage_index=2 is none of 2 stages"):
        PipelineStageModule(layers(), 2, 2)
