"""Ranks of a pipeline with different models, cuts, schedules or passes are refused by name, before any message."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.comm.errors import RemoteRankError
from neuronx_dist.comm.health.board import Board
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import NxDPPModel
from neuronx_dist.pipeline.run.comparison import _Passes
from tests.support.pipeline_models import HIDDEN, Block, Model, batch, error, make, on_ranks, reference
from tests.support.pool import WorkerFailure, processes

PP2 = Mesh(2, pp=2)
OPTIONS: dict[str, Any] = {"num_microbatches": 2, "output_loss_value_spec": True, "auto_partition": True}
ARGUMENTS = "\nGive NxDPPModel the same model and the same arguments on all ranks."
ORDER = "call run_train and run_eval in the same order on all ranks, with batches of one shape, and equal num"


def refused(mesh: Mesh, program: Callable[[], Any], message: str, timeout: float = 20.0) -> None:
    """Each rank raises this message, or says that another rank did; `message` is text, in which `...` is anything."""
    raised: dict[int, str] = {}

    def main() -> None:
        try:
            program()
        except comm.CommError as error:
            raised[comm.rank("world")] = str(error)
            raise

    with pytest.raises(comm.CommError) as caught:
        comm.threads.run(mesh, main, timeout=timeout)
    assert not isinstance(caught.value, comm.CommTimeout)
    pattern = re.escape(message).replace(r"\.\.\.", "(?s:.*)")
    assert sorted(raised) == list(range(mesh.world_size))
    for text in raised.values():
        assert re.search(pattern, text), f"{text}\n\nis not\n\n{message}"


def layered(first: int = 4, second: int = 4) -> nn.Module:
    return make(Model, layers=first if comm.rank("pp") == 0 else second)


def of_rank(*values: Any) -> Any:
    return values[comm.rank("pp")]


def wide() -> nn.Module:
    model = make()
    if comm.rank("pp") == 1:  # it does not hold this layer
        model.layers[0].up = nn.Linear(HIDDEN, 24).double()
        model.layers[0].down = nn.Linear(24, HIDDEN).double()
    return model


def renamed() -> nn.Module:
    model = make()
    if comm.rank("pp") == 1:
        model.last = model.head
        del model.head
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "layers": (
        lambda: layered(4, 6),
        "disagree about parameters and buffers: layers.4.norm.weight\n  rank 0 (stage 0): none\n"
        f"  rank 1 (stage 1): [{HIDDEN}] float64{ARGUMENTS}",
    ),
    "shape": (
        wide,
        "disagree about parameters and buffers: layers.0.up.weight\n  rank 0 (stage 0): [16, 8] float64\n"
        "  rank 1 (stage 1): [24, 8] float64",
    ),
    "dtype": (
        lambda: make().to(of_rank(torch.float64, torch.float32)),
        "embed.weight\n  rank 0 (stage 0): [13, 8] float64\n  rank 1 (stage 1): [13, 8] float32",
    ),
    "name": (renamed, "head.weight\n  rank 0 (stage 0): [13, 8] float64\n  rank 1 (stage 1): none"),
}


@pytest.mark.parametrize("difference", MODELS)
def test_other_models(difference: str) -> None:
    model, message = MODELS[difference]
    refused(PP2, lambda: NxDPPModel(model(), Block, **OPTIONS), message)


ARGUMENTS_OF_RANKS: dict[str, tuple[dict[str, tuple[Any, Any]], str]] = {
    "cuts": (
        {"pipeline_cuts": (["layers.0"], ["layers.1"]), "auto_partition": (False, False)},
        f"disagree about pipeline_cuts\n  rank 0 (stage 0): ['layers.0']\n  rank 1 (stage 1): ['layers.1']{ARGUMENTS}",
    ),
    "chunks": (
        {"virtual_pipeline_size": (2, 1)},
        "disagree about virtual_pipeline_size\n  rank 0 (stage 0): 2\n  rank 1 (stage 1): 1",
    ),
    "placement": (
        {"virtual_pipeline_size": (2, 2), "schedule": ("interleaved", "zb_v")},
        "disagree about the stages that hold the pieces of the model\n  rank 0 (stage 0): [0, 1, 0, 1]\n"
        "  rank 1 (stage 1): [0, 1, 1, 0]",
    ),
    "schedule": (
        {"schedule": ("gpipe", "1f1b"), "num_microbatches": (4, 4)},
        "disagree about schedule\n  rank 0 (stage 0): GPipe(num_stages=2, num_microbatches=4)\n"
        "  rank 1 (stage 1): OneFOneB(num_stages=2, num_microbatches=4)",
    ),
    "microbatches": (
        {"num_microbatches": (2, 4)},
        "disagree about num_microbatches\n  rank 0 (stage 0): 2\n  rank 1 (stage 1): 4",
    ),
}


@pytest.mark.parametrize("difference", ARGUMENTS_OF_RANKS)
def test_other_arguments(difference: str) -> None:
    values, message = ARGUMENTS_OF_RANKS[difference]

    def program() -> None:
        options = {**OPTIONS, **{name: of_rank(*x) for name, x in values.items()}}
        NxDPPModel(make(), Block, **options).run_train(**batch())

    refused(PP2, program, message)


def test_ranks_that_agree_are_named_together() -> None:
    def program() -> None:
        NxDPPModel(make(), Block, 2, pipeline_cuts=["layers.0", "layers.1", f"layers.{2 + (comm.rank('pp') == 2)}"])

    refused(
        Mesh(4, pp=4),
        program,
        "disagree about pipeline_cuts\n  ranks 0, 1, 3 (stages 0, 1, 3): ['layers.0', 'layers.1', 'layers.2']\n"
        "  rank 2 (stage 2): ['layers.0', 'layers.1', 'layers.3']",
    )


@pytest.mark.parametrize("axis", ["tp", "dp", "cp"])
def test_copies_of_a_stage_are_cut_alike(axis: str) -> None:
    """Told to each copy but the first, which meets that failure in its next collective."""

    def program() -> None:
        NxDPPModel(make(), Block, 2, pipeline_cuts=[f"layers.{comm.rank(axis)}"])
        comm.barrier()

    sizes = {axis: 2} if axis != "dp" else {}
    refused(Mesh(4, pp=2, **sizes), program, "disagree about pipeline_cuts\n  rank...: ['layers.")


def test_a_copy_of_a_stage_that_is_late_reads_what_was_said() -> None:
    """The first copy, which does not wait for it, has come to the same moment twice more."""

    def program() -> None:
        model = NxDPPModel(make(), Block, input_names=["ids", "labels"], **OPTIONS)
        for _ in range(3):
            time.sleep(0.05 * comm.rank("tp"))
            model.trace()

    comm.threads.run(Mesh(4, pp=2, tp=2), program, timeout=5)


def test_copies_of_a_stage_may_have_other_parameters() -> None:
    """Experts, or rows of a vocabulary that does not divide."""

    def program() -> None:
        model = make()
        model.own = nn.Parameter(torch.zeros(1 + comm.rank("dp")))
        NxDPPModel(model, Block, **OPTIONS)

    comm.threads.run(Mesh(4, pp=2), program)


def test_a_placement_that_only_one_rank_has_settled() -> None:
    """Rank 0 alone counts its parameters, so that its model is not cut anew when the first batch shows the FLOPs."""

    def program() -> None:
        model = make()
        model.embed = nn.Embedding(10_000, HIDDEN).double()
        pipeline = NxDPPModel(model, Block, 2, output_loss_value_spec=True, auto_partition="balanced")
        if comm.rank("pp") == 0:
            sum(param.numel() for param in pipeline.parameters())
        pipeline.run_train(**batch())

    refused(
        PP2, program, "disagree about pipeline_cuts\n  rank 0 (stage 0): ['embed']\n  rank 1 (stage 1): ['layers.1']"
    )


class Adapted(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def test_what_a_stage_changes_of_its_own_layers_is_its_own_affair() -> None:
    """Adapters on the layers of this stage, which have other names on the other stages."""
    expected, _ = reference(make(), batch(), 2)

    def use(pipeline: NxDPPModel) -> Any:
        for layer in pipeline.local_modules():
            if isinstance(layer, Block):
                layer.up = Adapted(layer.up)
        return pipeline.run_train(**batch())

    assert error(on_ranks(PP2, make(), use, **OPTIONS)[1], expected) < 1e-10


# --- passes -----------------------------------------------------------------------------------------------------------


def train(pipeline: NxDPPModel) -> None:
    pipeline.run_train(**batch())


def evaluate(pipeline: NxDPPModel) -> None:
    pipeline.run_eval(**batch())


def short(pipeline: NxDPPModel) -> None:
    pipeline.run_train(**{name: x[:, :3] for name, x in batch().items()})


def more(pipeline: NxDPPModel) -> None:
    pipeline.num_microbatches = 4
    pipeline.run_train(**batch())


def gpipe(pipeline: NxDPPModel) -> None:
    pipeline.schedule = "gpipe"
    pipeline.run_train(**batch())


def frozen(pipeline: NxDPPModel) -> None:
    for name, param in pipeline.original_module.named_parameters():
        param.requires_grad_(name.startswith(("layers.3", "norm", "head")))
    pipeline.run_train(**batch())


Steps = list[Callable[[NxDPPModel], None]]
RUNS = "disagree about what runs\n  rank 0 (stage 0): {}\n  rank 1 (stage 1): {}\nIt is pass {} of this model: " + ORDER
PASSES: dict[str, tuple[Steps, Steps, str]] = {
    "train, eval": ([train], [evaluate], RUNS.format("training", "evaluation", 1)),
    "eval, train": ([evaluate], [train], RUNS.format("evaluation", "training", 1)),
    "eval on one": ([train, train, evaluate], [train, train, train], RUNS.format("evaluation", "training", 3)),
    "eval on the other": ([train, train, train], [train, train, evaluate], RUNS.format("training", "evaluation", 3)),
    "train on one": ([evaluate, train], [evaluate, evaluate], RUNS.format("training", "evaluation", 2)),
    "known": ([train, evaluate, train], [train, evaluate, evaluate], RUNS.format("training", "evaluation", 3)),
    "known on the other": (
        [train, evaluate, evaluate, train],
        [train, evaluate, evaluate, evaluate],
        RUNS.format("training", "evaluation", 4),
    ),
    "microbatches": (
        [train, more],
        [train, train],
        "disagree about num_microbatches\n  rank 0 (stage 0): 4\n  rank 1 (stage 1): 2\nIt is pass 2",
    ),
    "schedule": (
        [train, gpipe],
        [train, train],
        "disagree about schedule\n  rank 0 (stage 0): GPipe(num_stages=2, num_microbatches=2), tasks ...\n"
        "  rank 1 (stage 1): OneFOneB(num_stages=2, num_microbatches=2), tasks ...\nIt is pass 2",
    ),
    "shape": (
        [train, short],
        [train, train],
        "disagree about the tensors of a microbatch between the pieces of the model\n"
        "  rank 0 (stage 0): ['[4, 3, 8] float64, with a gradient']\n"
        "  rank 1 (stage 1): ['[4, 6, 8] float64, with a gradient']\nIt is pass 2",
    ),
    "shape on the other": (
        [train, train],
        [train, short],
        "  rank 0 (stage 0): ['[4, 6, 8] float64, with a gradient']\n"
        "  rank 1 (stage 1): ['[4, 3, 8] float64, with a gradient']\nIt is pass 2",
    ),
    "frozen": (
        [frozen],
        [train],
        "  rank 0 (stage 0): ['[4, 6, 8] float64']\n"
        "  rank 1 (stage 1): ['[4, 6, 8] float64, with a gradient']\nIt is pass 1",
    ),
}


@pytest.mark.parametrize("difference", PASSES)
@pytest.mark.slow
def test_other_passes(difference: str) -> None:
    *steps, message = PASSES[difference]

    def program() -> None:
        pipeline = NxDPPModel(make(), Block, **OPTIONS)
        for step in of_rank(*steps):
            step(pipeline)

    refused(PP2, program, message)


class Unused(nn.Module):
    """Two layers, the first of which counts for one rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(of_rank(x, y)).square().mean()


def test_a_piece_that_sends_nothing() -> None:
    def program() -> None:
        options: Any = dict(num_microbatches=2, pipeline_cuts=["first"], output_loss_value_spec=True)
        NxDPPModel(Unused(), **options).run_train(x=torch.ones(4, 4))

    texts = "  rank 0 (stage 0): ['nothing']\n  rank 1 (stage 1): ['[2, 4] float32, with a gradient']\nIt is pass 1"
    refused(PP2, program, texts)


def test_a_rank_that_is_ahead_says_what_it_ran_then() -> None:
    passes = _Passes()
    assert passes.text_of(1) is None
    assert passes.begin("first") == 1
    passes.number += 1
    assert passes.begin("third") == 3
    assert [passes.text_of(number) for number in (1, 2, 3, 4)] == ["first", "first", "third", None]
    for number in range(4, 100):
        passes.begin(f"pass {number}")
    assert passes.text_of(1) is None and passes.text_of(90) == "pass 90"


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    topics: list[str] = []
    exchange = Board.exchange

    def counting(self: Board, topic: str, *args: Any) -> Any:
        if self.rank == 0:
            topics.append(topic.partition(", ")[2].partition(" of ")[0])
        return exchange(self, topic, *args)

    monkeypatch.setattr(Board, "exchange", counting)
    return topics


def test_only_what_is_new_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = counted(monkeypatch)

    def use(pipeline: NxDPPModel) -> Any:
        counts = []
        steps = [train, train, short, train, short, evaluate, evaluate, train, evaluate, more, more]
        for step in steps:
            before = len(topics)
            step(pipeline)
            counts.append(len(topics) - before)
        return counts

    counts, _ = on_ranks(PP2, make(), use, **OPTIONS)
    #        train, again, short, both known, eval, again, each change between schedules, microbatches, again
    assert counts == [2, 0, 1, 0, 0, 1, 0, 1, 1, 1, 0]
    assert topics == ["partition, time 0", "first batch, time 0", *["passes"] * 6]


def test_one_stage_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = counted(monkeypatch)
    on_ranks(Mesh(2), make(), train, **OPTIONS)
    assert topics == []


def test_several_models_and_copies_of_them() -> None:
    """Each is compared by itself: passes of two models, and of a copy, may come in any order."""
    model = make()
    expected, _ = reference(model, batch(), 2)

    def use(pipeline: NxDPPModel) -> Any:
        train(pipeline)
        second = NxDPPModel(copy.deepcopy(pipeline.original_module).to_empty(device="cpu"), Block, **OPTIONS)
        clone = copy.deepcopy(pipeline)
        for model in (clone, second, second, pipeline):
            evaluate(model)
        return clone.run_eval(**batch()), pipeline.run_eval(**batch())

    for loss in on_ranks(PP2, model, use, **OPTIONS)[1]:
        assert error(loss, expected) < 1e-10


def test_a_rank_that_fails_does_not_leave_the_others_waiting() -> None:
    def program() -> None:
        pipeline = NxDPPModel(make(), Block, **OPTIONS)
        if comm.rank("pp") == 0:
            raise ArithmeticError("no good")
        with pytest.raises(RemoteRankError, match="comparing how.*rank 0 failed first: ArithmeticError: no good"):
            pipeline.run_train(**batch())

    with pytest.raises(ArithmeticError):
        comm.threads.run(PP2, program, timeout=20)


# --- on processes -----------------------------------------------------------------------------------------------------


def other_cuts() -> None:
    NxDPPModel(make(), Block, 2, pipeline_cuts=[f"layers.{comm.rank('pp')}"])


def other_passes(one: int) -> None:
    """From the third pass on, a rank does something else, which is news to itself alone."""
    pipeline = NxDPPModel(make(), Block, **OPTIONS)
    train(pipeline)
    evaluate(pipeline)
    evaluate(pipeline) if comm.rank("pp") == one else train(pipeline)


def test_processes_with_other_cuts() -> None:
    with pytest.raises(
        WorkerFailure, match=r"CommError: .*pipeline_cuts\n  rank 0 \(stage 0\): \['layers.0'\]\n  rank 1"
    ):
        processes(2).run(other_cuts, mesh={"pp": 2}, timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize("one", [0, 1])
def test_processes_with_other_passes(one: int) -> None:
    """The rank that goes on as before waits in a message; its thread that watches for failures says what it runs."""
    runs = ["training", "training"]
    runs[one] = "evaluation"
    message = rf"CommError: .*what runs\n  rank 0 \(stage 0\): {runs[0]}\n  rank 1 \(stage 1\): {runs[1]}\nIt is pass 3"
    with pytest.raises(WorkerFailure, match=message):
        processes(2).run(other_passes, one, mesh={"pp": 2}, timeout=30)
