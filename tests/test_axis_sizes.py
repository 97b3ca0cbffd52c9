"""Sizes of axes are plain numbers until a tool tracks them, and it is told of which powers they are."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from neuronx_dist import comm
from neuronx_dist.axis_sizes import size_along, tracked, tracking
from neuronx_dist.mesh import Mesh


class Tracked(int):
    exponents: dict[str, int]


def number(value: int, exponents: Mapping[str, int]) -> Tracked:
    result = Tracked(value)
    result.exponents = dict(exponents)
    return result


def test_nobody_tracks() -> None:
    mesh = Mesh(16, tp=2, cp=2)
    assert not tracking()
    for size in (size_along({"tp": 2}, 2), mesh.size("tp"), mesh.size(("dp", "cp"))):
        assert type(size) is int


def test_sizes_know_their_axes_where_they_are_tracked() -> None:
    mesh = Mesh(16, tp=2, cp=2, tp_replicas=2)
    with tracked(number):
        assert tracking()
        sizes = [size_along({"a": 3, "b": 1, "c": 4}, 12), mesh.size("tp"), mesh.size(("dp", "cp")), mesh.size("tp%2")]
        with comm.as_rank(mesh, 0):
            sizes += [comm.size("tp"), comm.communicator(("dp", "cp")).size]
        plain = [size_along({"b": 1}, 1), size_along({}, 5), mesh.size("pp"), mesh.size(())]
        with tracked(lambda value, exponents: -value):
            assert mesh.size("tp") == -2
        assert mesh.size("tp") == 2
    assert sizes == [12, 2, 8, 2, 2, 8]
    exponents = [getattr(size, "exponents", None) for size in sizes]
    data = {"dp": 1, "cp": 1}
    assert exponents == [{"a": 1, "c": 1}, {"tp": 1}, data, {"tp%2": 1}, {"tp": 1}, data]
    assert plain == [1, 5, 1, 1] and all(type(size) is int for size in plain)
    assert not tracking()


def test_tracking_is_of_one_thread_and_ends_with_an_error() -> None:
    seen: list[bool] = []
    with pytest.raises(RuntimeError), tracked(number):
        thread = threading.Thread(target=lambda: seen.append(tracking()))
        thread.start()
        thread.join()
        raise RuntimeError
    assert seen == [False] and not tracking()
