"""Texts of the parts of a check, and what they read: values, losses, gradients, inputs, seeds, numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import Mesh, comm, spmd
from neuronx_dist.checking import api
from neuronx_dist.checking.programs import calls, compare, numeric, played
from neuronx_dist.checking.programs.calls import Draw, Op
from neuronx_dist.checking.programs.explore import PhaseFailure, axes_between, differing_seeds
from neuronx_dist.checking.programs.inputs import declare_inputs
from neuronx_dist.comm.backends.observed import CheckBackend, Event
from neuronx_dist.comm.ranks.rank_values import RankValue
from neuronx_dist.spmd import R, S, V
from neuronx_dist.spmd.tensor_type import type_of
from neuronx_dist.spmd.types import scaled
from tests.support.reviewed import assert_reviewed

HERE = Path(__file__)
MESH = Mesh(24, tp=3, pp=2, cp=2)  # dp 2


# --- the loss, and how a model and a step are called


class Output:
    def __init__(self, loss: Any) -> None:
        self.loss = loss


LOSS, OTHER = torch.tensor(1.0), torch.ones(2)
LOSSES = {
    "alone": LOSS, "of one element": torch.ones(1, 1), "attribute": Output(LOSS), "key": {"a": OTHER, "loss": LOSS},
    "first value": {"a": LOSS, "b": OTHER}, "tuple": (LOSS, OTHER), "list": [LOSS],
}  # fmt: skip
NO_LOSSES = {
    "a tensor of shape [2]": OTHER, "a tensor of shape [0]": (torch.ones(0),), "dict": {}, "tuple": (), "str": "loss",
    "list": [[LOSS]], "Output": Output(None), "NoneType": None,
}  # fmt: skip


@pytest.mark.parametrize("what", LOSSES)
def test_the_loss_in_a_result(what: str) -> None:
    loss = played.find_loss(LOSSES[what])
    assert loss is (LOSSES[what] if what == "of one element" else LOSS)


@pytest.mark.parametrize("what", NO_LOSSES)
def test_results_without_a_loss(what: str) -> None:
    with pytest.raises(ValueError) as error:
        played.find_loss(NO_LOSSES[what])
    assert str(error.value) == (
        f"the model's result holds no loss but {what}: let it return a scalar (pass it labels, or wrap it), or pass "
        "step=, a function step(model, optimizer, inputs) that does the whole training step"
    )


def test_how_a_model_is_called() -> None:
    def model(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    for inputs, expected in (({"x": 1}, ((), {"x": 1})), ((1, 2), ((1, 2), {})), ([1], ((1,), {})), (5, ((5,), {}))):
        assert played.call_model(model, inputs) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "inputs, words", [((1, 2), "a tuple of 2"), ({"a": 1}, "a dict of 1"), ([], "a list of 0"), (LOSS, "a tensor")]
)
def test_a_step_that_is_called_otherwise(inputs: Any, words: str) -> None:
    def step(model: Any) -> None: ...

    with pytest.raises(TypeError) as error:
        played._check_step(step, None, None, inputs)
    name = "test_a_step_that_is_called_otherwise.<locals>.step"
    assert str(error.value) == (
        f"{name}: too many positional arguments: step is called as step(model, optimizer, inputs), where inputs, all "
        f"of the example inputs, is {words}"
    )
    played._check_step(lambda model, optimizer, inputs: None, None, None, inputs)
    played._check_step(dict, None, None, inputs)  # whose signature nobody knows
    assert played._name(nn.Linear) == "Linear" and played._name(3) == "3"


def test_the_optimizer_of_a_model_that_has_none() -> None:
    params = [nn.Parameter(torch.ones(4))]
    with comm.as_rank(Mesh(1), 0):
        for zero1, wrapper in ((False, False), (True, False), (False, True)):
            model = SimpleNamespace(use_zero1_optimizer=zero1, use_optimizer_wrapper=wrapper)
            optimizer = played.default_optimizer(model, params)  # type: ignore[arg-type]
            assert isinstance(optimizer, nxd.NeuronZero1Optimizer) == (zero1 or wrapper) == played._averages(optimizer)
            base = optimizer.base_optimizer if zero1 or wrapper else optimizer
            assert type(base) is torch.optim.SGD and base.param_groups[0]["lr"] == 0.1
        assert type(played.default_optimizer(nn.Linear(1, 1), params)) is torch.optim.SGD
        assert not played._averages(nxd.MasterWeightsOptimizer(params, torch.optim.SGD, lr=0.1))


# --- values


def test_values_for_inputs_that_have_none() -> None:
    real = numeric._real(torch.empty(2, 3, dtype=torch.bfloat16, device="meta"))
    assert real.dtype == torch.float64 and torch.equal(real.view(-1), (torch.arange(6.0).double() * 0.7).sin())
    ids = numeric._real(torch.empty(2, 2, dtype=torch.int32, device="meta"))
    assert ids.dtype == torch.int32 and ids.tolist() == [[0, 1], [0, 1]]
    x = torch.ones(2)
    assert numeric._real(x).dtype == torch.float64 and numeric._real(ids) is ids


def test_each_data_parallel_rank_gets_other_values() -> None:
    x, ids = torch.tensor([1.0, 2.0]), torch.tensor([[1, 2], [3, 4]])
    assert torch.allclose(numeric._variant(x, 2), torch.tensor([0.6, 1.0])) and torch.equal(numeric._variant(x, 0), x)
    assert numeric._variant(ids, 1).tolist() == [[3, 0], [1, 0]] and numeric._variant(ids[:1], 1).tolist() == [[2, 0]]
    assert numeric._variant(ids[0], 1).tolist() == [2, 0]
    labels = torch.tensor([[1, 2], [-100, 4]])
    assert numeric._variant(labels, 1).tolist() == [[-100, -100], [1, -100]]
    with comm.as_rank(Mesh(4, tp=2), 2):  # dp 1
        inputs = numeric._inputs({"x": x, "n": torch.tensor(3), "s": "s"}, nn.Linear(1, 1), 1)
        both = numeric._inputs({"x": x, "n": torch.tensor(3), "s": "s"}, nn.Linear(1, 1), 2)
        assert numeric._inputs(lambda: (x,), nn.Linear(1, 1), 2)[0].dtype == torch.float64
    assert torch.allclose(inputs["x"], torch.tensor([0.8, 1.5]).double()) and inputs["n"] == 3 and inputs["s"] == "s"
    assert torch.allclose(both["x"], torch.tensor([1.0, 2.0, 0.8, 1.5]).double()) and both["n"] == 3


G = torch.tensor([3.0, 4.0])
DESCRIBED = {
    "2 times that of one process (the dp size or the cp size or the pp size)": 2 * G,
    "3 times that of one process (the tp size)": 3 * G,
    "0.5 times that of one process (one over the dp size or one over the cp size)": G / 2,
    "0.3333 times that of one process (one over the tp size)": G / 3,
    "5 times that of one process": 5 * G,
    "-1 times that of one process": -G,
    "1.01 times that of one process": 1.01 * G,
    "it differs from that of one process by 0.2 of its norm": torch.tensor([3.0, 5.0]),
}


@pytest.mark.parametrize("words", DESCRIBED)
def test_how_a_gradient_is_wrong(words: str) -> None:
    text = numeric._describe("w", 3, DESCRIBED[words], G, MESH)
    joint = ": " if words.startswith("it") or words[0] in "-0123456789" else ""
    assert text == f"the gradient of w is wrong on rank 3{joint}{words}"
    zero = numeric._describe("w", 0, G, torch.zeros(2), MESH)
    assert zero == "the gradient of w is wrong on rank 0: it is zero in one process, and 5 in norm here"


def test_values_that_are_compared() -> None:
    def compared(expected: Any, *by_rank: Any) -> list[tuple[str, tuple[int, ...]]]:
        return [(p.message, p.ranks) for p in numeric._compare(expected, [*by_rank], MESH)]

    right = (2.0, {"a": G, "b": G})
    assert compared(right, right, (2.0, {"a": G}), (None, {})) == [] == compared((None, {}), (3.0, {}))
    assert compared(right, right, (2.00019, {})) == []
    assert compared(right, right, (2.001, {}), (4.0, {})) == [
        ("the loss is 2.001 on rank 1 and 2 in one process, 1 times that", (1,))
    ]
    assert compared((0.0, {}), (1.0, {})) == [("the loss is 1 on rank 0 and 0 in one process", (0,))]
    shape = "the gradient of a has shape [2, 1] on rank 1, [2] in one process"
    assert compared(right, right, (2.0, {"a": G.view(2, 1), "b": G})) == [(shape, (1,))]
    both = compared(right, right, (2.0, {"a": G.view(2, 1), "b": 3 * G}), (4.0, {"a": G, "b": G}))
    assert both == [
        ("the loss is 4 on rank 2 and 2 in one process, 2 times that", (2,)), (f"{shape}; and 1 more of 2", (1,)),
    ]  # fmt: skip
    assert [p.kind for p in numeric._compare(right, [(4.0, {})], MESH)] == ["values"]
    assert (
        compared((None, {"a": G}), (None, {"a": G * (1 + 0.9e-4)}))
        == []
        != compared((None, {"a": G}), (None, {"a": G * (1 + 1.1e-4)}))
    )


# --- inputs, seeds, numbers of calls


def test_types_of_inputs() -> None:
    mesh = Mesh(8, tp=2, cp=2)  # dp 2

    def types(inputs: Any, in_types: Any = None) -> list[Any]:
        with comm.as_rank(mesh, 0), spmd.SpmdTypeMode(mesh) as mode:
            declare_inputs(inputs, in_types, mode)
        leaves = inputs.values() if isinstance(inputs, dict) else inputs
        return [None if not isinstance(x, torch.Tensor) else dict(type_of(x).types) for x in leaves]

    x, y, count = (lambda: torch.ones(4, 2)), (lambda: torch.ones(4)), (lambda: torch.tensor(3))
    plain = {"dp": S(0), "cp": R, "tp": R}
    rest = types({"x": x()})[0]
    assert rest["dp"] == S(0) and rest.get("tp", R) is R
    found = types({"x": x(), "n": 3, "num_items_in_batch": count()})
    assert found[0] == rest and found[1] is None and found[2]["dp"] == scaled(R, -1)
    assert types((x(), y()), {"tp": S(0)})[0]["tp"] == S(0)
    assert [leaf_types["tp"] for leaf_types in types({"x": x(), "y": y()}, {"x": {"tp": S(1)}, "y": {"tp": V}})] == [
        S(1),
        V,
    ]
    named = types({"x": x(), "y": y()}, {"y": {"tp": V}})
    assert named[0] == rest and named[1]["tp"] is V
    assert [leaf_types.get("tp", R) for leaf_types in types([x(), y()], [{"tp": S(1)}])] == [S(1), R]
    with pytest.raises(ValueError) as error:
        types({"x": x(), "y": y()}, {"z": {"tp": V}, "w": {}})
    assert str(error.value) == "in_types names w, z, but the inputs are x, y" and plain


def draw(rank: int, seed: Any, line: str = "a.py:1", differs: str = "") -> tuple[int, list[Op]]:
    stream = SimpleNamespace(differs=lambda axis: axis in differs.split(","))
    return rank, [Op("rand", (), ("a.py", 1), False, None, Draw(line, seed, stream))]  # type: ignore[arg-type]


def test_seeds_that_differ_where_numbers_were_taken_for_equal() -> None:
    mesh = Mesh(16, tp=2, pp=2, cp=2)  # ranks 0..7 are stage 0: dp 2, cp 2, tp 2
    assert axes_between(mesh, 0, 1) == ["tp"] and axes_between(mesh, 0, 7) == ["dp", "cp", "tp"]
    assert axes_between(mesh, 0, 8) == [] and axes_between(Mesh(8, tp=2, ep=2), 0, 2) == ["edp", "ep"]
    tp, both = frozenset({"tp"}), frozenset({"tp", "cp"})
    assert differing_seeds(mesh, [draw(0, 1), draw(1, 2)]) == {("a.py:1", 1): tp, ("a.py:1", 2): tp}
    assert differing_seeds(mesh, [draw(0, 1), draw(1, 1)]) == {} == differing_seeds(mesh, [draw(0, 1), draw(8, 2)])
    assert differing_seeds(mesh, [draw(0, 1), draw(1, 2, "a.py:2")]) == {}
    assert differing_seeds(mesh, [draw(0, 1, differs="dp,tp"), draw(1, 2)]) == {}
    assert differing_seeds(mesh, [draw(0, (("tp",), 1)), draw(1, (("tp",), 2))]) == {}
    # What differs over tp is known when ranks are compared that differ in cp too.
    found = differing_seeds(mesh, [draw(0, 1), draw(3, 3), draw(1, 2), draw(2, 4)])
    assert found == {("a.py:1", 1): both, ("a.py:1", 2): tp, ("a.py:1", 4): {"cp"}}


def test_tables_of_calls() -> None:
    names = [function.__name__ for function in calls._GETTERS]
    texts = {"questions": sorted(names), "quiet": sorted(calls._QUIET), "values": sorted(calls._VALUES)}
    assert_reviewed(HERE.with_name("expected_calls_of_torch.txt"), {k: "\n".join(v) for k, v in texts.items()})


def test_which_numbers_decide() -> None:
    mesh, x = Mesh(4, tp=4), torch.ones(8)
    decides = {
        "narrow length": lambda r: ("narrow", (x, 0, 0, r), {}),
        "narrow by keyword": lambda r: ("narrow", (x, 0), {"start": r, "length": 1}),
        "select by keyword": lambda r: ("select", (x,), {"dim": 0, "index": r}),
        "full shape": lambda r: ("full", ((r, 2), 1), {}),
        "full by keyword": lambda r: ("full", ((2, 2),), {"fill_value": r}),
        "new_full shape": lambda r: ("new_full", (x, (r,), 1), {}),
        "a view": lambda r: ("view", (x, r, 2), {}),
        "keyword": lambda r: ("view", (x,), {"size": (r, 2)}),
        "a slice's end": lambda r: ("__getitem__", (x, slice(0, r)), {}),
        "a slice's start": lambda r: ("__getitem__", (x, slice(r, None)), {}),
        "a slice's step": lambda r: ("__getitem__", (x, slice(0, 4, r)), {}),
        "the inner one": lambda r: ("__setitem__", (x, (0, slice(None, r)), 1), {}),
        "another length": lambda r: ("__getitem__", (x, slice(r, 2 * r)), {}),
        "a list of positions": lambda r: ("__getitem__", (x, [r, 0]), {}),
    }
    moves = {
        "narrow start": lambda r: ("narrow", (x, 0, r, 2), {}),
        "select": lambda r: ("select", (x, 0, r), {}),
        "full value": lambda r: ("full", ((2,), r), {}),
        "new_full value": lambda r: ("new_full", (x, (2,), r), {}),
        "a sum": lambda r: ("add", (x, r), {}),
        "in place": lambda r: ("mul_", (x,), {"other": r}),
        "a position": lambda r: ("__getitem__", (x, r), {}),
        "positions": lambda r: ("__setitem__", (x, (r, slice(r, r + 2), None), 1), {}),
        "a slice": lambda r: ("__getitem__", (x, slice(None)), {}),
        "ints": lambda r: ("__getitem__", (x, slice(1, 3)), {}),
    }
    for cases, reads in ((decides, {frozenset(["tp"])}), (moves, set())):
        for what, case in cases.items():
            seen: list[Any] = []
            with comm.as_rank(mesh, 1, CheckBackend(seen.append)):
                rank = comm.rank("tp")
                assert isinstance(rank, RankValue)
                calls._read_what_decides(*case(rank))
            assert {*seen} == reads, what


def test_numbers_of_a_call() -> None:
    scalars: list[Any] = []
    with comm.as_rank(Mesh(2, tp=2), 1, CheckBackend()):
        rank = comm.rank("tp")
        given = (torch.ones(2, 3), 1, 2.5, True, 1j, "no", None, (4, [5]), torch.Size([6]), slice(7, None, 8))
        assert calls._scalars(given, scalars) is False
        assert scalars == [(2, 3), 1, 2.5, True, 1j, 4, 5, 6, 7, 8]
        for holder in ([rank], [(0, rank)], [slice(rank, None)], [[1], [[rank]]]):
            scalars.clear()
            assert calls._scalars(holder, scalars) is True and scalars[-1] == rank.table
        assert calls._type_of([(torch.ones(1),)]) is None is calls._type_of(([], 3))


# --- problems


def test_ranks_and_lists_in_words() -> None:
    assert compare._and([1]) == "1" and compare._and([1, 2]) == "1 and 2" and compare._and("abc") == "a, b and c"
    assert compare._shown(range(3)) == "[0, 1, 2]" and compare._shown(range(64)) == str([*range(64)])
    assert compare._shown(range(65)) == f"[{', '.join(map(str, range(64)))}, ...] (65 ranks)"
    assert compare._shown(range(4), 2) == "[0, 1, ...] (4 ranks)"
    assert api._and([3]) == "rank 3" and api._and([3, 4]) == "ranks 3, 4"
    assert api._and(range(6)) == "ranks 0, 1, 2, 3, 4, 5" and api._and(range(7)) == "ranks 0, 1, 2, 3, 4, 5, ..."


def test_what_a_phase_raised_in_words() -> None:
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError as caught:
        error: Exception = caught
    line = f"{__file__}:{error.__traceback__.tb_lineno}"  # type: ignore[union-attr]
    mesh = Mesh(16, tp=2, pp=2, ep=2)

    def problem_of(phase: str, error: Exception, *ranks: int, own_step: bool = False, mesh: Mesh = mesh) -> Any:
        return api._problem([PhaseFailure(phase, rank, error) for rank in ranks], mesh, own_step)

    problem = problem_of("build", error, 5)
    assert problem.message == (
        "ZeroDivisionError: by zero\n    in building the model of rank 5 (pp 0, dp 2, tp 1, ep 0), at " + line
    )
    assert (problem.kind, problem.ranks, problem.lines, problem.error) == ("program", (5,), (line,), error)
    of_types = problem_of("train", spmd.SpmdTypeError("no"), 0, 1, 2)
    assert of_types.message == (
        "no\n    in forward and backward of rank 0 (pp 0, dp 0, tp 0, ep 0), and of ranks 1, 2" and of_types.message
    )
    assert of_types.message.startswith("no\n    in forward and backward of rank 0 (") and of_types.kind == "types"
    assert of_types.message.endswith("), and of ranks 1, 2") and of_types.ranks == (0, 1, 2)
    assert (
        "\n    in the step of rank 0, and of rank 3"
        in problem_of("train", error, 0, 3, own_step=True, mesh=Mesh(1)).message
    )
    assert "\n    in the optimizer's step of rank 1 (dp 1)" in problem_of("step", error, 1, mesh=Mesh(2)).message
    values = played.ReadsValues("the value")
    values.__cause__ = error
    read = problem_of("train", values, 0, mesh=Mesh(1))
    assert read.message == f"the value\n    in forward and backward of rank 0, at {line}" and read.kind == "program"
    report = SimpleNamespace(problems=[SimpleNamespace(error=error)])
    wrapped = api._as_error(report)  # type: ignore[arg-type]
    assert type(wrapped) is spmd.SpmdTypeError and wrapped.__cause__ is error
    report.problems[0].error = of_types.error
    assert api._as_error(report) is of_types.error  # type: ignore[arg-type]


def event(**more: Any) -> Event:
    fields = dict(number=1, verb="all_reduce", axis="tp", op="sum", shape=(2, 3), dtype=torch.bfloat16, ranks=(0, 1))
    fields |= dict(rank=0, where="a.py:1", inside="a.py:1", phase="train")
    return Event(**{**fields, **more})  # type: ignore[arg-type]


EVENTS = {
    "all_reduce(sum) of [2, 3] bfloat16 over tp": {},
    "all_gather of [] float32 over dp,cp": dict(
        verb="all_gather", op=None, shape=(), dtype=torch.float32, axis="dp,cp"
    ),
    "gather_objects over itself": dict(verb="gather_objects", op=None, shape=None, dtype=None, axis=""),
    "send to rank 4 of [2, 3] bfloat16 over pp": dict(verb="send", op=None, axis="pp", peer=4),
    "recv from rank 4 of [2, 3] bfloat16 over pp": dict(verb="recv", op=None, axis="pp", peer=4, tag=3),
    "broadcast from rank 1 of [2, 3] bfloat16 over tp": dict(verb="broadcast", op=None, peer=1),
}


@pytest.mark.parametrize("words", EVENTS)
def test_events_in_words(words: str) -> None:
    one = event(**EVENTS[words])
    seen = compare._Seen(one, compare._Group((0, 1), [0]))
    assert str(seen) == words and seen.rank == 0
    assert compare.is_message(one) == words.startswith(("send", "recv"))
    tag = " tag 3" if words.startswith("recv") else ""
    mine, over, axis = words.partition(" over ")
    mine = mine.replace("rank 4", f"rank 4{tag}")
    if one.verb != "broadcast":
        assert str(one) == f"{mine}{over}{axis if one.axis else ''} [0, 1] at a.py:1"
    other = event(**{**EVENTS[words], "inside": "b.py:2"})
    assert (compare.places(one), compare.places(other)) == (["a.py:1"], ["a.py:1", "b.py:2"])
    assert (compare._at(one), compare._at(other)) == ("a.py:1", "a.py:1 (in b.py:2)")


@pytest.mark.parametrize("field, value", [
    ("verb", "all_gather"), ("axis", "dp"), ("ranks", (0, 2)), ("op", "max"), ("shape", (3, 2)),
    ("dtype", torch.float32),
    ("pairs", ((0, 1),)),
])  # fmt: skip
def test_what_ranks_have_to_have_alike(field: str, value: Any) -> None:
    assert event().key == event(rank=1, where="b", inside="b", number=7, phase="", tag=3, peer=1).key
    assert event(**{field: value}).key != event().key
    assert event(verb="broadcast", peer=0).key != event(verb="broadcast", peer=1).key
