"""Reading and writing by position: what the specs say, and that it is true (see verify_rule)."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neuronx_dist.rules import RULES
from neuronx_dist.rules.indexing import index_sum, scatter_sum, write, write_number
from tests.rules.verify_rule import received, verify


def x(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def whole(high: int, *shape: int) -> Tensor:
    """Whole numbers below `high`."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


ROWS = torch.tensor([1, 0, 2, 3])
INDICES = [
    0,
    -1,
    (0, 1),
    (slice(None), slice(None)),
    (slice(None), slice(2, 4)),
    (..., 0),
    (..., slice(0, 4)),
    (None, ..., None),
    (slice(None), None, 1),
    ROWS,
    (slice(None), ROWS),
    (ROWS, slice(None), ROWS),
    (0, slice(None), ROWS),
    (ROWS, ROWS),
    (ROWS[:, None], ROWS[None, :2]),
    (slice(None), ROWS[:1], ROWS),
    (ROWS, None, ROWS),
    (..., ROWS, slice(None)),
    torch.tensor(1),
    [0, 1],
    ([0, 1], slice(None)),
    (slice(None), slice(0, 6, 2)),
    slice(1, None),
    slice(-2, None),
    True,
    (),
]


def scaled(label, spec, args, kwargs):
    """Slices for half blocks."""
    index = args[1]
    if isinstance(index, tuple):
        index = list(index)
        for at, item in enumerate(index):
            if isinstance(item, slice) and item.stop is not None and item.step is None:
                dim = spec.ins[0][at if index[0] is not ... else at + 1]
                if len(dim) > 1 and dim[1] == label:
                    index[at] = slice(item.start // 2, item.stop // 2)
        return (args[0], tuple(index)), kwargs
    if isinstance(index, slice) and len(spec.ins[0][0]) > 1 and spec.ins[0][0][1] == label:
        return (args[0], slice(index.start // 2, None)), kwargs
    return args, kwargs


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_getitem(index):
    verify(Tensor.__getitem__, x(4, 6, 8), index, _adapt=scaled)


def test_a_full_slice_is_the_identity_and_a_half_keeps_the_inner_factor():
    spec = RULES[Tensor.__getitem__].spec(x(4, 8), (slice(None), slice(0, 8)))
    assert not spec.fixed and spec.ins[0] == spec.outs[0]
    spec = RULES[Tensor.__getitem__].spec(x(4, 8), (..., slice(4, None)))
    blocks, rest = spec.ins[0][1]
    assert spec.fixed.keys() == spec.selected == {blocks} and spec.outs[0][1] == (rest,)


def test_a_mask_takes_dims_and_leaves_the_others():
    mask = x(4, 6) > 0
    spec = RULES[Tensor.__getitem__].spec(x(4, 6, 8), mask)
    assert spec.ins == (((0,), (1,), (3,)), ((0,), (1,))) and spec.outs == (((2,), (3,)),)
    assert spec.fixed.keys() == spec.selected == {0, 1}
    picked = x(4, 6, 8)[mask]
    assert torch.equal(picked[:, :4], x(4, 6, 8)[:, :, :4][mask])  # the other dim is free


def test_every_way_to_index_arrives_as_getitem():
    data = x(4, 6)
    assert received(lambda: data[0, None, ROWS]) == [Tensor.__getitem__]


# --- writing ---


@pytest.mark.parametrize("index", [i for i in INDICES if i is not True], ids=str)
def test_write(index):
    data = x(4, 6, 8)
    value = data[index] * 2 + 1

    def halves(label, spec, args, kwargs):
        (_, index), _ = scaled(label, spec, (args[0], args[2]), {})
        return (args[0], args[1], index, *args[3:]), kwargs

    unique = [i for i in (index if isinstance(index, tuple) else (index,)) if isinstance(i, Tensor)]
    verify(write, data, value, index, _adapt=halves, _refusals=False)
    if not unique:
        for number in (3.0, 0):  # with which some of these fill all of it
            verify(write_number, data, number, index, _adapt=halves, _refusals=False, _constant=True)


def test_write_under_a_mask_is_elementwise():
    mask = x(4, 6) > 0
    for value, function in [(0, write_number), (2.0, write_number), (x()[None], write), (x(), write)]:
        spec = verify(function, x(4, 6, 8), value, mask, _linear=function is write_number)
        assert spec is not None and not spec.fixed
    beside = x(8) > 0
    for index in ((mask, slice(None)), (..., beside), (slice(None), slice(None), beside), (slice(None), x(6, 8) > 0)):
        spec = verify(write_number, x(4, 6, 8), 0, index, _linear=True)
        assert spec is not None and not spec.fixed
    assert RULES[write_number].spec(x(4, 6, 8), 0, (mask, slice(0, 2))).fixed
    values = x(4, 6)[mask]
    spec = RULES[write].spec(x(4, 6), values, mask)
    assert {0, 1} <= spec.fixed.keys()


def test_setitem_is_a_write():
    rule = RULES[Tensor.__setitem__]
    assert rule.kind == "decompose" and rule.inplace == 0
    for index, value in [(0, 1.0), ((slice(None), 2), x(4)), (x(4, 6) > 0, 0.0), ((ROWS, ROWS), x(4))]:
        data = x(4, 6)
        expected = data.clone()
        expected[index] = value
        assert rule.decompose is not None
        assert torch.equal(rule.decompose(data, index, value), expected)
        assert torch.equal(data, x(4, 6))
    data = x(4, 6)
    assert received(lambda: data.__setitem__(0, 1.0)) == [Tensor.__setitem__]
    assert received(lambda: write(data, data[0], 0)) == [Tensor.__getitem__, write]
    verify(torch.index_put, x(4, 6), (ROWS, ROWS), x(4))
    verify(torch.index_put, x(4, 6), [ROWS * 0, ROWS], x(4), True)
    verify(Tensor.index_put_, x(4, 6), (ROWS,), x(4, 6), accumulate=True)


# --- tables ---


def test_gather_and_scatter():
    verify(torch.gather, x(4, 6, 8), 1, whole(6, 4, 2, 8))
    verify(Tensor.gather, x(4, 6), -1, whole(6, 4, 6))
    verify(torch.gather, x(4, 6), 0, whole(4, 2, 4))
    verify(torch.take_along_dim, x(4, 6), whole(6, 4, 2), 1)
    verify(torch.take_along_dim, x(4, 6, 2), whole(6, 1, 2, 1), 1)
    verify(torch.take_along_dim, x(4, 6), whole(24, 8))
    spec = verify(torch.scatter, x(4, 6), 1, whole(1, 2, 4), x(4, 8), _refusals=False)
    assert spec is not None and {number: len(dims) for number, dims in enumerate(spec.ins)} == {0: 2, 1: 2, 2: 2}
    index = torch.stack([torch.arange(6)[:4] for _ in range(4)])
    spec = RULES[torch.scatter].spec(x(4, 6), 1, index, x(4, 6))
    assert spec.ins[0][0] == spec.ins[1][0] == spec.ins[2][0] and spec.ins[0][0][0] not in spec.fixed
    assert spec.ins[1][1] != spec.ins[2][1], "only the first positions of the values count"
    index = torch.stack([torch.randperm(6)[:4] for _ in range(4)])
    verify(torch.scatter, x(4, 6), 1, index, x(4, 4), _refusals=False)
    verify(Tensor.scatter_, x(4, 6), 1, index, x(4, 6), _refusals=False)
    verify(torch.scatter, x(4, 6), 1, index, 2.0, _refusals=False)
    verify(torch.scatter, x(4, 6), 1, index, 0)
    verify(torch.scatter_reduce, x(4, 6), 1, index, x(4, 4), "amax")
    verify(torch.scatter_add, x(4, 6), 1, whole(6, 4, 8), x(4, 8))
    verify(Tensor.scatter_add_, x(4, 6), 0, whole(4, 2, 6), x(2, 6))


def test_sums_by_index_are_partial_where_the_index_is_sharded():
    spec = verify(
        *(scatter_sum, x(4, 8), 1, whole(6, 4, 8), (4, 6)),
        _adapt=lambda label, spec, a, k: ((*a[:3], (2, 6)) if label == 0 else a, k),
    )
    assert spec is not None and spec.reduced == {spec.ins[0][1][0]: "sum"} and spec.ins[0][0] == spec.outs[0][0]
    spec = RULES[scatter_sum].spec(x(2, 8), 1, whole(6, 2, 4), (4, 6))
    assert len(spec.fixed) == 2, "an index that is shorter in another dim"
    spec = verify(index_sum, x(8, 4), 0, whole(6, 8), 6)
    assert spec is not None and spec.reduced == {0: "sum"} and spec.ins[1] == ((0,),)
    verify(torch.index_add, x(6, 4), 0, whole(6, 8), x(8, 4), alpha=2)
    verify(Tensor.index_add_, x(4, 6), 1, whole(6, 8), x(4, 8))


def test_vectors_of_positions():
    verify(torch.index_select, x(4, 6), 1, whole(6, 8))
    verify(Tensor.index_select, x(4, 6, 2), 0, whole(4, 2))
    distinct = torch.tensor([3, 1, 0, 2])
    verify(torch.index_copy, x(6, 4), 0, distinct, x(4, 4), _refusals=False)
    verify(Tensor.index_copy_, x(4, 6), 1, distinct, x(4, 4), _refusals=False)
    verify(torch.index_fill, x(4, 6), 1, distinct, 2.0, _refusals=False)
    verify(Tensor.index_fill_, x(4, 6), 1, distinct, 0)
    verify(torch.index_reduce, x(4, 6), 1, distinct, x(4, 4), "amax")
    verify(torch.take, x(4, 6), whole(24, 2, 8))
    verify(torch.put, x(4, 6), distinct, x(4), _refusals=False)


def test_embedding():
    spec = verify(F.embedding, whole(8, 4, 6), x(8, 2))
    assert spec is not None and spec.looked_up == spec.fixed.keys() == {spec.ins[1][0][0]}
    verify(F.embedding, whole(8, 4), x(8, 2), padding_idx=0)
    verify(torch.embedding, x(8, 2), whole(8, 4, 6))
    for mode in ("sum", "mean"):
        verify(F.embedding_bag, whole(8, 4, 6), x(8, 2), mode=mode)
        verify(F.embedding_bag, whole(8, 6), x(8, 2), torch.tensor([0, 2]), mode=mode, _refusals=False)
    verify(F.embedding_bag, whole(8, 4, 6), x(8, 2), mode="max", _linear=False)
    verify(F.one_hot, whole(6, 4, 2), 6)
    renorm = RULES[torch.embedding_renorm_].spec(x(8, 2), whole(8, 4), 1.0, 2.0)
    assert set(renorm.fixed) == {0, 1, 2}


def test_as_many_results_as_the_values_say():
    mask = x(4, 6) > 0
    for function, args in [(torch.masked_select, (x(4, 6), mask)), (torch.nonzero, (mask,)), (torch.argwhere, (mask,))]:
        spec = RULES[function].spec(*args)
        assert set(spec.fixed) == {0, 1} and spec.sizes[spec.outs[0][0][0]] == 0
        assert len(spec.outs[0]) == function(*args).dim()
    spec = RULES[torch.nonzero].spec(mask, as_tuple=True)
    assert len(spec.outs) == 2
    verify(torch.masked_scatter, x(4, 6), mask, x(24), _refusals=False)
    verify(torch.repeat_interleave, x(4, 6), torch.tensor([1, 2, 1, 2]), 0, output_size=6)


def test_scatter_that_multiplies_is_linear_in_nothing():
    """The product of partial sums is no partial sum; their sum is one."""
    data, index, source = x(4, 6), whole(2, 2, 6), x(2, 6)
    affine = RULES[torch.scatter].affine
    for how, linear in (("add", True), ("multiply", False)):
        assert bool(affine(data, 0, index, source, reduce=how)) is not linear
    assert affine(data, 0, index, 3.0) and not affine(data, 0, index, 0.0)


@pytest.mark.filterwarnings("ignore:The reduce argument")
@pytest.mark.parametrize("how", ["add", "multiply"])
def test_scatter_with_a_reduction(how):
    verify(torch.scatter, x(4, 6), 0, whole(2, 2, 6), x(2, 6), reduce=how, _refusals=how == "add")
