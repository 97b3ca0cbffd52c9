"""The reader of the user's source: the parts of an expression, their values, and where edits go."""

from __future__ import annotations

import ast
import gc
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist.checking.types.judge import Operand
from neuronx_dist.checking.types.messages import provenance, syntax, trials
from neuronx_dist.checking.types.messages.provenance import Named, Site, editable, name_operands, value_of
from neuronx_dist.checking.types.messages.trials import Edit, Repair, atom_of, blocks_gathered, call_of, edit_of, route
from neuronx_dist.rules import RULES
from neuronx_dist.spmd import I, P, R, S, V
from neuronx_dist.spmd.tensor_type import TensorType
from neuronx_dist.spmd.types import Shard, scaled

x, y = torch.ones(2), torch.ones(3)
model = nn.Sequential(nn.Linear(2, 2))
model.register_buffer("scale", torch.ones(1))
box = {"x": x, "list": [x, y]}


def site(source: str, statement: int = -1) -> Site:
    """Returns the call site of the last expression of a source, as if it were evaluated in this module."""
    tree = syntax.syntax_tree(source)
    node: Any = tree.body[statement]
    while isinstance(node, (ast.Expr, ast.Assign, ast.Return)):
        node = node.value
    return Site(sys._getframe(), __file__, source, node)  # whose locals are no tensors


OPERANDS = {
    "f(x, 2, key=y)": ["x", "2", "y"],
    "x.add(y)": ["x", "y"],
    "torch.add(x, y)": ["x", "y"],
    "model(x)": ["x"],
    "torch.cat([x, y], 1)": ["x", "y", "1"],
    "x + y": ["x", "y"],
    "x < y": ["x", "y"],
    "-x": ["x"],
    "x.T": ["x"],
    "x[y, 1:]": ["x", "y", "1:"],
    "x[y]": ["x", "y"],
}


@pytest.mark.parametrize("source", OPERANDS)
def test_parts_that_may_be_operands(source):
    here = site(source)
    assert [here.text(part) for part in provenance.arguments(here)] == OPERANDS[source]


def test_parts_of_statements():
    source = "x[y] = torch.ones(2)\nx += y\n"
    tree = syntax.syntax_tree(source)
    target, augmented = tree.body[0].targets[0], tree.body[1]
    here = Site(sys._getframe(), __file__, source, target)
    assert [here.text(part) for part in provenance.arguments(here)] == ["x", "y", "torch.ones(2)"]
    here = here._replace(node=augmented)
    assert [here.text(part) for part in provenance.arguments(here)] == ["x", "y"]
    assert here.statement() is augmented


VALUES = {
    "x": x,
    "3": 3,
    "model[0].weight": provenance._UNKNOWN,  # __getitem__ of a module would run code
    "model.scale": model.scale,
    "model.nothing": provenance._UNKNOWN,
    "x.grad": provenance._UNKNOWN,
    "torch.relu": torch.relu,
    "box['x']": x,
    "box['list'][1]": y,
    "box['list'][7]": provenance._UNKNOWN,
    "box[x]": provenance._UNKNOWN,
    "unheard_of": provenance._UNKNOWN,
    "x + y": provenance._UNKNOWN,
    "-1": None,
    "(x, y)": None,
}


@pytest.mark.parametrize("source", VALUES)
def test_values_without_running_code(source):
    assert value_of(ast.parse(source, mode="eval").body, sys._getframe()) is VALUES[source]


NAMES = {
    ("torch.add(x, y)", "x y"): [("x", "x"), ("y", "y")],
    ("torch.add(y, x)", "x y"): [("x", "x"), ("y", "y")],
    ("torch.mul(x, x)", "x x"): [("x", "x"), ("x", "x")],
    ("torch.add(x, y.relu())", "x other"): [("x", "x"), ("y.relu()", "y.relu()")],
    ("torch.add(x, [x for x in y])", "x other"): [("x", "x"), ("", "<operand 1>")],
    ("f(3)", "weight"): [("weight", "<weight>")],
    ("f(model)", "parameter"): [("model[0].weight", "model[0].weight")],
    ("f(box)", "x"): [("x", "x")],
}


@pytest.mark.parametrize(("source", "which"), NAMES)
def test_names_of_operands(source, which):
    weight = torch.ones(1)
    weight.__dict__[provenance.NAME] = "weight"
    known = {"x": x, "y": y, "other": torch.ones(4), "parameter": model[0].weight}
    tensors = [known.get(name, weight) for name in which.split()]
    del weight, known
    named = name_operands(tensors, site(source))
    assert [(name.label, name.code) for name in named] == NAMES[source, which]


def test_a_long_expression_is_cut_in_labels_alone():
    code = "torch.ones(2) + " * 5 + "torch.ones(2)"
    (named,) = name_operands([torch.ones(2)], site(f"f({code})"))
    assert named.code == code and named.label == code[:57] + "..."
    assert provenance._short("a" * 60) == "a" * 60 and len(provenance._short("a" * 61)) == 60
    assert provenance._access("layers.0.weight") == ".layers[0].weight"


def test_statements_and_the_call_around():
    source = "def f(x):\n    g(1)\n    y = h(\n        x)\n    return g(h(2), h(3))\n"
    tree = syntax.syntax_tree(source)
    assign = tree.body[0].body[1]
    here = Site(sys._getframe(), __file__, source, assign.value)
    assert here.statement() is assign and here.text(here.node) == "h( x)" and here.text(None) == ""
    assert here.enclosing_call() is None
    outer = tree.body[0].body[2].value
    first, second = (here._replace(node=argument).enclosing_call() for argument in outer.args)
    assert first is outer and second is None, "only of the first argument"
    nowhere = here._replace(node=None)
    assert nowhere.statement() is None and nowhere.enclosing_call() is None
    assert not editable(torch.__file__) and not editable(trials.__file__) and editable("/home/user/train.py")


@pytest.mark.parametrize(("columns", "shards"), [(4, [S(1)]), (3, [])])
def test_a_shard_is_exchanged_along_dims_that_divide_alone(columns, shards):
    tensors = [torch.ones(2, columns)]
    operands = [Operand(TensorType.of({"tp": S(0)}), differentiable=False)]
    call = trials.JudgedCall(RULES[torch.neg], torch.neg, (), {}, tensors, operands, None)
    changes = list(trials.changes_of(call, 0, "tp", 2, Named("x", "x", None), "G"))
    assert [change.type for change in changes if "all_to_all" in change.code] == shards
    assert any("all_gather" in change.code and change.shape == (4, columns) for change in changes)


def test_tensors_that_a_call_gets():
    def called(first, number, *rest, named, **more):
        computed = first + 1
        assert computed is not first
        return provenance._given_to(sys._getframe())

    tensors = [torch.ones(1) for _ in range(5)]
    found = called(tensors[0], 3, tensors[2], [tensors[2]], named=tensors[1], more=tensors[3])
    assert [*map(id, found)] == [*map(id, tensors[:4])], "not those in lists, nor those that it computes"


def test_words_of_repairs():
    assert call_of("all_gather", "x", "tp", S(0), R) == 'spmd.all_gather(x, "tp", src=spmd.S(0), dst=spmd.R)'
    assert call_of("convert", "x", "tp", None, I, True) == 'spmd.convert(x, "tp", dst=spmd.I, expert_mode=True)'
    codes = {"x": "x", "x.y": "x.y", "f(x)": "f(x)", "x[0]": "x[0]", "2": "2", "x + y": "(x + y)", "-x": "(-x)"}
    codes |= {"": "x", "<operand 1>": "<operand 1>"}
    assert {code: atom_of(code) for code in codes} == codes
    blocks = blocks_gathered(Named("x", "x", None), "tp", Shard(1, 3), R)
    part = 'spmd.all_gather(part, "tp", src=spmd.S(1), dst=spmd.R)'
    assert blocks == f"torch.cat([{part} for part in x.chunk(3, 1)], 1)"
    assert [*Repair("text", None, None).edits] == []


ROUTES = {
    (P, R): ("all_reduce", False),
    (P, I): ("all_reduce", False),
    (P, S(0)): ("reduce_scatter", False),
    (P, V): ("reduce_scatter", False),
    (P, P): None,
    (P("avg"), R): ("all_reduce", False),
    (scaled(P, 2), R): None,
    (scaled(R, 1), I): None,
    (V, R): ("all_gather", False),
    (V, P): None,
    (V, V): None,
    (V, S(0)): None,
    (S(0), V): None,
    (S(0), R): ("all_gather", False),
    (S(0), I): ("all_gather", False),
    (S(0), S(1)): ("all_to_all", False),
    (S(0), S(0)): ("all_to_all", False),
    (S(0, 2), R): None,
    (R, S(0, 2)): None,
    (R, S(1)): ("convert", False),
    (I, R): ("convert", False),
    (R, I): ("convert", True),
    (R, V): ("convert", False),
    (R, R): None,
}


def test_routes():
    assert {pair: route(*pair) for pair in ROUTES} == ROUTES


def test_edits_of_the_users_own_code_alone():
    here = site("x + y")
    assert edit_of(here, here.node, "z") == Edit(__file__, (1, 0), (1, 5), "z")
    assert edit_of(None, here.node, "z") is None and edit_of(here, None, "z") is None
    assert edit_of(here._replace(file=torch.__file__), here.node, "z") is None
    assert edit_of(here, ast.parse("x = 1").body[0].targets[0], "z") is None, "what is assigned to is no operand"


@pytest.mark.slow
def test_ranks_on_threads_read_source_at_once():
    """CPython 3.11 fails where the garbage collector lets another thread in while a tree is built."""
    sources = [f"x{n} = f(a, b + c * d)\n" * 50 for n in range(32)]
    trees, threshold = [], gc.get_threshold()

    def give_way(*_):
        time.sleep(0)

    gc.callbacks.append(give_way)
    gc.set_threshold(100)
    try:
        threads = [
            threading.Thread(target=lambda part=part: trees.extend(map(syntax.syntax_tree, part)))
            for part in (sources[:16], sources[16:])
        ]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    finally:
        gc.callbacks.remove(give_way)
        gc.set_threshold(*threshold)
    assert len(trees) == 32 and all(len(tree.body) == 50 for tree in trees)
