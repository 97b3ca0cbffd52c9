"""This rank's rows at the place of their gathered copy: `all_gather(S, I)` by hand; anywhere else they are refused."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm, spmd
from neuronx_dist.checking.types.mode import SpmdTypeMode
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V
from tests.checking.types.typed_tensors import checked, typed, types

MESHES = [Mesh(4, tp=4), Mesh(4, tp=2)]


def start() -> int:
    return comm.rank("tp") * 2


def by_list(z, every):
    rows = list(every.chunk(comm.size("tp")))
    rows[comm.rank("tp")] = z
    return torch.cat(rows, dim=0)


def by_slice(z, every):
    every = every.clone()
    every[start() : start() + 2] = z
    return every


def by_parts(z, every):
    return torch.cat([every[: start()], z, every[start() + 2 :]])


def in_place(z, every):
    every[start() : start() + 2] = z
    return every


def gathered_under_no_grad(z, every):
    with torch.no_grad():
        every = spmd.all_gather(z, "tp", src=S(0), dst=R)
    return by_parts(z, every)


RIGHT = [by_list, by_slice, by_parts, in_place, gathered_under_no_grad]


def of_the_next_rank(z, every):
    first = (start() + 2) % len(every)
    return torch.cat([every[:first], z, every[first + 2 :]])


def first_of_all(z, every):
    return torch.cat([z, *[x for i, x in enumerate(every.chunk(comm.size("tp"))) if i != comm.rank("tp")]])


def one_row_twice(z, every):
    return torch.cat([every[: start()], z, every[start() + 1 :][: len(every) - start() - 2]])


def other_values(z, every):
    return by_parts(z * 2, every)


def written_since(z, every):
    z = z * 1
    every = comm.all_gather(z.detach(), "tp")
    with torch.no_grad():
        z.mul_(2)
    return by_slice(z, every)


def scaled_since(z, every):
    pieces = every.chunk(comm.size("tp"))
    every.mul_(2)
    return torch.cat([z if i == comm.rank("tp") else piece for i, piece in enumerate(pieces)])


def along_another_dim(z, every):
    square = z[:, :2]
    rows = list(comm.all_gather(square.detach(), "tp").chunk(comm.size("tp")))
    rows[comm.rank("tp")] = square
    return torch.cat(rows, 1)


def added(z, every):
    return every.index_put((torch.arange(2) + start(),), z, accumulate=True)


WRONG = [
    of_the_next_rank,
    first_of_all,
    one_row_twice,
    other_values,
    written_since,
    scaled_since,
    along_another_dim,
    added,
]


def put(function, mesh: Mesh):
    """On every rank: the type of the result, the result and the gradient of the rows."""

    def run():
        x = torch.linspace(comm.rank("tp"), comm.rank("tp") + 1, 8).view(2, 4).requires_grad_()
        with SpmdTypeMode(mesh):
            spmd.assert_type(x, {"dp": R, "tp": S(0)})
            z = x.sin()
            try:
                result = function(z, comm.all_gather(z.detach(), "tp"))
            except SpmdTypeError as error:
                return str(error)
            type_ = spmd.get_local_type(result).get("tp")
            result.square().sum().backward()
            return type_, result.detach(), x.grad

    return threads.run(mesh, run)


def by_operator(z, every):
    return spmd.all_gather(z, "tp", src=S(0), dst=I)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("function", RIGHT, ids=lambda f: f.__name__)
def test_rows_in_their_place_are_those_of_the_operator(function, mesh):
    for found, expected in zip(put(function, mesh), put(by_operator, mesh)):
        assert found[0] is expected[0] is I, found
        assert torch.equal(found[1], expected[1]) and torch.equal(found[2], expected[2])


@pytest.mark.parametrize("function", WRONG, ids=lambda f: f.__name__)
def test_rows_elsewhere_are_refused_on_every_rank_where_they_are(function):
    found, expected = put(function, MESHES[0]), put(by_operator, MESHES[0])
    refused = [isinstance(error, str) for error in found]
    assert sum(refused) >= 3
    for result, is_refused, of_operator in zip(found, refused, expected):
        assert is_refused or torch.equal(result[1], of_operator[1])


def _empty(*shape):
    return typed(2, 3, tp=S(0)).new_empty(*shape)


def _two_slices(second):
    whole = _empty(2, 3, 6)
    whole[..., :4].copy_(typed(2, 3, 4, grad=True, tp=S(0)))
    whole[..., 4:].copy_(second)
    return whole


def _rows_at_one_place():
    whole = _empty(4, 3)
    whole[:2].copy_(typed(2, 3, grad=True, tp=S(0)))
    return whole


def _across_rows():
    whole = _empty(2, 2, 6)
    whole.as_strided((1, 2, 3), (12, 6, 1), 4).copy_(typed(1, 2, 3, tp=S(1)))
    return whole


def _of_a_transpose():
    whole = _empty(2, 2, 3)
    whole.transpose(0, 1).copy_(typed(2, 2, 3, tp=S(0)))
    return whole


def test_an_empty_tensor_of_which_slices_become_shards_is_one():
    """DeepSeek-V3 joins keys with and without positions so."""
    with checked():
        whole = _two_slices(typed(2, 1, 2, grad=True, tp=S(0)).expand(-1, 3, -1))
        assert types(whole * 1) == (R, S(0)) and types(whole.sum(-1)) == (R, S(0))
        for call in (_rows_at_one_place, _across_rows, _of_a_transpose):
            assert types(call() * 1)[1] is V
        for tp in (R, S(1), P):
            with pytest.raises(SpmdTypeError):
                _two_slices(typed(2, 3, 2, grad=True, tp=tp)) * 1
