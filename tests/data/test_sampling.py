"""Rows of data-parallel ranks: equal batches at any dp size, each row once, positions that any dp size loads."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.data import DataParallelBatchSampler, DataParallelStream

LENGTH, GLOBAL = 45, 8
LAYOUTS = {"dp1": nxd.Mesh(1), "dp2 tp2": nxd.Mesh(4, tp=2), "dp4": nxd.Mesh(4), "dp2 pp2 cp2": nxd.Mesh(8, pp=2, cp=2)}


def loader(kind: str, workers: int = 0) -> Any:
    """The loader of this rank over rows 0..44, by a sampler or as a stream."""
    options: dict[str, Any] = {"num_workers": workers, "collate_fn": lambda rows: [row["n"] for row in rows]}
    data = datasets.Dataset.from_dict({"n": range(LENGTH)})
    if kind == "sampler":
        return StatefulDataLoader(data, batch_sampler=DataParallelBatchSampler(LENGTH, GLOBAL, last="drop"), **options)
    rows: Any = data.to_iterable_dataset(num_shards=3)
    if kind == "shuffled stream":
        rows = rows.shuffle(seed=1, buffer_size=10)
    if kind == "iterable":
        rows = [{"n": n} for n in range(LENGTH)]
    stream = DataParallelStream(rows, GLOBAL, skip=kind == "shuffled stream")
    return StatefulDataLoader(stream, batch_size=GLOBAL // comm.size("dp"), **options)


def batches_of(kind: str, mesh: nxd.Mesh, count: int, state: Any = None) -> tuple[list[list[int]], Any]:
    """The first global batches, over epochs, put together from all ranks; and the state after them."""

    def rank() -> Any:
        rows = loader(kind)
        if state is not None:
            rows.load_state_dict(state)
        found: list[list[int]] = []
        while len(found) < count:
            for batch in rows:
                found.append(batch)
                if len(found) == count:
                    return found, rows.state_dict(), comm.rank("dp")
        raise AssertionError

    results = threads.run(mesh, rank)
    by_dp: dict[int, list[list[int]]] = {}
    for found, _, dp in results:
        assert by_dp.setdefault(dp, found) == found, "ranks of a replica have different rows"
    states = [json.loads(json.dumps(found)) for _, found, _ in results]
    assert kind != "sampler" or all(found == states[0] for found in states)
    return [[n for dp in sorted(by_dp) for n in by_dp[dp][step]] for step in range(count)], states[0]


@pytest.mark.parametrize(
    "kind",
    ["sampler", "iterable", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("stream", "shuffled stream"))],
)
def test_batches_and_resumed_batches_are_those_of_one_process(kind: str) -> None:
    expected, _ = batches_of(kind, LAYOUTS["dp1"], 13)
    for begin in (0, 5):  # two epochs: the rows of a batch differ, and all rows of an epoch do
        rows = [n for batch in expected[begin : begin + 5] for n in batch]
        assert len({*rows}) == 5 * GLOBAL
    assert (expected[:5] == expected[5:10]) == (kind != "sampler" and kind != "shuffled stream")
    for name, mesh in LAYOUTS.items():
        assert batches_of(kind, mesh, 13)[0] == expected, name
    for steps, before, after in ((3, "dp4", "dp2 tp2"), (7, "dp1", "dp4"), (5, "dp2 pp2 cp2", "dp1")):
        first, state = batches_of(kind, LAYOUTS[before], steps)
        then, _ = batches_of(kind, LAYOUTS[after], 13 - steps, state)
        assert first + then == expected, (steps, before, after)


def test_a_saved_position_holds_with_another_batch_size() -> None:
    with comm.as_rank(nxd.Mesh(1), 0):
        sampler = DataParallelBatchSampler(12, 4)
        whole = [row for batch in sampler for row in batch]
        sampler.set_epoch(0)
        next(iter(sampler))
        other = DataParallelBatchSampler(12, 2)
        other.load_state_dict(sampler.state_dict())
        other.set_epoch(0)  # as trainers call it: the loaded position stays
        assert [row for batch in other for row in batch] == whole[4:]
        assert len([*other]) == len(other) == 6 and other.epoch == 2
        other.set_epoch(0)
        assert [row for batch in other for row in batch] == whole


def test_last_rows() -> None:
    def of_epoch(**options: Any) -> list[list[int]]:
        sampler = DataParallelBatchSampler(10, 4, shuffle=False, **options)
        batches = [*sampler]
        assert len(sampler) == len(batches)
        return batches

    with comm.as_rank(nxd.Mesh(2), 1):
        assert of_epoch(last="drop") == [[2, 3], [6, 7]]
        assert of_epoch(last="repeat") == [[2, 3], [6, 7], [0, 1]]
        assert [*DataParallelStream(range(10), 4)] == [2, 3, 6, 7]
        assert [*DataParallelStream(range(10), 4, last="repeat")] == [2, 3, 6, 7, 8, 9]
        assert [*DataParallelBatchSampler(1, 4, last="repeat")] == [[0, 0]]


@pytest.mark.process
def test_positions_of_loaders_that_read_ahead() -> None:
    """The position is that of the batch which the loop has got, not of those that workers have read ahead."""
    with comm.as_rank(nxd.Mesh(1), 0):
        for kind, workers in (("sampler", 2), ("stream", 1)):
            rows = loader(kind, workers)
            iterator = iter(rows)
            next(iterator), next(iterator)
            state, expected = rows.state_dict(), [*iterator]
            again = loader(kind, workers)
            again.load_state_dict(state)
            assert [*again] == expected and len(expected) == 3


@pytest.mark.process
def test_the_epochs_of_a_stream_in_a_worker() -> None:
    """A worker, which gets a copy of the stream for each epoch, goes on to the next one, also after a resume."""
    with comm.as_rank(nxd.Mesh(1), 0):
        rows = loader("shuffled stream", 1)
        expected = [[*rows] for _ in range(3)]
        assert len({str(epoch) for epoch in expected}) == 3 and all(len(epoch) == 5 for epoch in expected)
        rows = loader("shuffled stream", 1)
        assert [*rows] == expected[0]
        iterator = iter(rows)
        assert [next(iterator), next(iterator)] == expected[1][:2]
        again = loader("shuffled stream", 1)
        again.load_state_dict(rows.state_dict())
        assert [[*again], [*again]] == [expected[1][2:], expected[2]]


def test_refusals() -> None:
    with comm.as_rank(nxd.Mesh(4), 0):
        with pytest.raises(ValueError, match="6 rows cannot be divided by 4 data-parallel ranks: take 8"):
            DataParallelBatchSampler(100, 6)
        with pytest.raises(ValueError, match='leave 5 of 45 rows in each epoch: say last="drop"'):
            DataParallelBatchSampler(45, 8)
        with pytest.raises(ValueError, match="4 rows are less than one global batch of 8"):
            DataParallelBatchSampler(4, 8, last="drop")
        for wrong in (DataParallelBatchSampler, DataParallelStream):
            with pytest.raises(ValueError, match="last='keep'"):
                wrong([1] * 8, 8, last="keep")
        sampler = DataParallelBatchSampler(8, 8)
        with pytest.raises(ValueError, match="that of seed=1, and this sampler has seed=0: rows would be lost"):
            sampler.load_state_dict({**sampler.state_dict(), "seed": 1})
        stream = DataParallelStream(range(16), 8)
        next(iter(stream))
        with pytest.raises(ValueError, match="inside of a global batch of 8 rows.*use a batch_size of 2"):
            stream.state_dict()


def test_a_stream_in_several_workers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronx_dist.data.sampling.get_worker_info", lambda: SimpleNamespace(num_workers=2))
    with comm.as_rank(nxd.Mesh(1), 0), pytest.raises(ValueError, match="in 2 workers of a loader would be"):
        next(iter(DataParallelStream(range(8), 4)))


def test_rows_are_shuffled_by_seed_and_epoch() -> None:
    with comm.as_rank(nxd.Mesh(1), 0):
        sampler = DataParallelBatchSampler(64, 64, seed=3)
        sampler.set_epoch(2)
        expected = torch.randperm(64, generator=torch.Generator().manual_seed(5)).tolist()
        assert [*sampler] == [expected]
