"""Numbers that know that they are a power of the size of an axis."""

from __future__ import annotations

import copy
import json
import math
import pickle
from typing import Any

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.checking.types.axis_powers import UNCLEAR, AxisNumber, AxisRatio, AxisSize, exponents_of, tracked
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import parallel_state

N = AxisSize(2, {"dp": 1})
LOCAL = AxisSize(6, {"tp": -1})


@pytest.mark.parametrize(
    ("number", "value", "exponents"),
    [
        (N * 3, 6, {"dp": 1}),
        (3 * N, 6, {"dp": 1}),
        (N * 0.5, 1.0, {"dp": 1}),
        (1 / N, 0.5, {"dp": -1}),
        (8 // N, 4, {"dp": -1}),
        (8.0 // AxisRatio(2.0, {"dp": 1}), 4.0, {"dp": -1}),
        (N / 2, 1.0, {"dp": 1}),
        (N // 2, 1, {"dp": 1}),
        (N * LOCAL, 12, {"dp": 1, "tp": -1}),
        (LOCAL * AxisSize(4, {"tp": 1}), 24, {}),
        (N / N, 1.0, {}),
        (N // N, 1, {}),
        (-N, -2, {"dp": 1}),
        (+N, 2, {"dp": 1}),
        (abs(-N), 2, {"dp": 1}),
        (N**2, 4, {"dp": 2}),
        (N**-1, 0.5, {"dp": -1}),
        (N**0, 1, {}),
        (N + N, 4, {"dp": 1}),
        (N - N, 0, {"dp": 1}),
        (sum([LOCAL, LOCAL]), 12, {"tp": -1}),
        (math.prod((2, N, LOCAL)), 24, {"dp": 1, "tp": -1}),
        (math.ceil(7 / N), 4, {"dp": -1}),
        (round(1 / N, 2), 0.5, {"dp": -1}),
        (divmod(9, N)[0], 4, {"dp": -1}),
        (max(N, 1), 2, {"dp": 1}),
        (N + 1, 3, {}),
        (1 - N, -1, {}),
        (N + LOCAL, 8, {}),
        (N % 2, 0, {}),
        (2**N, 4, {}),
        (N**0.5, 2**0.5, {}),
        (int(N), 2, {}),
        (float(N), 2.0, {}),
        (AxisSize(3, {}), 3, {}),
        (AxisSize(3, {"dp": 0}), 3, {}),
    ],
)
def test_exponents(number: Any, value: Any, exponents: dict[str, int]) -> None:
    assert number == value and isinstance(number, type(value))
    assert exponents_of(number) == exponents
    assert isinstance(number, AxisNumber) == bool(exponents)


def test_what_is_unclear_stays_so() -> None:
    """A size of what varies, of which nobody knows whether it is a local one."""
    size, n = AxisSize(6, {"tp": UNCLEAR}), AxisSize(2, {"tp": 1})
    for number in (size, size * n, n * size, size / n, n / size, size**2, size + size, size * n / size / n):
        assert isinstance(number, AxisNumber) and exponents_of(number) == {}
    assert exponents_of(size * N) == {"dp": 1} and exponents_of(size / n * N) == {"dp": 1}
    assert type(size**0) is int and exponents_of(size**0 * n) == {"tp": 1}
    assert type(size) is type(size * n) is not type(n)


def test_they_are_numbers() -> None:
    assert hash(N) == hash(2) and N == 2 and {2: "two"}[N] == "two"
    assert list(range(N)) == [0, 1] and "abc"[N] == "c" and [0] * N == [0, 0]
    assert f"{N} {N:03d} %d" % N == "2 002 2" and repr(1 / N) == "0.5"
    assert json.dumps({"size": N, "ratio": 1 / N}) == '{"size": 2, "ratio": 0.5}'
    for number in (N, 1 / N):
        assert exponents_of(copy.deepcopy([number])[0]) == exponents_of(copy.copy(number)) == exponents_of(number)
        assert type(pickle.loads(pickle.dumps(number))) in (int, float)
    assert type(N) is type(8 * N)  # one class for the same exponents
    assert N * 1j == 2j and (N * torch.ones(2)).tolist() == [2.0, 2.0]
    x = torch.ones(4, 6)
    assert x.view(N, N, -1).shape == (2, 2, 6)
    assert type(torch.Size([N])[0]) is type(N)  # which keeps them


def test_sizes_of_axes_are_plain_unless_they_are_tracked() -> None:
    with comm.as_rank(Mesh(8, tp=2, pp=2), 0):
        for size in (comm.size("tp"), comm.communicator("tp").size, Mesh(4, tp=2).size("tp")):
            assert type(size) is int
        with tracked():
            assert exponents_of(comm.size("tp")) == {"tp": 1}
        assert type(comm.size("tp")) is int


def test_every_way_to_ask() -> None:
    with comm.as_rank(Mesh(16, tp=2, pp=2, ep=2), 0), tracked():
        assert exponents_of(comm.size("tp")) == {"tp": 1}
        assert exponents_of(comm.size(("dp", "tp"))) == {"dp": 1, "tp": 1}
        assert exponents_of(comm.size(("dp", "cp"))) == {"dp": 1}  # cp has one rank
        assert exponents_of(comm.size("world")) == {"pp": 1, "dp": 1, "tp": 1}
        assert type(comm.size("cp")) is int and type(comm.communicator("cp").size) is int
        assert exponents_of(comm.communicator(("dp", "tp")).size) == {"dp": 1, "tp": 1}
        assert exponents_of(comm.current().mesh.size("ep")) == {"ep": 1}
        getters = {
            "tp": parallel_state.get_tensor_model_parallel_size,
            "pp": parallel_state.get_pipeline_model_parallel_size,
            "dp": parallel_state.get_data_parallel_size,
            "ep": parallel_state.get_expert_model_parallel_size,
            "edp": parallel_state.get_expert_data_parallel_size,
        }
        for axis, get in getters.items():
            assert exponents_of(get()) == {axis: 1} and get() == 2 * (axis == "dp") + 2
        assert type(parallel_state.get_context_model_parallel_size()) is int


@pytest.mark.parametrize("backend", [None, CheckBackend()])
def test_a_group_knows_the_axes_that_it_spans(backend: Any) -> None:
    mesh = Mesh(8, tp=2, pp=2)
    with comm.as_rank(mesh, 0, backend):
        data = comm.new_group(mesh.groups("dp"), "mine")
        odd = comm.new_group([[0, 3], [4, 7]], "odd")
        assert data is not None and odd is not None
        assert type(data.size) is int
        with tracked():
            assert exponents_of(data.size) == {"dp": 1}
            assert type(odd.size) is int and odd.size == 2


def test_a_group_whose_size_differs_by_rank_is_not_read() -> None:
    backend = CheckBackend()
    with comm.as_rank(Mesh(3), 0, backend), tracked():
        group = comm.current().backend.communicator("odd", [[0, 1], [2]], 0)
        assert isinstance(group.size, int) and backend.reads == []
