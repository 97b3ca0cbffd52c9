"""A batch in pieces: rows, names, the key by which a recording serves, devices and modes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist.pipeline.run import microbatches
from neuronx_dist.pipeline.run.microbatches import Batch, evaluating

CPU = torch.device("cpu")
ROWS = torch.arange(12.0).view(6, 2)


def test_pieces_of_every_tensor_and_the_rest_whole() -> None:
    scale = torch.tensor(3.0)
    batch = Batch({"x": ROWS, "more": {"mask": ROWS[:, 0], "scale": scale}, "flag": True, "text": "a"}, None, 3)
    assert [leaf if not isinstance(leaf, torch.Tensor) else leaf.shape for leaf in batch.leaves] == [
        True, (6,), (), "a", (6, 2),
    ]  # fmt: skip
    assert batch.constants() == [True, "a"]
    pieces = batch.microbatches([4, 1, 2], CPU)
    assert [[*piece] for piece in pieces] == [[4, 1, 2]] * 3
    for index, piece in enumerate(pieces):
        assert torch.equal(piece[4], ROWS[2 * index : 2 * index + 2])
        assert torch.equal(piece[1], ROWS[2 * index : 2 * index + 2, 0]) and piece[2] is scale
    example = batch.example()
    assert [*example] == ["flag", "more", "text", "x"] and torch.equal(example["x"], ROWS[:2])
    assert example["flag"] is True and example["more"]["scale"] is scale
    (whole,) = Batch({"x": ROWS}, None, 1).microbatches([0], CPU)
    assert whole[0] is ROWS


def test_inputs_are_in_the_order_of_their_names() -> None:
    given = {"b": 1, "a": 2, "c": None}
    assert Batch(given, ["c", "b", "a"], 1).leaves == [None, 1, 2]
    assert Batch(given, None, 1).leaves == [2, 1, None]
    assert [*Batch(given, ["c", "b", "a"], 1).example()] == ["c", "b", "a"]


@pytest.mark.parametrize(
    "names, message",
    [
        (["x", "y"], r"exactly input_names \['x', 'y'\]: missing \['y'\], unexpected none \(pass None"),
        ([], r"exactly input_names \[\]: missing none, unexpected \['x'\]"),
        (["y"], r"missing \['y'\], unexpected \['x'\]"),
    ],
)
def test_names_that_do_not_fit(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batch({"x": ROWS}, names, 1)


@pytest.mark.parametrize(
    "rows, pieces, message",
    [
        (0, 2, r"input \['a'\]\[1\] has shape \[0, 2\], no rows, .* at least one row for each of 2 microbatches"),
        (5, 2, r"input \['a'\]\[1\] has 5 rows, which is not divisible into 2 microbatches: nearest are 4 and 6$"),
        (2, 3, r"has 2 rows, which is not divisible into 3 microbatches: nearest is 3$"),
        (7, 3, r"nearest are 6 and 9$"),
    ],
)
def test_rows_that_cannot_be_cut(rows: int, pieces: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batch({"a": [torch.ones(6, 1), torch.ones(rows, 2)]}, None, pieces)


def test_one_key_for_batches_that_one_recording_serves() -> None:
    def key(x: Any = ROWS, pieces: int = 2, **more: Any) -> Any:
        return Batch({"x": x, **more}, None, pieces).key()

    assert key() == key(torch.zeros(6, 2)) == key(torch.ones(9, 2), 3)  # three rows in a piece
    assert key(scale=torch.tensor(1.0)) == key(scale=torch.tensor(2.0))
    different = [
        key(), key(ROWS.int()), key(ROWS.clone().requires_grad_()), key(ROWS[:4]), key(ROWS[:, :1].contiguous()),
        key(torch.ones(2, 6).t()), key(y=1), key(y=2), key(y=1.0), key(y=True), key(y=None), key(y=[1]), key(z=1),
        key(scale=torch.tensor(1.0)), key([ROWS]),
    ]  # fmt: skip
    for index, one in enumerate(different):
        assert [one == other for other in different].index(True) == index
    odd: Any = type("Odd", (), {"__hash__": None, "__eq__": lambda self, other: True})
    first, second = odd(), odd()  # without a hash objects are compared by identity
    assert key(y=first) == key(y=first) and key(y=first) != key(y=second)


def test_values_are_needed_unless_none_are_computed() -> None:
    batch = Batch({"a": ROWS, "b": {"c": ROWS.to("meta")}}, None, 2)
    assert len(batch.microbatches([0], CPU)) == 2
    with pytest.raises(ValueError, match=r"input \['b'\]\['c'\] is on the meta device, where it has no values"):
        batch.microbatches([0, 1], CPU)
    assert all(piece[1].is_meta for piece in batch.microbatches([0, 1], torch.device("meta")))


def test_numbers_are_uploaded_and_rows_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """On XLA a 0-dim tensor that is moved would be a constant of the program."""
    calls: list[Any] = []
    monkeypatch.setattr(microbatches, "upload", lambda x, device: calls.append((x.ndim, device)) or x)
    moved = SimpleNamespace(ndim=1, is_meta=False, shape=(2,), narrow=lambda *where: where)
    rows: Any = SimpleNamespace(
        ndim=1, is_meta=False, to=lambda *args, **options: calls.append((args, options)) or moved
    )
    batch = Batch({"n": torch.tensor(1.0)}, None, 2)
    batch.leaves = [torch.tensor(1.0), rows]
    batch.microbatches([0, 1], CPU)
    assert calls == [(0, CPU), ((CPU,), {"non_blocking": True})]


def test_modes_are_set_back_one_by_one() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Dropout()))
    model[1].eval()
    model[1][1].train()
    before = [module.training for module in model.modules()]
    with pytest.raises(RuntimeError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise RuntimeError
    assert [module.training for module in model.modules()] == before == [True, True, False, False, True]
