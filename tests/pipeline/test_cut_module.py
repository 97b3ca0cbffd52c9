"""Cutting by hand, tracing and partitioning: what is refused, in which order, and with which words."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import NxDPPModel
from tests.support.pipeline_models import Block, batch, make

OPTIONS: dict[str, Any] = dict(transformer_layer_cls=Block, output_loss_value_spec=True)


def built(pp: int = 2, **options: Any) -> NxDPPModel:
    return NxDPPModel(make(), **{**OPTIONS, **options})


def refused(error: type[Exception], use: Any, pp: int = 2, **options: Any) -> str:
    with comm.as_rank(Mesh(pp, pp=pp), 0):
        model = built(**options)
        with pytest.raises(error) as caught:
            use(model)
    return str(caught.value)


def test_what_is_partitioned_is_not_cut_again() -> None:
    more = "this model is partitioned already, at ['layers.1']: to cut it manually, leave out"
    for name, use in (("cut_pipeline_stage", lambda m: m.cut_pipeline_stage("layers.0")), ("partition", lambda m: m.partition())):  # noqa: E501  # fmt: skip
        assert refused(RuntimeError, use, auto_partition=True).startswith(f"{name}: {more}")
    with comm.as_rank(Mesh(1), 0):
        model = built()
        assert model.partitioned  # with one piece there is nothing to cut
        model.partition()


def test_what_is_not_partitioned_does_not_run() -> None:
    message = "this model is not partitioned: pass pipeline_cuts or auto_partition=True, or call cut_pipeline_stage {}"
    for use in (lambda m: m.run_train(**batch()), lambda m: m.run_eval(**batch()), lambda m: m.program(batch())):
        assert refused(RuntimeError, use).startswith(message.format("1 times and then partition()"))
        assert refused(RuntimeError, use, schedule="zb_v").startswith(message.format("3 times and then partition()"))


def test_the_number_of_cuts() -> None:
    def use(*cuts: str) -> Any:
        def cut(model: NxDPPModel) -> None:
            for name in cuts:
                model.cut_pipeline_stage(name)
            model.partition()

        return cut

    assert refused(ValueError, use()) == (
        "2 pipeline stages need 1 cuts, got 0: []. A cut is the name of the last layer of a stage; the last one needs "
        "none."
    )
    assert refused(ValueError, use("layers.0", "layers.1"), schedule="zb_v").startswith(
        "2 pipeline stages with 2 chunks each need 3 cuts, got 2: ['layers.0', 'layers.1']. A cut is the name of the "
        "last layer of a chunk; the last one needs none."
    )


@pytest.mark.parametrize("cut, message", [("0", "stage 1 without parameters"), ("1", ""), ("3", "stage 1 without")])
def test_cuts_that_leave_a_stage_without_parameters(cut: str, message: str, recwarn: pytest.WarningsRecorder) -> None:
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()]
    if cut == "0":
        del layers[2]
    with comm.as_rank(Mesh(2, pp=2), 0):
        NxDPPModel(nn.Sequential(*layers, nn.Tanh()), pipeline_cuts=[cut], output_loss_value_spec=True)
    warned = [str(warning.message) for warning in recwarn]
    assert len(warned) == bool(message)
    assert all(text.startswith(f"pipeline_cuts ['{cut}'] leave {message}") for text in warned)


@pytest.mark.parametrize("schedule, ways", [(None, 2), ("zb_v", 4), ("interleaved", 4)])
def test_each_way_has_a_communicator(schedule: str | None, ways: int) -> None:
    chunks = 2 if schedule == "interleaved" else 1

    def rank() -> Any:
        model = built(schedule=schedule, virtual_pipeline_size=chunks)
        assert model.stage_channels == (None, None, None, None)
        for layer in ((1,), (0, 1, 2))[ways > 2]:
            model.cut_pipeline_stage(f"layers.{layer}")
        model.partition()
        return [channel and (channel.axis, channel.ranks) for channel in model.stage_channels]

    names = ["pp_forward", "pp_backward", "pp_forward_up", "pp_backward_down"]
    expected = [(name, (0, 1)) if number < ways else None for number, name in enumerate(names)]
    assert comm.threads.run(Mesh(2, pp=2), rank) == [expected] * 2


def test_example_inputs() -> None:
    inputs = list(batch(2).values())
    for names, args, text in (
        (None, inputs, "trace: 2 args for input_names None: pass kwargs instead"),
        (["ids"], inputs, "trace: 2 args for input_names ['ids']: pass kwargs instead"),
    ):
        assert refused(ValueError, lambda m, a=args: m.trace(args=a), input_names=names) == text  # type: ignore[misc]
    with comm.as_rank(Mesh(2, pp=2), 0):
        model = built(auto_partition=True)
        model.trace(args=inputs[:1], kwargs={"labels": inputs[1]}, input_names=["ids", "labels"])
        assert model.input_names == ["ids", "labels"] and model.placement_is_open
        [*model.parameters()]
        with pytest.raises(
            RuntimeError, match=r"trace: the model has been partitioned, at cuts \['layers.1'\], because it"
        ):
            model.trace(kwargs=batch(2))
    with comm.as_rank(Mesh(1), 0):
        model = built()
        [*model.parameters()]
        model.trace(kwargs=batch(2))  # at one stage nothing is settled by it


def test_schedules_are_made_once_for_each_number_of_microbatches() -> None:
    with comm.as_rank(Mesh(2, pp=2), 0):
        model = built(auto_partition=True, num_microbatches=2)
        first = model.training_schedule
        assert model.training_schedule is first and first.num_microbatches == 2 and not first.deallocate
        model.num_microbatches = 4
        assert model.training_schedule.num_microbatches == 4
        model.num_microbatches = 2
        assert model.training_schedule is first
        model.deallocate_pipeline_outputs = True
        assert model.training_schedule.deallocate and model.evaluation_schedule is model.evaluation_schedule
        model.schedule = "gpipe"
        assert type(model.training_schedule).__name__ == "GPipe"
