"""Every strategy of every rule: the pieces, put together, are the whole, forward and backward; and none is missing.

The calls are those that the rules' own tests review (`tests/rules/specs.txt`), in float64 at 1e-10.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, product

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from neuronx_dist.checking.types.judge import Operand, judge
from neuronx_dist.parallelize.choose import strategies
from neuronx_dist.parallelize.choose.strategies import candidates, refusals
from neuronx_dist.program.program import LocalCall, Strategy, Value, local_shape, operands_of
from neuronx_dist.rules import RULES, local_call
from neuronx_dist.rules.containers import substituted
from neuronx_dist.rules.local_call import spec_of
from neuronx_dist.spmd import P, R, S, Shard
from neuronx_dist.spmd.errors import Violation
from neuronx_dist.spmd.tensor_type import TensorType
from tests.parallelize.support.pieces import Case, wrong_pieces, wrong_types
from tests.rules.test_specs import NAMES
from tests.rules.test_specs import reviewed as all_reviewed
from tests.rules.verify_rule import Recorder

pytestmark = pytest.mark.filterwarnings("ignore")

FULL = os.environ.get("NXD_FULL") == "1"


def reviewed() -> list[str]:
    """The calls; a third of them without NXD_FULL=1."""
    return [*all_reviewed()][:: 1 if FULL else 3]


def cases(texts: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """The calls of functions that are typed by a spec alone; writes in place are no part of a program."""
    for text in texts:
        torch.manual_seed(0)
        with Recorder() as recorder:
            eval(text, NAMES)
        function, args, kwargs = recorder.calls[0]
        if function in (torch.bucketize, torch.searchsorted):  # defined for sorted sequences alone
            args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.sort(-1).values, (args, kwargs))
        rule = RULES[function]
        random = rule.random(*args, **kwargs) if callable(rule.random) else rule.random
        if rule.kind == "op" and rule.inplace is None and not random:
            yield text, Case(function, args, kwargs)


def all_pieces(texts: Sequence[str], sizes: Sequence[int] = (2, 4)) -> Counter[str]:
    counted: Counter[str] = Counter()
    found = []
    for text, case in cases(texts):
        for size in sizes:
            names, wrong = wrong_pieces(case, size, strides=[2])
            counted.update(name[0] for name in names)
            found += [f"{text}: {what}" for what in wrong]
    assert found == []
    return counted


@pytest.mark.slow
def test_pieces_of_some_calls():
    counted = all_pieces([*all_reviewed()][::15])
    assert counted["S"] > 100 and counted["P"] > 30


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_pieces_of_all_calls(size):
    counted = all_pieces(reviewed(), [size])
    share = 1 if FULL else 3
    assert counted["S"] > {2: 1800, 4: 550}[size] / share and counted["P"] > 600 / share and counted["I"] > 750 / share


@pytest.mark.slow
def test_the_checker_agrees():
    """The checker sees local sizes alone, and finds the types that were derived from the whole ones."""
    wrong = [(text, what) for text, case in cases(reviewed()) for what in wrong_types(case, 2, [2])]
    assert wrong == []


def accepted(case: Case, size: int) -> Iterator[tuple[tuple, tuple]]:
    """Every assignment of R, P and S(dim) that `judge` accepts without an assumption, if all shards divide.

    With the types of the results.
    """
    rule, tensors = RULES[case.call.function], operands_of(case.call)

    def meta(value: Value) -> Tensor:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    args, kwargs = substituted((case.call.args, case.call.kwargs), Value, meta)
    try:
        spec = spec_of(rule, (args, kwargs))
    except NotImplementedError:
        return
    if len(tensors) > 3 or any(0 in value.shape for value in (*tensors, *case.call.results)) or None in spec.ins:
        return
    affine = rule.affine is not None and bool(rule.affine(*args, **kwargs))
    choices = [
        [R, *([P] if value.dtype is not torch.bool else []), *(S(dim) for dim in range(len(value.shape)))]
        for value in tensors
    ]
    for types in product(*choices):
        operands = [Operand(TensorType.of({"tp": t}, R), value.requires_grad) for t, value in zip(types, tensors)]
        try:
            judgement = judge(rule, spec, operands, affine, len(spec.outs))
        except Violation:
            continue
        results = [type_.get("tp") for type_ in judgement.types]
        pairs = [*zip(types, tensors), *zip(results, case.call.results)]
        shards = [(t, value.shape) for t, value in pairs if isinstance(t, Shard)]
        whole = all(t.letter in "R0" or t in (P, P("avg")) or isinstance(t, Shard) for t in results)
        divides = all(shape[t.dim] % (t.stride * size) == 0 and t.part is None for t, shape in shards)
        if not judgement.assumed and whole and divides and case.call.results:
            yield types, results


def right_calls(case: Case, types: tuple, results: tuple, size: int) -> Iterator[str]:
    """The local calls, with integers of the whole or divided ones, whose pieces put together are the whole."""
    args, structure = pytree.tree_flatten((case.call.args, case.call.kwargs))
    choices = [[x, x // size] if type(x) is int and x and x % size == 0 else [x] for x in args]
    for edited in islice(product(*choices), 64):
        local = LocalCall(case.call.function, *pytree.tree_unflatten(list(edited), structure))
        strategy = Strategy("tried", types, results, local)
        try:
            if not [*case.wrong(strategy, size)]:
                yield str([x for x in edited if type(x) is int])
        except Exception:
            continue


def missing(texts: Sequence[str], size: int = 2) -> tuple[int, list]:
    """Counts legal assignments, and those that are neither strategies nor refused with a reason."""
    count, lost = 0, []
    for text, case in cases(texts):
        legal = list(accepted(case, size))
        count += len(legal)
        offered = {strategy.operands for strategy in candidates(case.call, "tp", size)}
        reasons = {refusal.name: refusal.why for refusal in refusals(case.call, "tp", size)}
        for types, results in legal:
            if types in offered:
                continue
            why = " ".join(reasons.get(f"{t} of operand {i}", "") for i, t in enumerate(types))
            right = "integers" in why and next(right_calls(case, types, results, size), "none")
            if right != "none" and "size 1" not in why:
                lost.append((text, types, right))
    return count, lost


# Which positions are taken, or that variances are positive, is not known before the program runs: none has such a call.
VALUES_ARE_READ = {
    "f(4, 6).repeat_interleave(k(4, of=1), 0)",
    "f(4, 6).repeat_interleave(k(1, of=1), -1)",
    "torch.narrow(f(4, 6), 1, k(of=1), 2)",
    "f(4, 6)[k()]",
    "f(4, 6)[b(4), k(4)]",
    "F.one_hot(k(4, 3))",
    "F.gaussian_nll_loss(f(4, 6), f(4, 6), f(4, 6))",
    'F.gaussian_nll_loss(f(4, 6), f(4, 6), f(4, 1), False, 1e-6, "sum")',
}


@pytest.mark.slow
def test_strategies_are_complete_for_some_calls():
    count, lost = missing([*all_reviewed()][::10])
    assert count > 200 and {text for text, *_ in lost} <= VALUES_ARE_READ


def test_a_strategy_that_is_lost_is_noticed(monkeypatch):
    """Without the divided sizes of a view, brute force finds them."""
    monkeypatch.setattr(local_call, "edited", lambda arguments, change: [arguments])
    monkeypatch.setattr(strategies, "_derived", {})
    _, lost = missing(["f(4, 6).view(2, 2, 6)"])
    assert [(types, right) for _, types, right in lost] == [((S(0),), "[1, 2, 6]"), ((S(1),), "[2, 2, 3]")]


@pytest.mark.slow
def test_strategies_are_complete():
    """Brute force over all assignments of types to operands, and all integers of the local call, finds no other one."""
    count, lost = missing(reviewed())
    assert count > (2500 if FULL else 800) and {text for text, *_ in lost} == VALUES_ARE_READ & {*reviewed()}


def f(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64)


def test_without_congruence_group_norm_is_wrong(monkeypatch):
    """Types accept whole groups of half of the channels; only the comparison of specs sees that they are others."""
    case = Case(F.group_norm, (f(2, 8, 3), 4, f(8), f(8)), {})
    assert wrong_pieces(case, 2)[1] == []
    monkeypatch.setattr(local_call, "normal_form", lambda *_: None)
    case = Case(F.group_norm, (f(2, 8, 4), 4, f(8), f(8)), {})
    assert any("S(1) of operand 0 on 2: result 0 differs" in wrong for wrong in wrong_pieces(case, 2)[1])


def test_a_range_is_the_same_one_of_each_block():
    """`narrow(1, 4, 4)` takes the second third of each rank's part: start and length are divided, not one alone."""
    case = Case(Tensor.narrow, (f(4, 12), 1, 4, 4), {})
    names, wrong = wrong_pieces(case, 2)
    assert "S(1, stride=3) of operand 0" in names and wrong == []


def test_sizes_that_a_rule_does_not_read_are_those_of_the_shard():
    case = Case(Tensor.sum_to_size, (f(4, 6), 1, 6), {})
    names, wrong = wrong_pieces(case, 2)
    assert "S(1) of operand 0" in names and wrong == []


def test_dims_of_which_the_checker_takes_another():
    """Two halves over two ranks, `[4, 3] -> [4, 1, 3]` on each: it would take the dim of 3 for the one that is cut."""
    case = Case(Tensor.view, (f(4, 6), 4, 2, 3), {})
    names, wrong = wrong_pieces(case, 2)
    assert "S(1) of operand 0" not in names and wrong == []
    (refusal,) = [one for one in refusals(case.call, "tp", 2) if one.name == "S(1) of operand 0"]
    assert "size 1" in refusal.why


def test_shapes_of_local_values():
    assert local_shape((4, 6), S(1, stride=3), 2) == (4, 3)
    assert local_shape((4, 6), P, 2) == (4, 6)
