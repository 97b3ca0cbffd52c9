"""Arguments and results of forward: containers, defaults, keywords; refusals of recording, with file and line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from neuronx_dist.program.program import Value
from neuronx_dist.program.record import record_program
from neuronx_dist.program.recording import TracingError
from tests.parallelize.support.programs import Function, assert_equal, sample


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    others: list[torch.Tensor]
    scale: float = 2.0


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    parts: dict[str, Any]
    nothing: None = None


class Taking(nn.Module):
    """A module whose forward has the signature of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5).double()
        self.forward = function.__get__(self)  # type: ignore[method-assign]


def _all_kinds(self: Taking, x: Any, /, y: Any, *rest: Any, z: Any = 2.0, flag: bool = False, **more: Any) -> Any:
    assert not rest
    total = self.linear(x) + y + sum(more.values())
    return total * z if flag else total + z


def _nested(self: Taking, batch: dict[str, Any], batches: list[Batch]) -> Any:
    total = batch["a"]["b"][0] * batches[0].scale + sum(item.x + item.others[1] for item in batches)
    return self.linear(total), batch["a"]["c"]


ARGUMENTS: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "position, keywords, more": (
        _all_kinds,
        {"x": sample(), "y": sample(), "flag": True, "extra": sample()},
        ["x", "y", "extra"],
    ),
    "defaults": (_all_kinds, {"x": sample(), "y": 1.5}, ["x"]),
    "a tensor in place of a number": (_all_kinds, {"x": sample(), "y": 1, "z": sample()}, ["x", "z"]),
    "nested": (
        _nested,
        {
            "batch": {"a": {"b": (sample(), 1), "c": "text", "unused": sample()}},
            "batches": [Batch(sample(), [sample(), sample()]), Batch(sample(), [sample(), sample()], 3.0)],
        },
        ["batch.a.b.0", "batch.a.unused"]
        + [f"batches.{index}.{path}" for index in (0, 1) for path in ("x", "others.0", "others.1")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    function, arguments, paths = ARGUMENTS[name]
    module = Taking(function)
    program = record_program(module, arguments, training=True)
    assert sorted(value.path for value in program.inputs) == sorted(paths)
    assert all(value.kind == "input" for value in program.inputs)


def test_nested_arguments_are_equal() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5).double()

        def forward(self, batch: dict[str, Any], batches: list[Batch], flag: bool = True) -> Any:
            return _nested(self, batch, batches)  # type: ignore[arg-type]

    program = assert_equal(Nested(), ARGUMENTS["nested"][1])
    assert [leaf for leaf in program.arguments if not isinstance(leaf, Value)] == [1, "text", 2.0, 3.0]


OUTPUTS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda x, w: {"loss": (x * w).sum(), "x": [x, (w, 3)], "text": "text"},
    "tuple": lambda x, w: (x * w, None, w.sum()),
    "dataclass": lambda x, w: Result((x * w).sum(), {"a": w + 1}),
    "ModelOutput": lambda x, w: transformers.modeling_outputs.CausalLMOutput(loss=(x * w).sum(), logits=w * 2),
    "None": lambda x, w: None,
    "a parameter, an input, a constant": lambda x, w: (w, x, torch.ones(2)),
    "a named tuple": lambda x, w: (w * x).max(1),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name: str) -> None:
    program = assert_equal(Function(lambda self, x: OUTPUTS[name](x, self.weight)), {"x": sample()})
    assert not program.calls or name != "None"


# --- refused ---


def _branches(self: Function, x: torch.Tensor) -> torch.Tensor:
    y = x * self.weight
    return y if y.sum() > 0 else -y


def _reads_an_item(self: Function, x: torch.Tensor) -> torch.Tensor:
    return x * self.weight.sum().item()


def _loops_over_values(self: Function, x: torch.Tensor) -> torch.Tensor:
    for _ in range(int(x.abs().max())):
        x = x * self.weight
    return x


VALUES = {
    "a branch": (_branches, "y if y.sum() > 0", "__bool__"),
    "an item": (_reads_an_item, "x * self.weight.sum().item()", "item"),
    "a number of rounds": (_loops_over_values, "in range(int(x", "__int__"),
    "a list": (lambda self, x: self.weight * x.tolist()[0][0], "x.tolist()", "(tolist|item)"),
    "positions of a mask": (lambda self, x: self.weight[x > 0], "self.weight[x > 0]", "__getitem__"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_cannot_be_branched_on(name: str) -> None:
    forward, text, function = VALUES[name]
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, source in enumerate(lines, 1) if text in source)
    where = rf"{re.escape(__file__)}:{line}: {function} needs the values"
    message = rf"{where} .* recorded once .* torch.where\(condition, a, b\) or a mask"
    with pytest.raises(TracingError, match=message) as caught:
        record_program(Function(forward), {"x": sample()}, training=True)
    assert "pipeline" not in str(caught.value)


def _unseen(self: Function, x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        y = x * 2
    return y * self.weight


def test_calls_that_nobody_sees() -> None:
    with pytest.raises(TracingError, match=rf"{re.escape(__file__)}:\d+: .* comes from a call .* register_op"):
        record_program(Function(_unseen), {"x": sample()}, training=True)


BAD: dict[str, tuple[Any, str]] = {
    "unknown": (
        {"x": sample(), "batchs": []},
        r"forward of Named takes no argument 'batchs'. Did you mean batches\? It takes x, batches, \*args, scale=1.0\.",
    ),
    "missing": ({"x": sample()}, "forward of Named needs batches, missing in the dummy arguments. It takes x, "),
    "of another type": (
        {"x": [1.0], "batches": 1},
        r"dummy argument x of forward of Named is \(1.0\), but forward takes a tensor",
    ),
    "of numpy": (
        {"x": sample(), "batches": {"a": [sample().numpy()]}},
        r"argument batches\['a'\]\[0\] .* is a ndarray: convert it by torch\.from_numpy",
    ),
    "rest of the positions": (
        {"x": sample(), "batches": 1, "args": (1,)},
        r"takes \*args, which dummy arguments cannot pass by name",
    ),
    "no dict": (
        [sample()],
        r"dummy arguments of forward of Named must be a dict from names to values.*got \(Tensor\[6, 5\]\)",
    ),
    "no names": ({0: sample()}, "must be a dict from names to values"),
}


class Named(nn.Module):
    def forward(self, x: torch.Tensor, batches: Any, *args: Any, scale: float = 1.0) -> torch.Tensor:
        return x


@pytest.mark.parametrize("name", BAD)
def test_dummy_arguments_that_forward_does_not_take(name: str) -> None:
    arguments, message = BAD[name]
    with pytest.raises(TypeError, match=message):
        record_program(Named(), arguments, training=True)


def test_a_forward_that_fails_leaves_the_module_as_it_was() -> None:
    module = Function(_branches)
    module.linear = nn.Dropout(0.5)
    before = [dict(m.__dict__) for m in module.modules()], module.weight, module.total
    with pytest.raises(TracingError):
        record_program(module, {"x": sample()}, training=False)
    assert before == ([dict(m.__dict__) for m in module.modules()], module.weight, module.total)
    assert module.training and module.linear.training
