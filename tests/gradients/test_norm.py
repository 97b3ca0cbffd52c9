"""Over which ranks a norm is summed: every kind of groups on every kind of mesh; and how gradients are scaled by it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.gradients.norm import (
    check_norm_groups,
    clip_grads_with_norm,
    group_of_ranks,
    norm_groups,
    norm_of,
)
from neuronx_dist.mesh import Mesh

MODEL, EXPERT = ("pp", "tp"), ("pp", "ep", "tp")
PLAIN, EP = Mesh(16, tp=2, pp=2, cp=2), Mesh(16, tp=2, pp=2, ep=2)


def _ranks(group: Any) -> Any:
    return group.ranks if isinstance(group, comm.Communicator) else comm.communicator(group).ranks


@pytest.mark.parametrize(
    "mesh, zero1, groups, expected",
    [
        (PLAIN, False, None, [MODEL]),
        (PLAIN, True, None, ["world"]),
        (EP, False, None, [EXPERT]),
        (EP, True, None, ["world"]),
        (PLAIN, True, ("dp", "cp"), ["world"]),
        (PLAIN, True, "dp", ["dp", MODEL]),
        (PLAIN, True, "cp", ["cp", MODEL]),
        (PLAIN, True, (), [(), MODEL]),
        (EP, True, ("dp", "cp"), ["world"]),
        (EP, True, (), [(), EXPERT]),
        (Mesh(4, tp=2), True, "dp", ["world"]),  # all of the data ranks
    ],
)
def test_groups_of_a_norm(mesh: Mesh, zero1: bool, groups: Any, expected: Any) -> None:
    with comm.as_rank(mesh, 5 % mesh.world_size):
        for given in [groups] if groups is None else [[*mesh.groups(groups)], comm.communicator(groups)]:
            result = norm_groups(zero1, given)
            assert [*map(_ranks, result)] == [*map(_ranks, expected)]
            assert ("world" in result) == ("world" in expected)


def test_groups_that_do_not_go() -> None:
    with comm.as_rank(EP, 5):
        with pytest.raises(
            ValueError, match=r"groups over a part of dp x cp, \[1, 5\], cannot be combined with ep > 1"
        ):
            norm_groups(True, [[i, i + 4] for i in (0, 1, 2, 3, 8, 9, 10, 11)])
        with pytest.raises(ValueError, match="zero1_optimizer_groups needs zero1_optimizer=True"):
            norm_groups(False, [])


def test_ranks_that_the_mesh_has_a_group_for() -> None:
    with comm.as_rank(PLAIN, 5):
        for axis in (("dp", "cp"), "dp", "cp"):
            mine = comm.communicator(axis)
            for groups in ([*PLAIN.groups(axis)], reversed([*PLAIN.groups(axis)]), mine):
                group = group_of_ranks(groups)
                assert (group.axis, group.ranks) == (mine.axis, mine.ranks)
            assert group_of_ranks(mine) is mine
        assert group_of_ranks([[rank] for rank in range(16)]).size == 1
        group_of_four = group_of_ranks([[i, i + 1, i + 2, i + 3] for i in range(0, 16, 4)])
        assert group_of_four.ranks == (4, 5, 6, 7) and group_of_four.axis == "sharding"
        with pytest.raises(ValueError, match=r"groups \[\[0, 1\]\] do not contain rank 5; together they must cover"):
            group_of_ranks([[0, 1]])


@pytest.mark.parametrize("mesh", [PLAIN, EP, Mesh(4)], ids=str)
def test_groups_over_which_a_model_is_spread(mesh: Mesh) -> None:
    with comm.as_rank(mesh, 3):
        for axis in ("tp", MODEL, EXPERT):
            lists = [list(ranks) for ranks in mesh.groups(axis)]
            check_norm_groups(lists)
            check_norm_groups(tuple(map(tuple, lists[::-1])))
            check_norm_groups(comm.communicator(axis))
        for axis in ("dp", "cp", "world", ("dp", "tp")):
            if mesh.groups(axis) in [mesh.groups(other) for other in ("tp", MODEL, EXPERT)]:
                continue
            for given in ([*mesh.groups(axis)], comm.communicator(axis)):
                with pytest.raises(ValueError, match="are not the tp groups of Mesh.*; leave grad_norm_groups out"):
                    check_norm_groups(given)


def _of(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    param = torch.zeros(len(values), dtype=dtype)
    param.grad = torch.tensor(values, dtype=dtype)
    return param


@pytest.mark.parametrize(
    "norm_type, expected",
    [(2, math.sqrt(30)), (1, 10), (3, 100 ** (1 / 3)), (0.5, (1 + 2**0.5 + 3**0.5 + 2) ** 2), (math.inf, 4)],
)
def test_norms_of_several_dtypes(norm_type: float, expected: float) -> None:
    with comm.as_rank(Mesh(1), 0):
        for dtypes, result in (
            ((torch.float32, torch.float32), torch.float32),
            ((torch.bfloat16, torch.float16), torch.float32),
            ((torch.float64, torch.bfloat16), torch.float64),
        ):
            params = [_of([-1.0, 2.0], dtypes[0]), _of([3.0, -4.0], dtypes[1])]
            norm = norm_of([*params, params[0]], [params[0].grad, params[1].grad, None], norm_type, ["world"])[0]
            assert norm.dtype == result and norm.ndim == 0 and norm.item() == pytest.approx(expected)
        for wrong in (0, -1, math.nan):
            with pytest.raises(ValueError, match=r"norm_type must be positive \(2, 1, 0.5, inf, ...\), got"):
                norm_of([], [], wrong, ["world"])


def test_gradients_are_scaled_down_and_never_up() -> None:
    for norm, most, factor in (
        (5.0, 2.5, 0.5), (5.0, 10.0, 1.0), (0.0, 1.0, 1.0), (0.0, 0.0, 0.0), (5.0, math.inf, 1.0), (math.inf, 1.0, 0.0),
    ):  # fmt: skip
        params = [_of([3.0], torch.float32), _of([4.0], torch.float64), torch.zeros(1)]
        total = torch.tensor(norm)
        assert clip_grads_with_norm(params, total, most) is total
        assert [param.grad.item() for param in params[:2]] == pytest.approx([3 * factor, 4 * factor], abs=1e-5)
    params = [_of([3.0], torch.float32)]
    clip_grads_with_norm(params, torch.tensor(1e-6), 1e-6)  # divided by the norm and 1e-6
    assert params[0].grad.item() == pytest.approx(1.5)
