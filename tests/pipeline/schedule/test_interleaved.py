"""Interleaved 1F1B: Megatron-LM's order, and the ideal time with any number of microbatches."""

from __future__ import annotations

import pytest

from neuronx_dist.pipeline.schedule import Interleaved, Kind, Task, format_schedule

# Of megatron-core 0.16.1: the orders of stages 0 and 1, by num_stages, num_microbatches, num_chunks.
MEGATRON = {
    (2, 4, 2): (
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ),
    (3, 3, 2): (
        "F0 F1 F2 F0.1 F1.1 F2.1 B0.1 B1.1 B2.1 B0 B1 B2",
        "F0 F1 F2 F0.1 F1.1 F2.1 B0.1 B1.1 B2.1 B0 B1 B2",
    ),
    (2, 2, 3): (
        "F0 F1 F0.1 F1.1 F0.2 F1.2 B0.2 B1.2 B0.1 B1.1 B0 B1",
        "F0 F1 F0.1 F1.1 F0.2 B0.2 F1.2 B1.2 B0.1 B1.1 B0 B1",
    ),
}


@pytest.mark.parametrize("sizes", MEGATRON)
def test_the_order_is_megatrons(sizes: tuple[int, int, int]) -> None:
    schedule = Interleaved(*sizes)
    assert tuple(format_schedule(schedule.computations(stage)) for stage in (0, 1)) == MEGATRON[sizes]


def megatron_order(num_stages: int, num_microbatches: int, num_chunks: int, group: int, stage: int) -> list[Task]:
    """Tasks of `forward_backward_pipelining_with_interleaving`, by Megatron's own table and number of warmups."""
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    table = schedules.get_schedule_table(num_microbatches, num_chunks, group)
    warmup = min(2 * (num_stages - stage - 1) + (num_chunks - 1) * group, len(table))
    forwards = [Task(Kind.FORWARD, chunk, microbatch) for microbatch, chunk in table]
    backwards = [Task(Kind.BACKWARD, num_chunks - chunk - 1, microbatch) for microbatch, chunk in table]
    order = forwards[:warmup]
    for number in range(len(table) - warmup):
        order += [forwards[warmup + number], backwards[number]]
    return order + backwards[len(table) - warmup :]


def test_the_order_is_that_of_megatrons_own_table() -> None:
    compared = set()
    for num_stages in range(2, 9):
        for num_chunks in (2, 3, 4):
            for num_microbatches in range(num_stages, 33):
                sizes = num_stages, num_microbatches, num_chunks
                lengths = [len(group) for group in Interleaved(*sizes).groups]
                group = lengths[0]
                if len(set(lengths[:-1])) > 1:
                    continue  # Megatron's groups are equal, but for the last
                compared.add((num_stages, num_microbatches))
                for stage in range(num_stages):
                    expected = megatron_order(*sizes, group, stage)
                    assert Interleaved(*sizes).computations(stage) == expected, (sizes, stage)
    assert {(8, 32), (2, 32), (4, 7), (5, 13)} <= compared  # multiples, and others


def test_groups_are_as_equal_as_they_can_be() -> None:
    """Rounds of 4 and 3 for 7 microbatches over 3 stages."""
    order = Interleaved(3, 7, 2).computations(2)
    forwards = [task for task in order if task.kind is Kind.FORWARD]
    assert format_schedule(forwards) == "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 F5 F6 F4.1 F5.1 F6.1"


@pytest.mark.parametrize("num_chunks", [0, 1, -1])
def test_fewer_than_two_chunks(num_chunks: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2 chunks on each stage, got {num_chunks}"):
        Interleaved(2, 4, num_chunks)
