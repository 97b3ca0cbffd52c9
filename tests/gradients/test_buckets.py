"""Buckets: their bytes, how they are cut, kept and overlapped; and one gradient as a view of its parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.gradients.buckets import BucketPlan, cap_in_bytes, cut, overlap, presence
from neuronx_dist.gradients.gradient import ParameterGradient, gradient_of, parameters_of
from neuronx_dist.mesh import Mesh

MIB = 2**20


@pytest.mark.parametrize(
    "given, environment, expected",
    [
        (None, None, 7 * MIB), (2.5, None, 2621440), (0, None, 7 * MIB), (None, "3", 3 * MIB), (1, "3", MIB),
        (0, "3", 3 * MIB),
    ],
)  # fmt: skip
def test_bytes_of_a_bucket(given: Any, environment: str | None, expected: int, monkeypatch: Any) -> None:
    monkeypatch.delenv("SOME_CAP", raising=False)
    if environment is not None:
        monkeypatch.setenv("SOME_CAP", environment)
    assert cap_in_bytes(given, "SOME_CAP", 7) == expected


@pytest.mark.parametrize("given, environment", [(-1, "3"), (None, "-2"), (None, "0")])
def test_bytes_that_are_none(given: Any, environment: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("SOME_CAP", environment)
    wrong = float(given or environment)
    with pytest.raises(ValueError) as error:
        cap_in_bytes(given, "SOME_CAP", 7)
    got = given if given is not None else wrong
    assert str(error.value) == f"bucket cap must be positive, got {got} MB; without it (and SOME_CAP) it is 7"


def test_cuts_at_the_bound() -> None:
    def sizes(values: list[int], cap: int) -> list[list[int]]:
        return cut(values, lambda value: value % 2, lambda value: value, cap)

    assert sizes([4, 6], 10) == [[4, 6]] and sizes([4, 6], 9) == [[4], [6]]
    assert sizes([4, 1, 6, 3, 2], 10) == [[4, 6], [1, 3], [2]]
    assert sizes([20, 2, 20, 2], 10) == [[20], [2], [20], [2]]


def test_a_plan_is_cut_again_if_anything_differs() -> None:
    plan = BucketPlan()
    first = plan.buckets(["a", "b", "a"], [4, 4, 4], 8)
    assert first == [[0, 2], [1]] and plan.buckets(["a", "b", "a"], [4, 4, 4], 8) is first
    for arguments, expected in (
        ((["a", "b", "a"], [4, 4, 4], 7), [[0], [1], [2]]),
        ((["a", "a", "a"], [4, 4, 4], 8), [[0, 1], [2]]),
        ((["a", "a", "a"], [4, 4, 5], 9), [[0, 1], [2]]),
        ((["a", "a"], [4, 4], 9), [[0, 1]]),
        (([], [], 9), []),
    ):
        assert plan.buckets(*arguments) == expected


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_so_many_are_under_way(in_flight: int) -> None:
    events: list[str] = []

    def start(item: int) -> str:
        events.append(f"+{item}")
        return f"work {item}"

    def finish(item: int, work: str) -> None:
        assert work == f"work {item}"
        events.append(f"-{item}")

    overlap(iter(range(4)), start, finish, *([] if in_flight == 2 else [in_flight]))
    expected = {1: "+0 -0 +1 -1 +2 -2 +3 -3", 2: "+0 +1 -0 +2 -1 +3 -2 -3", 3: "+0 +1 +2 -0 +3 -1 -2 -3"}
    assert " ".join(events) == expected[in_flight]


def test_flags_of_what_is_there() -> None:
    with comm.as_rank(Mesh(2, tp=2), 0):
        for present in ([True, True], [True, False, True], [False]):
            flags = presence(present, torch.ones(3, dtype=torch.bfloat16), comm.communicator("tp"))
            assert flags.dtype == torch.bfloat16 and flags.tolist() == [float(one) for one in present]


# --- one gradient


def test_the_attribute_that_accumulates() -> None:
    param = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    gradient = ParameterGradient(param)
    assert gradient.attribute == "grad" and gradient.dtype == torch.bfloat16 and gradient.tensor is None
    param.grad = torch.full_like(param, 2.0)
    assert gradient.tensor is param.grad and gradient_of(param) is param.grad
    gradient.accumulate_in_main_grad()
    assert gradient.attribute == "main_grad" and gradient.dtype == torch.float32
    assert gradient.tensor is param.grad  # as long as there is no other
    zeros = gradient.zeros()
    assert zeros.dtype == torch.float32 and zeros.shape == (2,) and not zeros.requires_grad and not zeros.any()
    param.grad = None
    for expected in (3.0, 6.0):
        (param * 3).sum().backward()
        assert param.grad is None and gradient.tensor.tolist() == [expected] * 2  # type: ignore[union-attr]
        assert gradient.tensor.dtype == torch.float32 and not gradient.tensor.requires_grad  # type: ignore[union-attr]
    gradient.tensor = zeros
    assert param.main_grad is zeros and param.grad is None
    param.grad = torch.ones_like(param)
    gradient.clear()
    assert param.grad is None and param.main_grad is None and gradient.tensor is None
    double = ParameterGradient(nn.Parameter(torch.ones(1, dtype=torch.float64)))
    double.accumulate_in_main_grad()
    assert double.dtype == double.zeros().dtype == torch.float64


def test_experts_have_fewer_data_ranks() -> None:
    param = torch.zeros(1)
    gradient = ParameterGradient(param)
    for mesh, axis in ((Mesh(4, ep=2), ("edp",)), (Mesh(4), ("dp", "cp"))):
        with comm.as_rank(mesh, 0):
            param.expert_model_parallel = False
            assert gradient.data_axis == ("dp", "cp") and not gradient.is_expert
            param.expert_model_parallel = True
            assert gradient.data_axis == axis and gradient.is_expert


def test_parameters_of_anything() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))
    params = [*model.parameters()]
    optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1)
    for source in (model, optimizer, params, iter(params), params + params[:1], {id(x): x for x in params}.values()):
        assert [*map(id, parameters_of(source))] == [*map(id, params)]  # type: ignore[arg-type]
    assert parameters_of(params[0]) == [params[0]]
