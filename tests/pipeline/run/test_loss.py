"""Specs of the loss: ones that fit, and messages that show spec and output where one does not."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline.run.step_loss import find_loss
from neuronx_dist.program.recorder import record
from neuronx_dist.program.recording import describe


class Named(NamedTuple):
    loss: torch.Tensor
    x: torch.Tensor


class Output(OrderedDict[str, Any]):
    """A dict of another class, like Hugging Face's outputs."""


pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output)),
    lambda values, keys: Output(zip(keys, values)),
    serialized_type_name="tests.pipeline.run.test_loss.Output",
)


class Returning(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        loss = x.mean()
        return {
            "tensor": loss,
            "tuple": (loss, x),
            "list": [x, loss],
            "named": Named(loss, x),
            "dict": {"loss": loss, "x": x},
            "output": Output(loss=loss, x=x),
            "nested": ({"x": x, "all": [None, loss]}, 3),
        }[self.form]


def found(form: str, spec: Any) -> str:
    with comm.as_rank(Mesh(1), 0):
        return find_loss(record(Returning(form), {"x": torch.zeros(2, 3)}), spec).name


@pytest.mark.parametrize(
    "form,spec",
    [
        ("tensor", True),
        ("tuple", (True, False)),
        ("tuple", [True, None]),
        ("list", (False, True)),
        ("named", (True, False)),
        ("dict", {"loss": True, "x": False}),
        ("dict", {"loss": True}),
        ("output", {"loss": True}),
        ("nested", ({"x": False, "all": (False, True)}, False)),
    ],
)
def test_specs_that_fit(form: str, spec: Any) -> None:
    assert found(form, spec) == "mean"


TUPLE, DICT = "(Tensor[], Tensor[2, 3])", "{'loss': Tensor[], 'x': Tensor[2, 3]}"


def test_long_containers_are_shortened_in_messages() -> None:
    assert describe([*range(9)]) == "(0, 1, 2, 3, 4, 5, 6, 7, ... 9 in all)"
    assert describe({"a": ["x", 1.5, True, None]}) == "{'a': (str, 1.5, True, None)}"


@pytest.mark.parametrize(
    "form,spec,output,message",
    [
        ("dict", (True, False), DICT, "the model's output is no tuple; a spec for it is a dict, such as {'loss': T"),
        ("output", (True, False), f"Output{DICT}", "the model's output is no tuple; a spec for it is a dict"),
        ("tuple", {"loss": True}, TUPLE, "the model's output is no dict; a spec for it is a tuple, such as (Tr"),
        ("tensor", (True,), "Tensor[]", "the model's output is no tuple; a spec for it is True"),
        ("tensor", {"loss": True}, "Tensor[]", "the model's output is no dict; a spec for it is True"),
        ("tuple", (True,), TUPLE, "the model's output has 2 entries, the spec 1"),
        ("tuple", (True, False, False), TUPLE, "the model's output has 2 entries, the spec 3"),
        ("dict", {"lost": True}, DICT, "the model's output has no 'lost' (are labels among the inputs?)"),
        ("dict", {"loss": True, "logits": False}, DICT, "the model's output has no 'logits'"),
        ("dict", {"x": True}, DICT, "it marks Tensor[2, 3] as the loss, which is no scalar tensor: are labels "),
        ("tuple", (False, False), TUPLE, "it marks 0 outputs as the loss: mark one with True"),
        ("dict", {}, DICT, "it marks 0 outputs"),
        ("tuple", (True, True), TUPLE, "it marks 2 outputs"),
        ("tensor", "loss", "Tensor[]", "a spec consists of True, False, tuples and dicts, not of 'loss'"),
        ("tuple", (1.5, 0), TUPLE, "a spec consists of True, False, tuples and dicts, not of 1.5"),
        ("nested", ({"all": (True, 0)}, 0), "({'x': Tensor[2, 3], 'all': (None, Tensor[])}, 3)", "it marks None as"),
        ("nested", ({"all": {"y": True}}, 0), "({'x': Tensor[2, 3], ", "the model's output[0]['all'] is no dict"),
    ],
)  # fmt: skip
def test_specs_that_do_not_fit(form: str, spec: Any, output: str, message: str) -> None:
    head = f"output_loss_value_spec={spec!r} does not fit the model's output {output}"
    with pytest.raises(ValueError, match=f"^{re.escape(head)}.*: {re.escape(message)}"):
        found(form, spec)
