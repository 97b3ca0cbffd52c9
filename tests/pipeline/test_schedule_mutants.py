"""Every schedule, made wrong: two tasks of a stage in each other's place, or one message that carries something else.

A swap is refused before it runs, or computes what one process does: no wrong gradient, no stage that waits for ever,
no error in the middle of a step. It is of computations (messages follow them), or of all tasks as they are, messages
included. `make test` makes every swap of neighbours on small pipelines, and some others; NXD_FULL=1 all others.

Each single message that is dropped, stale or wrongly scaled changes the loss or a gradient; so does one that is sent
twice, in the same step or the next, if it is not refused.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.gradients.reduce import reduce_gradients
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import Kind, NxDPPModel, Schedule, Task
from neuronx_dist.pipeline.run.run_batch import check_runs
from neuronx_dist.pipeline.schedule import training_schedule
from tests.support.pipeline_models import Model, batch, error, make, on_ranks, reference
from tests.support.pipeline_training import CHUNKS

Distance = Callable[[Schedule], float]  # how far a step's losses and gradients are from those of one process
MESSAGES = {Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD}
OTHERS = 40  # swaps that are no neighbours, of each schedule, in `make test`


class Swap(NamedTuple):
    """Two tasks of a stage to swap: numbers in its computations, or in all its tasks."""

    stage: int
    first: int
    second: int
    messages: bool


class Swapped(Schedule):
    """A schedule with two tasks of a stage in each other's place."""

    def __init__(self, original: Schedule, swap: Swap) -> None:
        super().__init__(original.num_stages, original.num_microbatches)
        self.num_chunks = original.num_chunks
        self.original = original
        self.swap = swap
        self.virtual_stage = original.virtual_stage  # type: ignore[method-assign]
        self.holder = original.holder  # type: ignore[method-assign]
        self.send_window = original.send_window  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return f"{self.original} with {self.swap}"

    def computations(self, stage: int) -> list[Task]:
        if self.swap.messages:
            return [task for task in self.tasks(stage) if task.kind not in MESSAGES]
        return self._swapped(stage, self.original.computations(stage))

    def tasks(self, stage: int) -> list[Task]:
        if self.swap.messages:
            return self._swapped(stage, self.original.tasks(stage))
        return super().tasks(stage)

    def _swapped(self, stage: int, tasks: list[Task]) -> list[Task]:
        if stage == self.swap.stage:
            first, second = self.swap.first, self.swap.second
            tasks[first], tasks[second] = tasks[second], tasks[first]
        return tasks


def swaps(schedule: Schedule) -> Iterator[Swap]:
    for stage in range(schedule.num_stages):
        for messages, count in ((False, len(schedule.computations(stage))), (True, len(schedule.tasks(stage)))):
            for first, second in itertools.combinations(range(count), 2):
                yield Swap(stage, first, second, messages)


def chosen(schedule: Schedule) -> list[Swap]:
    everything = list(swaps(schedule))
    if os.environ.get("NXD_FULL"):
        return everything
    neighbours = [swap for swap in everything if swap.second == swap.first + 1]
    others = [swap for swap in everything if swap.second > swap.first + 1]
    return neighbours + random.Random(0).sample(others, min(OTHERS, len(others)))


@functools.cache
def expected(layers: int, microbatches: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = make(functools.partial(Model, layers=layers, tied=True))
    return reference(model, batch(rows=2 * microbatches), microbatches)


def on_pipeline(
    name: str, pp: int, microbatches: int, use: Callable[[NxDPPModel, Distance], Any], timeout: float = 60.0
) -> list[Any]:
    """`use(pipeline, distance)` on each stage of a tied model that this schedule trains."""
    layers = pp * CHUNKS[name]
    loss, gradients = expected(layers, microbatches)

    def main(pipeline: NxDPPModel) -> Any:
        def distance(schedule: Schedule) -> float:
            pipeline.zero_grad()
            losses = pipeline.run(schedule, batch(rows=2 * microbatches))
            reduce_gradients(pipeline)
            errors = [error(torch.stack(losses).mean(), loss)] if pipeline.is_last_stage() else []
            for key, param in pipeline.local_named_parameters():
                errors.append(math.inf if param.grad is None else error(param.grad, gradients[key]))
            return max(errors)

        return use(pipeline, distance)

    model = make(functools.partial(Model, layers=layers, tied=True))
    options: dict[str, Any] = {"num_microbatches": microbatches, "output_loss_value_spec": True, "timeout": timeout}
    return on_ranks(Mesh(pp, pp=pp), model, main, schedule=name, virtual_pipeline_size=CHUNKS[name], **options)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("pp,microbatches", [(2, 3), (4, 2)])
@pytest.mark.parametrize("name", CHUNKS)
def test_swapped_tasks_are_refused_or_change_nothing(name: str, pp: int, microbatches: int) -> None:
    schedule = training_schedule(pp, microbatches, schedule=name, num_chunks=CHUNKS[name])
    refused, accepted = 0, []
    for swap in chosen(schedule):
        swapped = Swapped(schedule, swap)
        try:
            check_runs(swapped)
            accepted.append(swapped)
        except RuntimeError:
            refused += 1
    assert refused and accepted
    by_stage = on_pipeline(name, pp, microbatches, lambda _, distance: [*map(distance, accepted)])
    wrong = [repr(swapped) for swapped, errors in zip(accepted, zip(*by_stage)) if max(errors) > 1e-10]
    assert not wrong


MUTATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]] = {
    "dropped": lambda x, last: torch.zeros_like(x),
    "stale": lambda x, last: torch.zeros_like(x) if last is None else last,
    "scaled": lambda x, last: x * 1.5,
}


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("name", CHUNKS)
def test_each_message_counts(name: str, pp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    send = comm.send
    numbers = Counter[int]()  # of messages of this step, by sender
    last: dict[int, torch.Tensor] = {}
    mutant: tuple[int, int, str] = (-1, -1, "")

    def wrong(x: torch.Tensor, channel: Any, **options: Any) -> Any:
        rank = comm.rank("pp")
        number, before = numbers[rank], last.get(rank)
        numbers[rank] += 1
        last[rank] = x
        if (rank, number) == mutant[:2]:
            x = MUTATIONS[mutant[2]](x, before)
        return send(x, channel, **options)

    def use(pipeline: NxDPPModel, distance: Distance) -> list[float]:
        nonlocal mutant
        errors = [distance(pipeline.training_schedule)]
        counts = comm.communicator("pp").gather_objects(numbers[pipeline.stage])
        for mutation in MUTATIONS:
            for rank in range(pp):
                for number in range(counts[rank]):
                    mutant = rank, number, mutation
                    numbers[pipeline.stage] = 0
                    last.pop(pipeline.stage, None)
                    comm.barrier("pp")
                    errors.append(distance(pipeline.training_schedule))
                    comm.barrier("pp")
        assert sum(counts) == 2 * 3 * (pp * CHUNKS[name] - 1 - (name == "zb_v"))
        return errors

    monkeypatch.setattr(comm, "send", wrong)
    first, *rest = (max(errors) for errors in zip(*on_pipeline(name, pp, 3, use)))
    assert first < 1e-10 and len(rest) >= 3 * 6
    assert min(rest) > 1e-6


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", CHUNKS)
def test_a_message_that_is_sent_twice_is_refused_or_changes_something(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one stands where the next is expected: after the last of a step, that is the first of the next."""
    send, microbatches = comm.send, 3
    numbers = Counter[int]()  # of messages, by sender
    twice = (-1, -1)

    def doubled(x: torch.Tensor, channel: Any, **options: Any) -> Any:
        rank = comm.rank("pp")
        number = numbers[rank]
        numbers[rank] += 1
        if (rank, number) == twice:
            send(x, channel, **options)
        return send(x, channel, **options)

    def two_steps(pipeline: NxDPPModel, distance: Distance) -> float:
        return max(distance(pipeline.training_schedule) for _ in range(2))

    def errors() -> float:
        numbers.clear()
        return max(on_pipeline(name, 2, microbatches, two_steps, timeout=10))

    monkeypatch.setattr(comm, "send", doubled)
    assert errors() < 1e-10
    counts = {rank: numbers[rank] // 2 for rank in range(2)}
    assert sum(counts.values()) == 2 * microbatches * (2 * CHUNKS[name] - 1 - (name == "zb_v"))
    for rank, count in counts.items():
        for number in range(count):
            twice = rank, number
            try:
                assert errors() > 1e-6, twice
            except comm.CommError as error:  # that it is no silence
                assert "timed out" not in str(error), error
