"""Views, moves and pieces: what their specs say, and that it is true (see verify_rule)."""

from math import prod

import pytest
import torch
from torch import Tensor

import neuronx_dist.rules.moves
import neuronx_dist.rules.splits
import neuronx_dist.rules.views  # noqa: F401 - registers the rules
from neuronx_dist.rules.views import regroup
from tests.rules.verify_rule import verify


def x(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def halved(label, spec, dims):
    """The sizes of `dims` when `label` is cut in two."""
    sizes = {**spec.sizes, label: spec.sizes[label] // 2}
    return [prod(sizes[one] for one in factors) for factors in dims]


def resized(label, spec, args, kwargs):
    """Arguments of a view of a piece: the sizes of the piece of the result, one by one."""
    return (args[0], *halved(label, spec, spec.outs[0])), {}


def resized_list(label, spec, args, kwargs):
    return (args[0], halved(label, spec, spec.outs[0])), {}


VIEWS = [
    ((2, 6, 8), (12, 8)),
    ((12, 8), (2, 6, 8)),
    ((2, 6, 8), (2, 6, 4, 2)),
    ((2, 6, 8), (12, 2, 4)),
    ((2, 6, 4, 2), (2, 6, 8)),
    ((4, 6, 8), (192,)),
    ((192,), (4, 6, 8)),
    ((2, 1, 6), (2, 6)),
    ((2, 6), (2, 1, 6)),
    ((1, 6, 8), (6, 8)),
    ((6, 8), (1, 6, 8)),
    ((2, 6, 8), (2, 6, 1, 8)),
    ((2, 5, 1, 8), (2, 5, 8)),
    ((8, 4), (4, 8)),
    ((16, 3), (24, 2)),
    ((2, 6, 8), (2, 6, 8)),
    ((6,), (6, 1, 1)),
    ((1, 1), (1,)),
    ((8, 6, 4), (8, 3, 8)),
    ((2, 3, 4), (1, 6, 4, 1)),
    ((2, 6, 8), (2, 1, 6, 8)),
    ((6, 8), (6, 1, 8)),
    ((6, 8), (6, 8, 1)),
    ((2, 6), (1, 2, 1, 6)),
    ((2, 6, 8), (2, 6, 8, 1)),
    ((2, 4, 6, 8), (2, 4, 6, 1, 8)),
    ((2, 4, 6, 8), (2, 4, 1, 6, 8)),
    ((4, 6), (4, -1)),
    ((4, 6), (-1, 4, 6)),
    ((2, 4, 6), (2, 4, -1, 6)),
    ((4, 6), (4, 6, -1)),
    ((2, 1, 6), (-1, 6)),
]


@pytest.mark.parametrize(("source", "target"), VIEWS)
@pytest.mark.parametrize("function", [Tensor.view, Tensor.reshape])
def test_views_are_true(function, source, target):
    verify(function, x(*source), *target, _adapt=resized)


@pytest.mark.parametrize(("source", "target"), VIEWS)
def test_torch_reshape_is_true(source, target):
    verify(torch.reshape, x(*source), target, _adapt=resized_list)


@pytest.mark.parametrize(
    ("source", "target", "inferred", "ins", "outs"),
    [
        ((2, 6, 8), (12, 2, 4), None, [[2], [6], [2, 4]], [[2, 6], [2], [4]]),
        ((12, 8), (2, 6, 8), None, [[2, 6], [8]], [[2], [6], [8]]),
        ((8,), (2, 1, 4), None, [[2, 1, 4]], [[2], [1], [4]]),
        # one head per rank: the new dim of size 1 is the outer factor of the one it came from
        ((2, 6, 8), (2, 6, 1, 8), 2, [[2], [6], [1, 8]], [[2], [6], [1], [8]]),
        ((2, 6, 8), (2, 6, 1, 8), None, [[2], [6], [1, 8]], [[2], [6], [1], [8]]),
        ((2, 6, 1, 8), (2, 6, 8), 2, [[2], [6], [1], [8]], [[2], [6], [1, 8]]),
        # one sample per rank
        ((1, 6, 8), (6, 8), None, [[1], [6], [8]], [[1, 6], [8]]),
        ((6, 8), (1, 6, 8), 0, [[1, 6], [8]], [[1], [6], [8]]),
        # a new dim, as unsqueeze makes it, or one sample that was merged away: weak
        ((6, 8), (1, 6, 8), None, [[1, 6], [8]], [[1], [6], [8]]),
        ((6, 8), (6, 1, 8), None, [[6], [1, 8]], [[6], [1], [8]]),
    ],
)
def test_factors(source, target, inferred, ins, outs):
    spec = regroup(source, target, inferred)
    assert [[spec.sizes[label] for label in dim] for dim in spec.ins[0]] == ins
    assert [[spec.sizes[label] for label in dim] for dim in spec.outs[0]] == outs
    assert not spec.fixed
    labels_in = [label for dim in spec.ins[0] for label in dim]
    assert labels_in == [label for dim in spec.outs[0] for label in dim], "row-major order stays"


def test_what_has_no_common_factor_is_fixed():
    spec = regroup((4, 3), (6, 2))
    assert spec.sizes[spec.ins[0][0][0]] == 2 and spec.ins[0][0][0] == spec.outs[0][0][0]  # the outer 2 goes on
    assert spec.fixed.keys() == {spec.ins[0][0][1], *spec.ins[0][1]}
    assert "view from (4, 3) to (6, 2)" in spec.fixed[spec.ins[0][1][0]]
    assert regroup((0, 4), (4, 0)).fixed and not regroup((0, 4), (0, 4)).fixed


def test_inferred_sizes():
    by_minus_one = torch.reshape(x(2, 6, 8), (2, -1, 4)).shape
    assert by_minus_one == (2, 12, 4)
    spec = verify(Tensor.view, x(2, 6, 8), 2, 6, -1, 4, _adapt=resized)
    assert spec is not None and len(spec.ins[0][2]) == 2


def unflattened(label, spec, args, kwargs):
    return (args[0], args[1], tuple(halved(label, spec, spec.outs[0])[args[1] : args[1] + 2])), {}


@pytest.mark.parametrize(("dim", "sizes"), [(0, (2, 6)), (1, (2, 4)), (1, (4, -1))])
@pytest.mark.parametrize("function", [torch.unflatten, Tensor.unflatten])
def test_unflatten(function, dim, sizes):
    verify(function, x(12, 8), dim, sizes, _adapt=unflattened)


@pytest.mark.parametrize("dims", [(), (1,), (1, 2), (0, 1), (-2, -1)])
def test_flatten(dims):
    verify(torch.flatten, x(2, 6, 4), *dims)
    verify(Tensor.flatten, x(2, 6, 4), *dims)


def test_other_shapes():
    verify(torch.ravel, x(4, 6))
    verify(Tensor.ravel, x(4, 6))
    verify(Tensor.flatten, x())
    spec = verify(
        Tensor.view_as,
        *(x(12, 4), x(2, 6, 4)),
        _adapt=lambda label, spec, args, kwargs: ((args[0], x(*halved(label, spec, spec.outs[0]))), {}),
    )
    assert spec is not None and spec.ins[1] is None
    verify(Tensor.view, x(4, 6), torch.int64, _refusals=False)
    verify(Tensor.view, x(4, 6), torch.float32, _refusals=False)
    verify(torch.view_as_real, torch.complex(x(4, 6), x(4, 6)))
    verify(torch.view_as_complex, x(4, 6, 2), _linear=False)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (Tensor.permute, (2, 0, 1)),
        (Tensor.permute, ((2, 0, -2),)),
        (torch.permute, ((2, 0, 1),)),
        (Tensor.transpose, (0, -1)),
        (torch.transpose, (1, 2)),
        (Tensor.swapaxes, (0, 1)),
        (torch.swapdims, (0, 1)),
        (Tensor.movedim, (0, 2)),
        (torch.movedim, ((0, 1), (2, 0))),
        (torch.moveaxis, (-1, 0)),
        (torch.adjoint, ()),
        (Tensor.mT.__get__, ()),
        (Tensor.mH.__get__, ()),
        (Tensor.transpose_, (0, 1)),
        (Tensor.unsqueeze, (0,)),
        (Tensor.unsqueeze, (-1,)),
        (torch.unsqueeze, (-2,)),
        (Tensor.squeeze, ()),
        (Tensor.squeeze, (1,)),
        (torch.flip, ((0, 2),)),
        (Tensor.flip, (0,)),
        (Tensor.flip, (0, 1)),
        (torch.fliplr, ()),
        (torch.flipud, ()),
        (torch.roll, (1, 0)),
        (torch.roll, ((1, 2), (0, 1))),
        (Tensor.roll, (1,)),
        (torch.rot90, ()),
        (torch.rot90, (2, (1, 2))),
        (torch.tril, ()),
        (torch.triu, (1,)),
        (Tensor.tril_, (-1,)),
        (torch.diagonal, (0, 1, 2)),
        (torch.diagonal, (1,)),
        (Tensor.unfold, (1, 3, 1)),
        (torch.as_strided, ((2, 2), (1, 2))),
    ],
)
def test_moves(function, args):
    verify(function, x(4, 6, 8), *args)


def windows(label, spec, args, kwargs):
    """The size and the step of `unfold`, for half windows."""
    width = args[2] // 2 if (label,) == spec.outs[0][-1] else args[2]
    return (args[0], args[1], width, width), kwargs


def test_moves_of_other_shapes():
    verify(Tensor.unfold, x(4, 6, 8), 2, 2, 2, _adapt=windows)
    verify(Tensor.unfold, x(4, 6, 8), 2, 4, 4, _adapt=windows)
    verify(torch.rot90, x(4, 6), 3)
    verify(torch.rot90, x(4, 6), 4)
    verify(torch.t, x(4, 6))
    verify(Tensor.T.__get__, x(4, 6))
    verify(Tensor.H.__get__, x(4, 6))
    verify(torch.t, x(4))
    verify(torch.diag, x(4))
    verify(torch.diag, x(4, 6), 1)
    verify(torch.diag_embed, x(4, 6), 1)
    verify(torch.diag_embed, x(4, 6), 0, 0, 2)
    verify(torch.diagflat, x(4, 2))
    verify(torch.diagflat, x(4, 2), 1)
    verify(torch.diagflat, x(4), -2)
    verify(torch.squeeze, x(4, 1, 6))
    verify(torch.squeeze, x(4, 1, 1, 6), (1, 2))
    verify(Tensor.squeeze_, x(4, 1, 6))
    verify(Tensor.unsqueeze_, x(4, 6), 1)


def test_squeeze_of_a_dim_of_one_is_fixed():
    spec = verify(Tensor.squeeze, x(1, 4, 6), 0)
    assert spec is not None and spec.fixed.keys() == {0}


def test_copies():
    def expanded(label, spec, args, kwargs):
        return (args[0], *[-1 if at > 1 else size for at, size in enumerate(args[1:])]), kwargs

    verify(Tensor.expand, x(1, 4, 6), 3, -1, -1)
    verify(Tensor.expand, x(4, 6), 3, -1, 6, _adapt=resized)
    verify(torch.broadcast_to, x(4, 1), (2, 4, 6), _adapt=resized_list)
    spec = verify(
        Tensor.expand_as,
        x(4, 1),
        x(2, 4, 6),
        _adapt=lambda label, spec, a, k: ((a[0], x(*halved(label, spec, spec.outs[0]))), {}),
    )
    assert spec is not None and spec.ins == (((1,), ()), None)
    verify(Tensor.repeat, x(4, 6), 2, 1, 3)
    verify(Tensor.repeat, x(4, 1), 2, 3)
    verify(torch.tile, x(4, 6), (2,))
    verify(Tensor.tile, x(4, 6), 2, 1, 2)
    verify(torch.repeat_interleave, x(4, 6), 3, 1)
    verify(Tensor.repeat_interleave, x(4, 6), 2, dim=0)
    verify(torch.repeat_interleave, x(4, 6), 3)
    verify(torch.broadcast_tensors, x(4, 1), x(1, 6))
    verify(torch.meshgrid, x(4), x(6), x(2), indexing="ij")
    verify(torch.meshgrid, x(4), x(6), x(2), indexing="xy")
    verify(torch.meshgrid, [x(4), x(1)], indexing="xy")
    verify(torch.cartesian_prod, x(4), x(6), _linear=False)
    verify(torch.block_diag, x(4, 2), x(6))
    verify(torch.atleast_2d, x(4))
    verify(torch.atleast_3d, x(4, 6))
    verify(torch.atleast_2d, [x(4), x(4, 6)])


# --- pieces ---


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (Tensor.chunk, (2, 1)),
        (torch.chunk, (4, -1)),
        (torch.chunk, (5, 2)),
        (Tensor.tensor_split, (2, 2)),
        (torch.tensor_split, (3, 2)),
        (torch.hsplit, (3,)),
        (torch.vsplit, (2,)),
        (torch.unbind, (1,)),
        (Tensor.unbind, ()),
        (Tensor.select, (1, 2)),
        (torch.select, (0, -1)),
    ],
)
def test_pieces(function, args):
    verify(function, x(4, 6, 8), *args)


def scaled(label, spec, args, kwargs):
    """Sizes and starts of cuts, for half blocks."""
    block = {factors[-1] for factors in spec.ins[0] if len(factors) > 1 or factors[0] in spec.fixed}
    half = label in block

    def scale(value):
        return [scale(one) for one in value] if isinstance(value, (list, tuple)) else value // 2 if half else value

    if args[0].ndim == 3 and isinstance(args[1], int) and len(args) == 4:  # narrow
        return (args[0], args[1], scale(args[2]), scale(args[3])), kwargs
    return (args[0], scale(args[1]), *args[2:]), kwargs


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (Tensor.split, (4, 2)),
        (torch.split, (2,)),
        (torch.split, ([2, 6], 2)),
        (Tensor.split, ([4, 2, 2], 2)),
        (torch.split_with_sizes, ([2, 4], 1)),
        (torch.tensor_split, ((2, 6), 2)),
        (torch.dsplit, ([4],)),
        (Tensor.narrow, (2, 4, 4)),
        (torch.narrow, (2, 2, 6)),
        (torch.narrow_copy, (2, 1, 4)),
        (torch.narrow, (1, 2, 2)),
    ],
)
def test_cuts_in_sizes(function, args):
    verify(function, x(4, 6, 8), *args, _adapt=scaled)


def test_chunk_keeps_the_inner_factor():
    spec = verify(Tensor.chunk, x(4, 8), 2, -1)
    assert spec is not None
    blocks, rest = spec.ins[0][1]
    assert (spec.sizes[blocks], spec.sizes[rest]) == (2, 4)
    assert spec.fixed == {blocks: "chunk(2) cuts it into pieces"} and spec.selected == {blocks}
    assert all(out[1] == (rest,) for out in spec.outs)
    spec = verify(Tensor.chunk, x(4, 7), 2, -1)
    assert spec is not None and spec.fixed.keys() == {spec.ins[0][1][0]} and len(spec.ins[0][1]) == 1


def test_whole_pieces_cut_nothing():
    for function, args in [(Tensor.narrow, (1, 0, 8)), (Tensor.split, (8, 1)), (Tensor.chunk, (1, 1))]:
        spec = verify(
            function,
            x(4, 8),
            *args,
            _adapt=lambda label, spec, a, k: (
                (a[0], *[value // 2 if value == 8 and label == spec.ins[0][1][0] else value for value in a[1:]]),
                k,
            ),
        )
        assert spec is not None and not spec.fixed


def test_cat():
    verify(torch.cat, [x(4, 6), x(4, 6)], -1)
    verify(torch.cat, [x(4, 6), x(4, 2), x(4, 4)], 1)
    verify(torch.cat, (x(4, 6), x(2, 6)))
    verify(torch.cat, [x(4, 3), x(4, 2)], dim=1)
    verify(torch.concat, [x(4, 6), x(4, 6)], dim=0)
    verify(torch.cat, [x(4, 6)])
    verify(torch.cat, [x(4, 6), torch.empty(0, dtype=torch.float64)], 1, _refusals=False)
    verify(torch.cat, [torch.empty(0), torch.empty(0)], _refusals=False)
    verify(torch.stack, [x(4, 6), x(4, 6)])
    verify(torch.stack, [x(4, 6)] * 1 + [x(4, 6) + 1], dim=-1)
    verify(torch.hstack, [x(4, 6), x(4, 2)])
    verify(torch.hstack, [x(4), x(6)])
    verify(torch.vstack, [x(6), x(4, 6)])
    verify(torch.dstack, [x(4, 6), x(4, 6)])
    verify(torch.column_stack, [x(4), x(4, 6)])
    verify(torch.column_stack, [x(4), x(4) + 1])


def test_cat_of_shards_is_blocks_of_shards():
    spec = verify(torch.cat, [x(4, 6), x(4, 6) + 1], 1)
    assert spec is not None
    blocks, rest = spec.outs[0][1]
    assert spec.sizes[blocks] == 2 and spec.ins == (((0,), (rest,)),) * 2 and not spec.fixed
