"""`NxDPPModel`: its arguments, what is local, evaluation, tied weights, meta, state dicts, and its errors."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import NxDPPModel
from tests.pipeline.test_parity import DictOutput
from tests.support import pipeline_models
from tests.support.paths import file_name
from tests.support.pipeline_models import Block, Model, batch, cut, error, make, on_ranks, reference, train

SEED_GUIDE = [
    "module", "transformer_layer_cls", "num_microbatches", "virtual_pipeline_size", "output_loss_value_spec",
    "return_mb_loss", "broadcast_and_average_loss", "pipeline_cuts", "input_names", "leaf_module_cls",
    "autowrap_functions", "autowrap_modules", "tracer_cls", "param_init_fn", "trace_file_path", "use_zero1_optimizer",
    "auto_partition", "deallocate_pipeline_outputs",
]  # fmt: skip
PP2 = Mesh(2, pp=2)


def test_the_arguments_of_the_guide_in_its_order() -> None:
    parameters = list(inspect.signature(NxDPPModel.__init__).parameters.values())[1:]
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == SEED_GUIDE
    assert neuronx_dist.NxDPPModel is NxDPPModel


def alone(**options: Any) -> NxDPPModel:
    with comm.as_rank(Mesh(1), 0):
        return NxDPPModel(make(), **{"transformer_layer_cls": Block, **options})


@pytest.mark.parametrize(
    "inputs,message",
    [
        ({"ids": 0}, r"missing \['labels'\], unexpected none"),
        ({"ids": 0, "labels": 0, "mask": 0}, r"missing none, unexpected \['mask'\]"),
        ({"ids": torch.zeros(7, 2), "labels": None}, r"\['ids'\] has 7 rows, .* 4 microbatches: nearest are 4 and 8"),
        ({"ids": torch.zeros(1, 2), "labels": None}, r"\['ids'\] has 1 rows, .* 4 microbatches: nearest is 4$"),
        (
            {"ids": torch.zeros(4, 2), "labels": [torch.zeros(0, 2)]},
            r"input \['labels'\]\[0\] has shape \[0, 2\], no rows, .* at least one row for each of 4 microbatches",
        ),
    ],
)
def test_wrong_inputs(inputs: dict[str, Any], message: str) -> None:
    model = alone(input_names=["ids", "labels"], num_microbatches=4, output_loss_value_spec=True)
    with comm.as_rank(Mesh(1), 0), pytest.raises(ValueError, match=message):
        model.run_train(**inputs)


def test_what_it_is_not_ready_for() -> None:
    with pytest.raises(RuntimeError, match=r"use run_train\(\*\*inputs\) or run_eval"):
        alone()(**batch())
    with pytest.raises(RuntimeError, match="pass output_loss_value_spec"):
        alone().run_train(**batch())
    with comm.as_rank(PP2, 0):
        model = NxDPPModel(make(), output_loss_value_spec=True)
        with pytest.raises(RuntimeError, match="not partitioned: pass pipeline_cuts .* cut_pipeline_stage 1 times"):
            model.run_train(**batch())
        with pytest.raises(RuntimeError, match="not partitioned"):
            list(model.local_parameters())
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            _ = model.nonsense


def test_backward_of_a_reported_loss_is_refused_and_the_loss_is_else_a_tensor() -> None:
    with comm.as_rank(Mesh(1), 0):
        model = alone(output_loss_value_spec=True)
        loss = model.run_train(**batch())
        losses = alone(output_loss_value_spec=True, return_mb_loss=True, num_microbatches=2).run_train(**batch())
    assert type(loss) is torch.Tensor and isinstance(losses, list) and len(losses) == 2
    for reported in (loss, *losses):
        with pytest.raises(RuntimeError, match=r"run_train has done .* leave out loss.backward\(\)"):
            reported.backward()
        file = io.BytesIO()
        torch.save(reported, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert torch.equal(loaded, reported) and not vars(loaded)
        assert torch.equal(copy.deepcopy(reported), reported) and f"{reported:.3f}" == f"{reported.item():.3f}"


def test_a_pipeline_model_does_not_generate() -> None:
    model = make()
    model.generate = lambda ids: ids  # type: ignore[assignment]
    with comm.as_rank(Mesh(1), 0):
        pipeline = NxDPPModel(model)
    with pytest.raises(AttributeError, match="a pipeline model does not generate: run_eval"):
        pipeline.generate(None)


def test_without_a_mesh_it_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        NxDPPModel(make())


def test_local_names_are_those_of_the_model() -> None:
    model = make(tied=True)

    def use(pipeline: NxDPPModel) -> Any:
        assert pipeline.norm is pipeline.original_module.norm  # attributes fall through
        assert [n for n, _ in pipeline.named_parameters()] == [n for n, _ in model.named_parameters()]
        assert len(list(pipeline.parameters())) == len(list(model.parameters()))
        assert [id(p) for p in pipeline.local_parameters()] == [id(p) for _, p in pipeline.local_named_parameters()]
        return {
            "parameters": [n for n, _ in pipeline.local_named_parameters()],
            "modules": [n for n, _ in pipeline.local_named_modules() if n.count(".") < 2],
            "children": [n for n, _ in pipeline.local_named_children()],
            "state": list(pipeline.local_state_dict()),
            "real": sorted(n for n, p in pipeline.named_parameters(remove_duplicate=False) if not p.is_meta),
            "last": pipeline.is_last_stage(),
        }

    first, last = on_ranks(PP2, model, use)
    assert first["modules"] == ["", "embed", "layers", "layers.0", "layers.1"]
    assert last["modules"] == ["", "layers", "layers.2", "layers.3", "norm", "head"]
    assert first["children"] == ["embed", "layers"] and last["children"] == ["layers", "norm", "head"]
    assert "embed.weight" in first["parameters"] and "head.weight" in last["parameters"]
    assert first["parameters"] == first["state"] and last["parameters"] == last["state"]
    assert sorted(first["parameters"] + last["parameters"]) == sorted(model.state_dict())
    # The tied weight is one object under both names, on both ranks; all else is real on one rank only.
    assert first["real"] == sorted([*first["parameters"], "head.weight"])
    assert last["real"] == sorted([*last["parameters"], "embed.weight"])
    assert (first["last"], last["last"]) == (False, True)


def test_tied_weights_are_made_equal_and_marked() -> None:
    def use(pipeline: NxDPPModel) -> Any:
        return [(p.detach().clone(), getattr(p, "shared", False), h.ranks) for p, h in pipeline.tied_groups()]

    def main() -> Any:
        model = make(tied=True)
        with torch.no_grad():
            model.embed.weight.add_(comm.rank("pp"))
        return use(NxDPPModel(model, transformer_layer_cls=Block, auto_partition=True))

    results = comm.threads.run(Mesh(8, pp=4, tp=2), main)
    assert not any(results[2:6])
    held = [results[rank][0] for rank in (0, 1, 6, 7)]
    assert [shared for _, shared, _ in held] == [False, False, True, True]
    assert [ranks for _, _, ranks in held] == [(0, 6), (1, 7), (0, 6), (1, 7)]
    assert all(torch.equal(value, make(tied=True).embed.weight) for value, _, _ in held)


def test_evaluation_gives_the_loss_without_gradients_and_sets_modes_back() -> None:
    class Dropping(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return super().body(nn.functional.dropout(x, 0.5, self.training))

    model = make(Dropping)
    model.layers[1].eval()
    expected, _ = reference(copy.deepcopy(model).eval(), batch(), 4)

    def use(pipeline: NxDPPModel) -> Any:
        loss = pipeline.run_eval(**batch())
        assert pipeline.training and pipeline.original_module.training
        assert not pipeline.original_module.layers[1].training
        assert all(p.grad is None for p in pipeline.parameters())
        return loss

    first, last = on_ranks(PP2, model, use, num_microbatches=4, output_loss_value_spec=True)
    assert first is None and error(last, expected) < 1e-10


def test_evaluation_without_a_loss_returns_the_outputs_of_each_microbatch() -> None:
    model = make(DictOutput)
    results = on_ranks(PP2, model, lambda p: p.run_eval(**batch()), num_microbatches=2)
    assert results[0] is None
    for found, piece in zip(results[1], cut(batch(), 2)):
        expected = model(**piece)
        assert list(found) == list(expected) and found["nothing"] is None
        assert not found["hidden"].requires_grad
        torch.testing.assert_close(found, {k: v if v is None else v.detach() for k, v in expected.items()})


@pytest.mark.slow
def test_losses_of_microbatches_and_of_all_ranks() -> None:
    model = make()
    losses, _ = train(PP2, model, batch(), 4, return_mb_loss=True)
    assert losses[0] is None and len(losses[1]) == 4
    expected, _ = reference(model, batch(), 4)
    assert error(torch.stack(losses[1]).mean(), expected) < 1e-10

    def use(pipeline: NxDPPModel) -> Any:
        piece = cut(batch(), 2)[comm.rank("dp")]
        return pipeline.run_eval(**piece), pipeline.run_train(**piece)

    options = {"num_microbatches": 2, "output_loss_value_spec": True, "broadcast_and_average_loss": True}
    results = on_ranks(Mesh(8, pp=2, tp=2), model, use, **options)
    for values in results:
        assert all(error(value, expected) < 1e-10 for value in values)


def test_what_the_forward_raises_says_what_it_was_given() -> None:
    """Labels that are missing, or None, fail in the model's own code."""
    model = alone(num_microbatches=2, output_loss_value_spec=True)
    ids = batch()["ids"]
    with comm.as_rank(Mesh(1), 0):
        with pytest.raises(TypeError, match=r"^Model.forward, given {'ids': Tensor\[4, 6\]}: .* argument: 'labels'"):
            model.run_train(ids=ids)
        given = r"^Model.forward, given {'ids': Tensor\[4, 6\], 'labels': None}: 'NoneType' object has no"
        with pytest.raises(AttributeError, match=given):
            model.run_train(ids=ids, labels=None)
        with pytest.raises(AttributeError, match=given.replace("4", "8")):
            model.trace(kwargs={"ids": ids, "labels": None})


def test_inputs_on_meta_have_no_values() -> None:
    model = alone(num_microbatches=2, output_loss_value_spec=True)
    with (
        comm.as_rank(Mesh(1), 0),
        pytest.raises(ValueError, match=r"input \['ids'\] is on the meta device, where"),
    ):
        model.run_train(ids=batch()["ids"].to("meta"), labels=batch()["labels"])


@pytest.mark.parametrize("option", ["use_zero1_optimizer", "use_optimizer_wrapper"])
def test_an_optimizer_that_averages_gradients_is_left_to_it(option: str) -> None:
    model, pieces = make(), cut(batch(), 2)

    def use(pipeline: NxDPPModel) -> Any:
        pipeline.run_train(**pieces[comm.rank("dp")])
        return {n: p.grad for n, p in pipeline.local_named_parameters()}

    options = {"output_loss_value_spec": True, "num_microbatches": 2, option: True}
    for rank, grads in enumerate(on_ranks(Mesh(4, pp=2), model, use, **options)):
        _, expected = reference(model, pieces[rank % 2])
        assert all(error(grad, expected[name]) < 1e-10 for name, grad in grads.items())


def test_gradients_are_reduced_once_a_step() -> None:
    def use(pipeline: NxDPPModel) -> None:
        pipeline.run_train(**batch())
        pipeline.zero_grad()
        pipeline.run_train(**batch())
        from neuronx_dist.gradients.reduce import reduce_gradients

        with pytest.raises(RuntimeError, match="reduced"):
            reduce_gradients(pipeline)

    on_ranks(PP2, make(), use, output_loss_value_spec=True)


def test_reduced_gradients_of_tied_weights_are_not_added_to() -> None:
    def use(pipeline: NxDPPModel) -> None:
        pipeline.run_train(**batch())
        with pytest.raises(RuntimeError, match="Call zero_grad before the next step"):
            pipeline.run_train(**batch())

    on_ranks(PP2, make(tied=True), use, output_loss_value_spec=True)


def test_a_new_kind_of_input_records_again() -> None:
    model = make()

    def use(pipeline: NxDPPModel) -> Any:
        counts, losses = [], []
        for inputs in (batch(), batch(seed=1), batch(rows=4), {**batch(), "labels": batch()["labels"].int().long()}):
            losses.append(pipeline.run_eval(**inputs))
            counts.append(len(pipeline._programs))
        pipeline.original_module.layers[0].requires_grad_(False)
        pipeline.run_train(**batch())
        return counts, len(pipeline._programs), losses

    results = on_ranks(PP2, model, use, output_loss_value_spec=True, num_microbatches=2)
    assert all(counts == [1, 1, 2, 2] and last == 3 for counts, last, _ in results)
    for inputs, loss in zip((batch(), batch(seed=1), batch(rows=4)), results[1][2]):
        assert error(loss, reference(model, inputs, 2)[0]) < 1e-10


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_on_meta_is_materialised_after_partition(tied: bool) -> None:
    with torch.device("meta"):
        model = Model(tied=tied).double()
    whole = copy.deepcopy(model)
    with comm.as_rank(Mesh(1), 0):
        neuronx_dist.materialize(whole, seed=3)

    def use(pipeline: NxDPPModel) -> Any:
        with pytest.raises(RuntimeError, match="is on the meta device: give it a value first"):
            pipeline.run_train(**batch())
        neuronx_dist.materialize(pipeline, seed=3)
        return pipeline.run_train(**batch()), {n: p.grad for n, p in pipeline.local_named_parameters()}

    results = on_ranks(Mesh(4, pp=4), model, use, num_microbatches=2, output_loss_value_spec=True)
    loss, grads = reference(whole, batch(), 2)
    assert error(results[3][0], loss) < 1e-10
    for _, local in results:
        assert all(error(grad, grads[name]) < 1e-10 for name, grad in local.items())


def test_param_init_fn_fills_the_modules_of_this_stage() -> None:
    with torch.device("meta"):
        model = Model(tied=True).double()
        model.add_module("scale", BufferOnly())
    filled: list[list[str]] = [[], []]

    def main() -> Any:
        rank = comm.rank("pp")

        def init(module: nn.Module) -> None:
            filled[rank].append(type(module).__name__)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                assert not tensor.is_meta
                nn.init.constant_(tensor, 0.1 * (rank + 1))

        pipeline = NxDPPModel(
            copy.deepcopy(model), transformer_layer_cls=Block, pipeline_cuts=["layers.2"], param_init_fn=init
        )
        assert not any(p.is_meta for p in pipeline.local_parameters())
        ((param, _),) = pipeline.tied_groups()
        return pipeline.original_module.embed.weight is pipeline.original_module.head.weight, param.mean().item()

    for same, value in comm.threads.run(PP2, main):
        assert same and abs(value - 0.1) < 1e-9
    assert [len(names) for names in filled] == [11, 6]


class BufferOnly(nn.Module):
    """A module that holds a buffer only: every stage has it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.ones(2))


def test_moving_and_casting_keeps_ties_attributes_and_other_stages_on_meta() -> None:
    with torch.device("meta"):
        model = Model(tied=True)

    def main() -> None:
        mine = copy.deepcopy(model)
        for name, param in mine.named_parameters():
            param.mark = name  # type: ignore[attr-defined]
        pipeline = NxDPPModel(mine, transformer_layer_cls=Block, auto_partition=True)
        pipeline.to_empty(device="cpu")
        pipeline.to(torch.bfloat16)
        whole = pipeline.original_module
        assert whole.head.weight is whole.embed.weight
        local = {id(p) for p in pipeline.local_parameters()}
        for name, param in whole.named_parameters():
            assert param.mark == name
            assert param.is_meta is (id(param) not in local)
            assert param.dtype is torch.bfloat16
        pipeline.train(False)
        assert not whole.layers[0].training

    comm.threads.run(PP2, main)


def test_state_dicts_of_stages_make_up_the_whole_and_load_back() -> None:
    model, other = make(tied=True), make(tied=True)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(1.5)
    full = other.state_dict()
    one_name = {key: value for key, value in full.items() if key != "head.weight"}

    def use(pipeline: NxDPPModel) -> Any:
        assert pipeline.load_state_dict(one_name) == ([], [])
        assert all(torch.equal(value, full[key]) for key, value in pipeline.state_dict().items())
        pipeline.load_state_dict(pipeline.local_state_dict())
        with pytest.raises(RuntimeError, match=r"missing \['layers.*unexpected \['nonsense'\]"):
            pipeline.load_state_dict({"nonsense": torch.zeros(1), "embed.weight": full["embed.weight"]})
        return pipeline.run_eval(**batch())

    loss = on_ranks(PP2, model, use, output_loss_value_spec=True)[1]
    assert error(loss, reference(other, batch())[0]) < 1e-10


def test_errors_name_task_stage_and_line() -> None:
    class Failing(Block):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            if type(x) is torch.Tensor and self.up.weight.sum() != 0 and getattr(self, "countdown", 9) == 0:
                raise IndexError("no such thing")
            if type(x) is torch.Tensor:
                self.countdown = getattr(self, "countdown", 9) - 1
            return super().forward(x)

    model = make()
    model.layers[2] = Failing().double()
    model.layers[2].countdown = 1
    with pytest.raises(
        IndexError, match=rf"F1 on stage 1 of 2: layers_2 \(.*{file_name(pipeline_models)}:\d+\): no such thing"
    ):
        train(PP2, model, batch(), 4)


def test_messages_between_stages_and_nothing_else() -> None:
    """Per microbatch and boundary one tensor forward and one back; then the data-parallel reduction."""

    def use(pipeline: NxDPPModel) -> Any:
        pipeline.run_train(**batch())
        pipeline.zero_grad()
        with comm.record() as calls:
            pipeline.run_train(**batch())
        return [(c.verb, c.axis, c.shape) for c in calls if not c.verb.startswith("wait")]

    shape = (2, 6, 8)
    found = on_ranks(Mesh(3, pp=3), make(), use, num_microbatches=4, output_loss_value_spec=True)
    for stage, calls in enumerate(found):
        expected = []
        if stage < 2:
            expected += [("send", "pp_forward", shape), ("recv", "pp_backward", shape)] * 4
        if stage > 0:
            expected += [("recv", "pp_forward", shape), ("send", "pp_backward", shape)] * 4
        assert sorted(calls) == sorted(expected)


def test_activations_are_dropped_when_they_have_been_used() -> None:
    def use(pipeline: NxDPPModel) -> int:
        pipeline.run_train(**batch())
        return pipeline.peak_in_flight

    found = on_ranks(Mesh(4, pp=4), make(), use, num_microbatches=8, output_loss_value_spec=True)
    assert found == [4, 3, 2, 1]


def test_a_layer_that_is_replaced_between_steps_is_run_and_reduced() -> None:
    torch.manual_seed(5)
    new = Block().double()
    model = make()

    def main(pipeline: NxDPPModel) -> dict[str, torch.Tensor]:
        pipeline.run_train(**batch())
        pipeline.zero_grad()
        layers: Any = pipeline.original_module.layers
        layers[3 * pipeline.stage] = copy.deepcopy(new)
        pipeline.run_train(**batch())
        params = dict(pipeline.local_named_parameters())
        assert all(
            params[f"layers.{3 * pipeline.stage}.{key}"].shape == param.shape for key, param in new.named_parameters()
        )
        return {key: param.grad for key, param in params.items() if param.grad is not None}

    results = on_ranks(PP2, model, main, output_loss_value_spec=True, num_microbatches=2)
    layers: Any = model.layers
    layers[0], layers[3] = new, copy.deepcopy(new)
    _, expected = reference(model, batch(), 2)
    assert {name for grads in results for name in grads} == set(expected)
    for grads in results:
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-12)


def test_cut_by_hand() -> None:
    model = make()

    def main() -> Any:
        pipeline = NxDPPModel(
            copy.deepcopy(model), transformer_layer_cls=Block, output_loss_value_spec=True, num_microbatches=2
        )
        pipeline.trace(input_names=["ids", "labels"], leaf_modules=["Block"])
        pipeline.cut_pipeline_stage("layers.0")
        pipeline.cut_pipeline_stage("layers.2")
        pipeline.partition()
        with pytest.raises(RuntimeError, match="cut_pipeline_stage: this model is partitioned already"):
            pipeline.cut_pipeline_stage("layers.3")
        assert [*pipeline.local_parameters()]
        with pytest.raises(
            RuntimeError, match=r"trace: the model has been partitioned, at cuts \['layers.0', 'layers.2'\]"
        ):
            pipeline.trace(input_names=["ids"])
        return pipeline.run_train(**batch())

    loss = comm.threads.run(Mesh(3, pp=3), main)[2]
    assert error(loss, reference(model, batch(), 2)[0]) < 1e-10


def test_the_wrong_number_of_cuts_by_hand() -> None:
    with comm.as_rank(Mesh(3, pp=3), 0):
        pipeline = NxDPPModel(make(), transformer_layer_cls=Block)
        pipeline.cut_pipeline_stage("layers.0")
        with pytest.raises(ValueError, match="3 pipeline stages need 2 cuts, got 1"):
            pipeline.partition()
