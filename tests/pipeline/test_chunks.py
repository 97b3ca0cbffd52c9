"""Several pieces of the model on a stage: where they are, what is local, what they share, and where the loss is."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import grads
from neuronx_dist.pipeline import Inference, NxDPPModel
from neuronx_dist.pipeline.cut.placement import Placement
from neuronx_dist.pipeline.stage_module import StageModule
from tests.pipeline.test_parity import DictOutput, SharedLayer
from tests.support.pipeline_models import HIDDEN, Block, Model, batch, cut, error, make, on_ranks, reference

pytestmark = pytest.mark.slow  # together more than the fast tier has room for

PP2 = Mesh(2, pp=2)
CUTS = ["layers.0", "layers.1", "layers.2"]
INTERLEAVED: dict[str, Any] = {"virtual_pipeline_size": 2}
V: dict[str, Any] = {"schedule": "zb_v"}
BOTH = pytest.mark.parametrize("chunks", [INTERLEAVED, V], ids=["interleaved", "zb_v"])


@pytest.mark.parametrize(
    "chunks,layers,end",
    [
        ({}, [["0", "1"], ["2", "3"]], 1),
        (INTERLEAVED, [["0", "2"], ["1", "3"]], 1),
        (V, [["0", "3"], ["1", "2"]], 0),
    ],
)
def test_the_schedule_places_the_pieces(chunks: dict[str, Any], layers: list[list[str]], end: int) -> None:
    """Round-robin, or as a V; the norm and the head are where the model ends."""

    def use(pipeline: NxDPPModel) -> Any:
        parameters = [name for name, _ in pipeline.local_named_parameters()]
        assert parameters == list(pipeline.state_dict()) == [n for n, p in pipeline.named_parameters() if not p.is_meta]
        blocks = {name.split(".")[1] for name in parameters if name.startswith("layers")}
        modules = [name for name, _ in pipeline.local_named_modules() if name and "." not in name]
        assert pipeline.virtual_pipeline_size == (2 if chunks else 1)
        return sorted(blocks), modules, pipeline.is_last_stage()

    results = on_ranks(PP2, make(), use, **chunks)
    assert [blocks for blocks, _, _ in results] == layers
    expected = [["embed", "layers"], ["layers"]]
    expected[end] += ["norm", "head"]
    assert [modules for _, modules, _ in results] == expected
    assert [is_last for *_, is_last in results] == [stage == end for stage in (0, 1)]


@BOTH
def test_uneven_pieces_and_cuts_by_hand(chunks: dict[str, Any]) -> None:
    cuts = ["embed", "layers.2", "layers.3"]
    loss, gradients = reference(make(), batch(), 4)
    options = {"num_microbatches": 4, "output_loss_value_spec": True, **chunks}

    def use(pipeline: NxDPPModel) -> Any:
        assert pipeline.pipeline_cuts == cuts
        return pipeline.run_train(**batch()), {n: p.grad for n, p in pipeline.local_named_parameters()}

    by_argument = on_ranks(PP2, make(), use, auto_partition=False, pipeline_cuts=cuts, **options)

    def by_hand() -> Any:
        pipeline = NxDPPModel(make(), Block, **options)
        with pytest.raises(RuntimeError, match="cut_pipeline_stage 3 times"):
            pipeline.run_train(**batch())
        pipeline.cut_pipeline_stage(cuts[0])
        with pytest.raises(ValueError, match="2 pipeline stages with 2 chunks each need 3 cuts, got 1"):
            pipeline.partition()
        for name in cuts[1:]:
            pipeline.cut_pipeline_stage(name)
        pipeline.partition()
        return use(pipeline)

    for results in (by_argument, comm.threads.run(PP2, by_hand)):
        assert sum(value is not None for value, _ in results) == 1
        assert error(next(value for value, _ in results if value is not None), loss) < 1e-12
        assert all(error(grad, gradients[name]) < 1e-10 for _, local in results for name, grad in local.items())


@BOTH
def test_the_number_of_cuts_with_example_inputs(chunks: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="2 pipeline stages with 2 chunks each need 3 cuts, got 1"):
        on_ranks(PP2, make(), lambda pipeline: None, batch(), auto_partition=False, pipeline_cuts=CUTS[:1], **chunks)


@BOTH
def test_one_stage_with_several_chunks(chunks: dict[str, Any]) -> None:
    """Nothing is sent, and all is local; without cuts it waits for them, as on several stages."""
    loss, gradients = reference(make(tied=True), batch(), 2)
    with comm.as_rank(Mesh(1), 0), comm.record() as calls:
        options = {"num_microbatches": 2, "output_loss_value_spec": True, **chunks}
        uncut = NxDPPModel(make(tied=True), Block, **options)
        assert not uncut.partitioned
        for pipeline in (uncut, NxDPPModel(make(tied=True), Block, auto_partition=True, **options)):
            if pipeline is uncut:
                pipeline.trace(kwargs={key: value[:2] for key, value in batch().items()})
                pipeline.cut_pipeline_stage("layers.1")
                pipeline.partition()
            assert len(pipeline.program(batch()).chunks) == 2
            assert error(pipeline.run_train(**batch()), loss) < 1e-12
            assert all(error(p.grad, gradients[name]) < 1e-10 for name, p in pipeline.local_named_parameters())
    assert not any(call.verb in ("send", "recv") for call in calls)


@pytest.mark.parametrize("end,chunks", [(1, INTERLEAVED), (0, V)], ids=["interleaved", "zb_v"])
def test_losses_and_outputs_come_from_where_the_model_ends(end: int, chunks: dict[str, Any]) -> None:
    model = make()
    pieces = cut(batch(), 2)
    expected, _ = reference(model, batch(), 2)
    options = {"num_microbatches": 2, "output_loss_value_spec": True, **chunks}

    def both(pipeline: NxDPPModel) -> Any:
        return pipeline.run_eval(**batch()), pipeline.run_train(**batch())

    for stage, values in enumerate(on_ranks(PP2, model, both, **options)):
        assert all(value is None if stage != end else error(value, expected) < 1e-12 for value in values)
    for stage, values in enumerate(on_ranks(PP2, model, both, return_mb_loss=True, **options)):
        for value in values:
            assert (value is None) is (stage != end)
            losses = [] if value is None else zip(value, (reference(model, piece)[0] for piece in pieces))
            assert all(error(one, other) < 1e-12 for one, other in losses)

    def average(pipeline: NxDPPModel) -> Any:
        piece = pieces[comm.rank("dp")]
        return pipeline.run_eval(**piece), pipeline.run_train(**piece)

    everywhere = on_ranks(Mesh(8, pp=2, tp=2), model, average, broadcast_and_average_loss=True, **options)
    assert all(error(value, expected) < 1e-12 for values in everywhere for value in values)

    del options["output_loss_value_spec"]
    for stage, outputs in enumerate(on_ranks(PP2, make(DictOutput), lambda p: p.run_eval(**batch()), **options)):
        assert (outputs is None) is (stage != end)
        for found, piece in zip(outputs or (), pieces):
            torch.testing.assert_close(found["hidden"], make(DictOutput)(**piece)["hidden"].detach())


@pytest.mark.parametrize("pp", [2, 3])
@BOTH
def test_both_ways_between_two_stages_have_communicators_of_their_own(pp: int, chunks: dict[str, Any]) -> None:
    """Neither direction may wait for the other where messages between two ranks are one queue (NCCL)."""

    def use(pipeline: NxDPPModel) -> Any:
        pipeline.run_train(**batch())
        pipeline.zero_grad()
        with comm.record() as calls:
            pipeline.run_train(**batch())
        return [(call.verb, call.axis) for call in calls if call.verb in ("send", "recv")]

    options = {"num_microbatches": 2, "output_loss_value_spec": True, **chunks}
    found = on_ranks(Mesh(pp, pp=pp), make(layers=2 * pp), use, **options)
    axes: Any = [{verb: {axis for v, axis in calls if v == verb} for verb in ("send", "recv")} for calls in found]
    first, last = axes[0], axes[-1]
    up = {"pp_forward_up", "pp_backward"}
    down = {"pp_forward", "pp_backward_down"}
    assert first["recv"] >= up and last["recv"] >= down and first["send"] >= down and last["send"] >= up
    if pp == 2 or chunks is V:  # else the first and the last stage are neighbours too
        assert first == {"send": down, "recv": up} and last == {"send": up, "recv": down}


def test_evaluation_runs_the_forwards_of_training() -> None:
    def use(pipeline: NxDPPModel) -> None:
        schedule = pipeline.evaluation_schedule
        assert isinstance(schedule, Inference) and schedule.holders == [0, 1, 1, 0]
        assert pipeline.evaluation_schedule is schedule and pipeline.training_schedule is pipeline.training_schedule
        pipeline.num_microbatches = 3
        assert pipeline.evaluation_schedule.num_microbatches == pipeline.training_schedule.num_microbatches == 3

    on_ranks(PP2, make(), use, num_microbatches=2, **V)


# --- what several pieces share ----------------------------------------------------------------------------------------


class Tied(Model):
    """Weights that two, and four, parts of the model share; with `CUTS` each layer is in a piece of its own."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        for layer in self.layers[1:]:
            layer.up.weight = self.layers[0].up.weight
        self.layers[3].norm.weight = self.layers[0].norm.weight
        self.layers[2].down.weight = self.layers[1].down.weight


# Which stages hold the head's weight, `up`, layers 0 and 3's `norm`, and layers 1 and 2's `down`.
HELD = {"interleaved": [{0, 1}, {0, 1}, {0, 1}, {0, 1}], "zb_v": [{0}, {0, 1}, {0}, {1}]}


@BOTH
def test_tied_weights_are_one_parameter_on_a_stage_and_equal_on_all(
    chunks: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Gradients of a tied weight are the sum over all uses, its norm is counted once, and its copies stay equal."""
    whole: Any = make(Tied)
    named = dict(whole.named_parameters(remove_duplicate=False))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    expected = []
    for step in range(3):
        torch.stack([whole(**piece) for piece in cut(batch(seed=step), 4)]).mean().backward()
        expected.append(nn.utils.get_total_norm([param.grad for param in whole.parameters()]))
        gradients = {name: param.grad.clone() for name, param in named.items()}
        optimizer.step()
        optimizer.zero_grad()

    def use(pipeline: NxDPPModel) -> Any:
        unique = [id(p) for p in pipeline.local_parameters()]
        assert len(set(unique)) == len(unique)
        mine = torch.optim.SGD(pipeline.local_parameters(), lr=0.1)
        for step in range(3):
            mine.zero_grad()
            pipeline.run_train(**batch(seed=step))
            assert error(grads.clip_grad_norm(pipeline.local_parameters(), math.inf), expected[step]) < 1e-12
            found = {n: p.grad.clone() for n, p in pipeline.local_named_parameters(remove_duplicate=False)}
            mine.step()
        return found, dict(pipeline.local_named_parameters(remove_duplicate=False))

    options = {"num_microbatches": 4, "output_loss_value_spec": True, **chunks}
    results = on_ranks(PP2, make(Tied), use, **options)
    shared = ["head.weight", "layers.0.up.weight", "layers.0.norm.weight", "layers.1.down.weight"]
    same = [{name for name in named if named[name] is named[one]} for one in shared]
    holders = [{stage for stage in (0, 1) if results[stage][0].keys() & names} for names in same]
    assert holders == HELD["zb_v" if chunks is V else "interleaved"]
    for found, weights in results:
        assert all(error(grad, gradients[name]) < 1e-10 for name, grad in found.items())
        assert all(error(weight.detach(), named[name].detach()) < 1e-10 for name, weight in weights.items())
        for names in same:
            assert len({id(weights[name]) for name in names & weights.keys()}) <= 1
    for name in results[0][1].keys() & results[1][1].keys():
        assert torch.equal(results[0][1][name], results[1][1][name])


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, mask) * self.scale


class Renamed(Model):
    """A layer with a buffer that has two names; it is called by the first one, at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.last = Scaled()

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(super().body(self.first(x)))


@pytest.mark.parametrize("model_class", [SharedLayer, Renamed])
@pytest.mark.parametrize("chunks", [{}, INTERLEAVED, V], ids=["1f1b", "interleaved", "zb_v"])
def test_a_layer_that_several_pieces_call(chunks: dict[str, Any], model_class: Any) -> None:
    model = make(model_class)
    loss, gradients = reference(model, batch(), 4)

    def use(pipeline: NxDPPModel) -> Any:
        value = pipeline.run_train(**batch())
        assert not any(buffer.is_meta for _, buffer in pipeline.local_named_buffers())
        modules = [id(module) for _, module in pipeline.local_named_modules()]
        assert len(set(modules)) == len(modules)
        return value, {n: p.grad for n, p in pipeline.local_named_parameters()}

    cuts = ["embed", "layers.1", "layers.2"] if chunks else ["layers.1"]
    options = {"num_microbatches": 4, "output_loss_value_spec": True, "transformer_layer_cls": (Block,), **chunks}
    results = on_ranks(PP2, model, use, batch(rows=2), auto_partition=False, pipeline_cuts=cuts, **options)
    assert sum(value is not None and error(value, loss) < 1e-12 for value, _ in results) == 1
    for _, local in results:
        assert all(error(grad, gradients[name]) < 1e-10 for name, grad in local.items())


@BOTH
def test_buffers_state_dicts_and_meta(chunks: dict[str, Any]) -> None:
    """The state dicts of the stages make up the whole, and load back; meta tensors are filled by their names."""

    def build() -> nn.Module:
        model: Any = Model(tied=True)
        for index in range(4):
            model.layers[index].add_module("unused", nn.BatchNorm1d(HIDDEN))
        return model.double()

    with torch.device("meta"):
        on_meta = build()
    whole = copy.deepcopy(on_meta)
    with comm.as_rank(Mesh(1), 0):
        neuronx_dist.materialize(whole, seed=3)
    full = whole.state_dict()

    def use(pipeline: NxDPPModel) -> Any:
        neuronx_dist.materialize(pipeline, seed=3)
        assert all(torch.equal(value, full[name]) for name, value in pipeline.state_dict().items())
        buffers = [name for name, _ in pipeline.local_named_buffers()]
        assert len(buffers) == 6 and set(buffers) <= pipeline.state_dict().keys()
        doubled = {name: 2 * value for name, value in full.items() if name != "head.weight"}
        assert pipeline.load_state_dict(doubled) == ([], [])
        return pipeline.state_dict()

    states = on_ranks(PP2, on_meta, use, **chunks)
    assert states[0].keys() | states[1].keys() == full.keys()
    assert all(torch.equal(value, 2 * full[name]) for state in states for name, value in state.items())


class Counting(Model):
    """A buffer that one piece changes and another reads: with microbatches in between it would be out of date."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(()))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = super().body(x + self.count)
        self.count.add_(1)
        return x


@BOTH
def test_a_buffer_that_one_piece_changes_and_another_reads_is_refused(chunks: dict[str, Any]) -> None:
    with pytest.raises(neuronx_dist.pipeline.TracingError, match="count is modified on pipeline stage 3 and used on"):
        on_ranks(PP2, make(Counting), lambda p: p.run_train(**batch()), output_loss_value_spec=True, **chunks)


def test_a_module_of_two_names_is_local_by_either() -> None:
    """The module's buffers stay, and it is listed once, by the name that it has on this stage."""

    def main() -> Any:
        module = nn.Module()
        module.first = module.second = nn.BatchNorm1d(2)
        stage = StageModule(module, stage=comm.rank("pp"), num_stages=2, last_stage=1)
        stage.place(Placement({"first": frozenset([0]), "second": frozenset([1])}, {}))
        assert not any(buffer.is_meta for _, buffer in module.named_buffers())
        modules = [name for name, _ in stage.local_named_modules()]
        everything = [name for name, _ in stage.local_named_modules(remove_duplicate=False)]
        return modules, everything, [name for name, _ in stage.local_named_buffers()]

    for name, (modules, everything, buffers) in zip(("first", "second"), comm.threads.run(PP2, main)):
        assert modules == everything == ["", name]
        assert buffers == [f"{name}.{key}" for key in ("running_mean", "running_var", "num_batches_tracked")]


def test_a_schedule_with_other_pieces_is_refused_after_construction() -> None:
    def use(pipeline: NxDPPModel) -> None:
        pipeline.run_train(**batch())
        pipeline.schedule = "zb_v"
        with pytest.raises(ValueError, match="does not fit this model, which has 2 stages with 2 pieces"):
            pipeline.run_train(**batch())
        with pytest.raises(ValueError, match="does not fit this model"):
            pipeline.run_eval(**batch())

    options = {"num_microbatches": 2, "output_loss_value_spec": True, "schedule": "interleaved"}
    on_ranks(Mesh(2, pp=2), make(), use, virtual_pipeline_size=2, **options)
