"""Messages about a checkpoint that does not fit a model, word for word."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.hf.mismatch import check_fit
from neuronx_dist.hf.sources import StateDict
from neuronx_dist.mesh import Mesh

WHAT = "a state dict of {} tensors"


class Model:
    """A base model `bert` and a head `classifier`."""

    base_model_prefix = "bert"
    bert: Any = None


def names(*shapes: str) -> list[tuple[list[str], tuple[int, ...]]]:
    """`a|b:2,3` is a tensor of two names and shape (2, 3)."""
    pairs = [shape.partition(":") for shape in shapes]
    return [(name.split("|"), tuple(int(size) for size in sizes.split(",") if size)) for name, _, sizes in pairs]


def source(*shapes: str) -> StateDict:
    return StateDict({key: torch.zeros(shape) for keys, shape in names(*shapes) for key in keys})


def verdict(model: Any, expected: Sequence[str], present: Sequence[str]) -> str:
    """The error, or the warning, without the words that all of them begin with; "" if it fits."""
    weights = source(*present)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            check_fit(model, names(*expected), weights)
        except ValueError as error:
            assert not caught
            begin = f"load_pretrained: {WHAT.format(len(weights.tensors))} does not fit {type(model).__name__}: "
            assert str(error).startswith(begin)
            return "error: " + str(error)[len(begin) :]
    if not caught:
        return ""
    (warning,) = caught
    begin = f"load_pretrained: {WHAT.format(len(weights.tensors))} into {type(model).__name__}: "
    assert str(warning.message).startswith(begin)
    return "warning: " + str(warning.message)[len(begin) :]


CASES: list[tuple[Sequence[str], Sequence[str], str]] = [
    (["bert.a:2"], ["bert.a:2"], ""),
    ([], ["x:1"], "warning: not used: x"),
    ([], [], ""),
    (["bert.a|bert.b:2"], ["bert.b:2"], ""),  # one of the names of a tied weight
    (["bert.a:2"], [], "error: missing (1): bert.a [2]"),
    (["bert.a|bert.b:2,3"], [], "error: missing (1): bert.a or bert.b [2, 3]"),
    (["bert.a:2"], ["bert.a:3"], "error: of another shape (1): bert.a [3], needs [2]"),
    (["bert.a|bert.b:2"], ["bert.a:2", "bert.b:1"], "error: of another shape (1): bert.b [1], needs [2]"),
    (["bert.a:2"], ["bert.a:2", "z:1", "y:1"], "warning: not used: y, z"),
    (["bert.a:2"], ["bert.zz:1"], "error: missing (1): bert.a [2] (there is bert.zz); unexpected (1): bert.zz"),
    (["bert.one:2"], ["q:1"], "error: missing (1): bert.one [2]; unexpected (1): q"),
    # a name with a prefix more, or less, is the nearest, whatever is more similar
    (
        ["bert.x.weight:2"],
        ["bert.y.weight:2", "module.bert.x.weight:2"],
        "error: missing (1): bert.x.weight [2] (there is module.bert.x.weight); "
        "unexpected (2): bert.y.weight, module.bert.x.weight",
    ),
    (["bert.x.w:2"], ["w:2"], "error: missing (1): bert.x.w [2] (there is w); unexpected (1): w"),
    (["bert.x.w:2"], ["kkw:2"], "error: missing (1): bert.x.w [2]; unexpected (1): kkw"),  # no name of its own
    # a head outside of the base model, and a pooler anywhere, may be new
    (["bert.a:1", "classifier.w:2"], ["bert.a:1"], "warning: missing there, so newly initialised: classifier.w"),
    (["bert.pooler.w:2"], [], "warning: missing there, so newly initialised: bert.pooler.w"),
    (["bert.mypooler.w:2"], [], "error: missing (1): bert.mypooler.w [2]"),
    (["classifier.w|bert.w:2"], [], "error: missing (1): classifier.w or bert.w [2]"),
    (
        ["bert.a:1", "head.w|head.v:2"],
        ["bert.a:1", "old.w:3"],
        "warning: missing there, so newly initialised: head.w; not used: old.w",
    ),
    (
        ["bert.a:1", "bert.b:1", "head.w:1"],
        ["bert.b:2", "old:1"],
        "error: missing (1): bert.a [1]; of another shape (1): bert.b [2], needs [1]; unexpected (1): old",
    ),
    # what old checkpoints have besides weights
    (["bert.a:1"], ["bert.a:1", "bert.x.rotary_emb.inv_freq:4", "position_ids:1", "e.position_ids:1"], ""),
    (["bert.a:1"], ["bert.a:1", "my_position_ids:1"], "warning: not used: my_position_ids"),
    (["bert.a:1"], ["bert.a:1", "rotary_emb.inv_freq.x:1"], "warning: not used: rotary_emb.inv_freq.x"),
]


@pytest.mark.parametrize("expected, present, text", CASES)
def test_what_does_not_fit(expected: Sequence[str], present: Sequence[str], text: str) -> None:
    assert verdict(Model(), expected, present) == text


def test_without_a_base_model_all_is_needed() -> None:
    for model in (SimpleNamespace(), SimpleNamespace(base_model_prefix=""), SimpleNamespace(base_model_prefix="bert")):
        assert verdict(model, ["head.w:1"], []) == "error: missing (1): head.w [1]"
        assert verdict(model, ["pooler.w:1"], []).startswith("warning: missing there, so newly initialised")


def test_what_the_class_says_of_missing_and_unexpected_names() -> None:
    class Own(Model):
        _keys_to_ignore_on_load_missing = (r"mask$",)
        _keys_to_ignore_on_load_unexpected = (r"^cls\.",)

    assert verdict(Own(), ["bert.mask:1"], ["cls.w:1"]) == ""
    assert verdict(Own(), ["bert.mask|bert.other:1"], []) == "error: missing (1): bert.mask or bert.other [1]"
    assert verdict(Own(), ["bert.masks:1"], []) == "error: missing (1): bert.masks [1]"
    assert verdict(Own(), [], ["cls.w:1", "a.cls.w:1"]) == "warning: not used: a.cls.w"
    for nothing in (None, ()):
        own: Any = SimpleNamespace(_keys_to_ignore_on_load_missing=nothing, _keys_to_ignore_on_load_unexpected=nothing)
        assert verdict(own, ["a:1"], []) == "error: missing (1): a [1]"


@pytest.mark.parametrize("count, more", [(20, ""), (21, " and 1 more"), (25, " and 5 more")])
def test_twenty_of_many_are_listed(count: int, more: str) -> None:
    keys = [f"bert.{number:02}" for number in range(count)]
    listed = ", ".join(f"{key} [1]" for key in keys[:20])
    assert verdict(Model(), [f"{key}:1" for key in keys], []) == f"error: missing ({count}): {listed}{more}"
    assert verdict(Model(), [], [f"{key}:1" for key in keys]) == f"warning: not used: {', '.join(keys[:20])}{more}"


def test_one_rank_warns_and_every_rank_refuses() -> None:
    for rank in (0, 1):
        with comm.as_rank(Mesh(2, tp=2), rank):
            assert verdict(Model(), [], ["x:1"]) == ("warning: not used: x" if rank == 0 else "")
            assert verdict(Model(), ["bert.a:1"], []) == "error: missing (1): bert.a [1]"


@pytest.mark.parametrize(
    "expected, present, text",
    [
        (["bert.a:2"], ["bert.a:2", "c:1"], "not used: c"),
        (["bert.a:2", "classifier.w:1"], ["bert.a:2"], "missing there, so newly initialised: classifier.w"),
    ],
)
def test_strict_refuses_what_is_warned_of(expected: list[str], present: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=f"tensors into Model, strict=True: {text}$"):
        check_fit(Model(), names(*expected), source(*present), strict=True)
    check_fit(Model(), names("bert.a:2"), source("bert.a:2"), strict=True)
