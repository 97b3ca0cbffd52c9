"""This rank's part of a batch, and the split that positions show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.attention.batch import forget_split, labels_are_shifted, shift_labels, split_of_positions
from neuronx_dist.attention.context_parallel import split_of
from neuronx_dist.mesh import Mesh

IDS = torch.arange(1, 17).reshape(2, 8)
LABELS = torch.where(IDS == 5, -100, IDS)


@pytest.mark.parametrize(
    "balance, places", [(None, [[0, 1, 2, 3], [4, 5, 6, 7]]), ("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]])]
)
def test_labels_are_shifted_before_the_split_and_positions_match(balance: str | None, places: list[list[int]]) -> None:
    def rank() -> dict[str, Any]:
        return nxd.get_batch_on_this_context_parallel_rank({"input_ids": IDS, "labels": LABELS, "n": 3}, balance)

    shifted = torch.cat([LABELS[:, 1:], torch.full((2, 1), -100)], 1)
    for part, columns in zip(comm.threads.run(Mesh(2, cp=2), rank), places):
        assert torch.equal(part["input_ids"], IDS[:, columns]) and torch.equal(part["labels"], shifted[:, columns])
        assert part["position_ids"].tolist() == [columns] * 2 and part["n"] == 3


def test_one_rank_has_the_batch_as_it_is() -> None:
    batch = {"input_ids": IDS, "labels": LABELS}
    assert comm.threads.run(Mesh(2), lambda: nxd.get_batch_on_this_context_parallel_rank(batch, "zigzag") is batch)[0]


@pytest.mark.parametrize("balance, divisor", [(None, 2), ("zigzag", 4)])
def test_a_sequence_that_cp_does_not_divide_is_refused(balance: str | None, divisor: int) -> None:
    def rank() -> None:
        with pytest.raises(ValueError, match=rf"does not divide by {divisor} .* pad it to 8"):
            nxd.get_batch_on_this_context_parallel_rank({"input_ids": IDS[:, :7]}, balance)

    comm.threads.run(Mesh(2, cp=2), rank)


@pytest.mark.parametrize("balance", [None, "zigzag"])
def test_positions_show_the_split_and_the_documents(balance: str | None) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]])

    def rank() -> Any:
        part = nxd.get_batch_on_this_context_parallel_rank({"position_ids": positions.clone()}, balance)
        with comm.record() as calls:
            first = split_of_positions(part["position_ids"])
            assert split_of_positions(part["position_ids"]) == first and len(calls) == 1  # asked once
        part["position_ids"] += 0
        with comm.record() as calls:
            assert split_of_positions(part["position_ids"]) == first and len(calls) == 1  # written in place
        return first

    runs = (((0, 2), (6, 8)), ((2, 4), (4, 6))) if balance else (((0, 4),), ((4, 8),))
    for split, documents in comm.threads.run(Mesh(2, cp=2), rank):
        assert split.positions == runs and documents == (((0, 3), (3, 8)), ((0, 8),))


def _batch(**more: Any) -> dict[str, Any]:
    return {"input_ids": IDS, "labels": LABELS, **more}


def _of_this_rank() -> dict[str, Any]:
    return _batch(input_ids=IDS + comm.rank("cp"))


MASK = torch.tensor([[1] * 6 + [0] * 2, [1] * 8])


@pytest.mark.parametrize(
    "make, words",
    [
        (_of_this_rank, r"ranks 0 and 1 .* different input_ids in the first batch: .*get_data_parallel_rank"),
        (lambda: _batch(attention_mask=MASK.flip(1)), r"attention_mask \[2, 8\] hides 2 tokens, .* pad on the right"),
        (lambda: _batch(attention_mask=torch.ones(2, 1, 8, 8)), r"attention_mask \[2, 1, 8, 8\] is one of pairs"),
        (lambda: _batch(attention_mask=MASK[:, None]), r"attention_mask \[2, 1, 8\] hides 2 tokens, .* pad on the"),
        (lambda: _batch(attention_mask=MASK), r"hides 2 tokens, of which 2 have labels: .* set labels\[attention_mask"),
        (lambda: _batch(labels=torch.zeros(2)), r"labels \[2\] must have 2 dims, and in dim 1 the sequence of input_"),
        (lambda: _batch(position_ids=IDS.expand(3, 2, 8)), r"position_ids \[3, 2, 8\] must have 2 dims"),
        (lambda: _batch(labels=LABELS[:, :4]), r"labels \[2, 4\] .* of input_ids \[2, 8\]"),
        (lambda: {"tokens": IDS}, "batch of tokens has no tensor input_ids or inputs_embeds or labels or position_ids"),
    ],
)
def test_batches_that_are_not_of_the_same_sequences_are_refused_on_all_ranks(make: Any, words: str) -> None:
    def rank() -> None:
        with pytest.raises(ValueError, match=words):
            nxd.get_batch_on_this_context_parallel_rank(make())

    comm.threads.run(Mesh(2, cp=2), rank)


def test_tensors_of_another_length_stay_and_a_mask_of_ones_is_left_out() -> None:
    def rank() -> dict[str, Any]:
        sizes, mask = torch.tensor([[640, 480]] * 2), torch.ones_like(IDS)
        return nxd.get_batch_on_this_context_parallel_rank(_batch(image_sizes=sizes, attention_mask=mask))

    def padded(dtype: torch.dtype) -> torch.Tensor:
        labels = LABELS.masked_fill(MASK == 0, -100)
        return nxd.get_batch_on_this_context_parallel_rank(_batch(attention_mask=MASK.to(dtype), labels=labels))[
            "position_ids"
        ]

    for places in comm.threads.run(Mesh(2, cp=2), lambda: [*map(padded, (torch.long, torch.bool, torch.float32))]):
        assert torch.equal(places[0], places[1]) and torch.equal(places[0], places[2])
    part = comm.threads.run(Mesh(2, cp=2), rank)[0]
    assert part["image_sizes"].tolist() == [[640, 480]] * 2 and "attention_mask" not in part


def test_labels_shifted_before_and_parts_split_again_are_refused() -> None:
    shifted = shift_labels({"labels": LABELS})["labels"]

    def rank() -> None:
        with pytest.raises(ValueError, match="each label is the token after its place .* pass those of transformers"):
            nxd.get_batch_on_this_context_parallel_rank({"input_ids": IDS, "labels": shifted})
        part = nxd.get_batch_on_this_context_parallel_rank({"input_ids": IDS, "labels": LABELS})
        with pytest.raises(ValueError, match="input_ids, labels, position_ids of the batch are parts .* already"):
            nxd.get_batch_on_this_context_parallel_rank(part)

    comm.threads.run(Mesh(2, cp=2), rank)


def test_labels_have_a_sequence() -> None:
    with pytest.raises(ValueError, match=r"labels \[2\] must be \[batch, sequence\]"):
        shift_labels({"labels": torch.zeros(2)})


def test_workers_of_a_data_loader_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronx_dist.attention.batch.get_worker_info", lambda: "a worker")
    with (
        comm.as_rank(Mesh(2, cp=2), 0),
        pytest.raises(ValueError, match=r"call it in the training loop, or use DataLoader\(num_workers=0\)"),
    ):
        nxd.get_batch_on_this_context_parallel_rank({"input_ids": IDS})


def _meaning(split: Any, documents: Any) -> list[tuple[int, ...]]:
    """Returns, for each token in the order of ranks, the tokens of one row that it sees, by that order."""
    places = [place for runs in split.positions for run in runs for place in range(*run)]
    return [
        tuple(
            sorted(
                places.index(other)
                for start, stop in (documents[0] if documents else ((0, len(places)),))
                if start <= place < stop
                for other in range(start, place + 1)
            )
        )
        for place in places
    ]


# Lengths of documents whose parts in zig-zag order can be read as contiguous parts of others.
AMBIGUOUS = [(4, 4, 8), (4, 4, 4, 4), (8, 8), (1, 3, 4, 2, 6), (4, 8, 4), (1, 1, 2) * 4]


@pytest.mark.parametrize("balance", [None, "zigzag"])
def test_positions_of_both_splits_are_read_as_the_batch_was_split(balance: str | None) -> None:
    def rank() -> None:
        for lengths in AMBIGUOUS:
            positions = torch.cat([torch.arange(length) for length in lengths])[None]
            part = nxd.get_batch_on_this_context_parallel_rank({"position_ids": positions}, balance)
            bounds = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
            wanted = _meaning(split_of((8, 8), balance), [list(zip(bounds, bounds[1:]))])
            assert _meaning(*split_of_positions(part["position_ids"])) == wanted, lengths

    comm.threads.run(Mesh(2, cp=2), rank)


@pytest.mark.parametrize("balances, words", [((), "not called on this rank"), ((None, "zigzag"), "'None', 'zigzag'")])
def test_positions_of_both_splits_are_refused_where_no_call_says_which(balances: Any, words: str) -> None:
    """Documents of 4, 4 and 8 tokens in zig-zag order."""

    def rank() -> None:
        for balance in balances:
            nxd.get_batch_on_this_context_parallel_rank({"input_ids": IDS}, balance)
        start = torch.arange(4)
        positions = torch.cat([start, start + 4] if comm.rank("cp") == 0 else [start, start])[None]
        with pytest.raises(ValueError, match=f'can be contiguous parts or "zigzag" order.*{words}'):
            split_of_positions(positions)

    comm.threads.run(Mesh(2, cp=2), rank)


def test_positions_of_inference_mode_and_of_memory_written_by_numpy() -> None:
    def rank() -> None:
        positions = torch.arange(4)[None] + 4 * comm.rank("cp")
        with torch.inference_mode():
            inference = positions.clone()
            with comm.record() as calls:
                assert split_of_positions(inference) == split_of_positions(inference) and len(calls) == 1
        assert split_of_positions(positions)[1] is None
        positions.numpy()[:] = range(4)  # two documents
        forget_split(positions)
        assert split_of_positions(positions)[1] == (((0, 4), (4, 8)),)

    comm.threads.run(Mesh(2, cp=2), rank)


SAME = torch.tensor([[5] * 8, [6] * 8])  # each predicts itself
TWO = torch.tensor([[5, 5, 5, 5, 5, 5, 7, 7]])  # in zig-zag order rank 0 has 5 5 7 7


@pytest.mark.parametrize(
    "rows, balance, ignored, shifted, wanted",
    [
        (IDS, None, [], True, True),
        (IDS, None, [], False, False),
        (IDS, None, list(range(8)), True, None),
        (SAME, None, [], True, None),
        (TWO, "zigzag", [6], True, None),
        (torch.tensor([[5, 6, 7, 8, 9, 9, 9, 9]]), None, [], True, True),  # rank 1 alone cannot see it
    ],
)
def test_labels_that_nobody_shifted_show_on_all_ranks(
    rows: torch.Tensor, balance: str | None, ignored: list[int], shifted: bool, wanted: bool | None
) -> None:
    labels = rows.clone()
    labels[:, ignored] = -100

    def rank() -> bool | None:
        part = nxd.get_batch_on_this_context_parallel_rank({"input_ids": rows, "labels": labels}, balance)
        found = part["labels"] if shifted else part["input_ids"]
        return labels_are_shifted(part["input_ids"], found, part["position_ids"])

    assert comm.threads.run(Mesh(2, cp=2), rank) == [wanted] * 2


def gathered_positions() -> None:
    def rank() -> None:
        part = nxd.get_batch_on_this_context_parallel_rank({"input_ids": IDS}, "zigzag")
        try:
            split, _ = split_of_positions(part["position_ids"])
        except ValueError:
            split = None
        assert split is not None and split.positions[0] == ((0, 2), (6, 8))

    comm.threads.run(Mesh(2, cp=2), rank)
