"""Rules of reductions, statistics, softmax, sorting and scans, checked with numbers."""

from __future__ import annotations

from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neuronx_dist.rules import RULES
from tests.rules.verify_rule import verify


def signed(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def mask(*shape):
    return signed(*shape) > 0


COMBINED = {
    "sum": "sum",
    "nansum": "sum",
    "mean": "mean",
    "prod": "prod",
    "amax": "max",
    "amin": "min",
    "any": "any",
    "all": "all",
}


@pytest.mark.parametrize("name", COMBINED)
@pytest.mark.parametrize("place", [torch, Tensor], ids=["torch", "Tensor"])
def test_reductions_that_combine(name, place):
    function = getattr(place, name)
    x = signed(2, 4, 6)
    if name in ("any", "all"):  # whichever dims are left, with both answers
        x = (torch.arange(2 * 4 * 6) == 9).view(2, 4, 6)
        x = x if name == "any" else ~x
    several = name != "prod"
    calls = [
        ((), {}, (0, 1, 2)),
        ((1,), {}, (1,)),
        ((-1, True), {}, (2,)),
        ((), dict(dim=1, keepdim=True), (1,)),
        ((), dict(axis=-2), (1,)),
    ]
    if several:
        calls += [(((0, -1),), {}, (0, 2)), ((), dict(dim=[1, 2], keepdim=True), (1, 2)), (([0, 1, 2],), {}, (0, 1, 2))]
    for args, kwargs, over in calls:
        spec = verify(function, x, *args, _refusals=name != "nansum", **kwargs)
        assert spec.reduced == dict.fromkeys(over, COMBINED[name])
        assert not spec.fixed
    verify(function, x[0, 0, 0], _linear=False)


def test_reductions_are_linear_or_not():
    assert RULES[torch.sum].linear == RULES[Tensor.mean].linear == RULES[torch.cumsum].linear == ((0,),)
    for function in (torch.nansum, torch.amax, torch.prod, torch.logsumexp, torch.softmax, torch.linalg.vector_norm):
        assert RULES[function].linear == ()
    verify(torch.sum, signed(4, 6) * 5, 1, dtype=torch.int64)  # rounds first
    verify(torch.sum, mask(4, 6), dtype=torch.float64)
    verify(torch.count_nonzero, signed(4, 6).relu(), 1)
    verify(torch.count_nonzero, signed(4, 6).relu(), dim=(0, 1))


def test_sums_to_a_size():
    def halved(label, spec, args, kwargs):
        """A piece along a label that stays is summed to half the size there."""
        x, *size = args
        for dim, factors in enumerate(spec.outs[0]):
            if label in factors:
                size[dim] //= 2
        return (x, *size), kwargs

    x = signed(2, 4, 6)
    assert verify(Tensor.sum_to_size, x, 4, 1, _adapt=halved).reduced == {0: "sum", 2: "sum"}
    assert verify(Tensor.sum_to_size, x, 1, 4, 6, _adapt=halved).reduced == {0: "sum"}
    assert RULES[Tensor.sum_to_size].spec(x, torch.Size([6])).outs == (((2,),),)


def test_norms():
    x = signed(2, 4, 6)
    for order, kind in ((1, "sum"), (inf, "max"), (-inf, "min"), (0, "sum")):
        y = x if order else x.relu()  # other numbers of elements that are not zero
        assert verify(torch.linalg.vector_norm, y, order, -1).reduced == {2: kind}
        assert verify(torch.norm, y, order).reduced == dict.fromkeys((0, 1, 2), kind)
        assert verify(Tensor.norm, y, p=order, dim=(0, 1), keepdim=True).reduced == dict.fromkeys((0, 1), kind)
        assert verify(torch.linalg.norm, y, order, 1).reduced == {1: kind}
    for function in (torch.norm, Tensor.norm, torch.linalg.vector_norm, torch.linalg.norm):
        spec = verify(function, x)
        assert not spec.reduced and list(spec.fixed) == [0, 1, 2]
        assert list(verify(function, x, 2, -1, True).fixed) == [2]
        assert list(verify(function, x, dim=(1, 2)).fixed) == [1, 2]
    assert "all_reduce" in spec.fixed[0]
    assert list(verify(torch.linalg.norm, x[0], 1).fixed) == [0, 1], "a norm of a matrix"
    assert list(verify(torch.linalg.norm, x, 1, (1, 2)).fixed) == [1, 2]
    assert list(verify(torch.linalg.matrix_norm, x).fixed) == [1, 2]
    verify(torch.norm, x, p="fro", dim=(0, 1))
    verify(torch.dist, x, signed(4, 6))
    verify(F.pairwise_distance, x, signed(2, 4, 6, seed=1))
    verify(F.pairwise_distance, x, signed(2, 4, 6, seed=1), keepdim=True)
    assert list(verify(F.cosine_similarity, x, signed(4, 6, seed=1), dim=-1).fixed) == [2]
    assert list(verify(F.cosine_similarity, x, signed(2, 4, 6, seed=1)).fixed) == [1]
    assert list(verify(F.normalize, x).fixed) == [1]
    assert list(verify(F.normalize, x, dim=-1).fixed) == [2]
    assert list(verify(F.normalize, x, 1.0, 0).fixed) == [0]


@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
def test_statistics(name):
    x = signed(2, 4, 6)
    for function in (getattr(torch, name), getattr(Tensor, name, None)):
        if function is not None:
            assert list(verify(function, x).fixed) == [0, 1, 2]
            assert list(verify(function, x, False).fixed) == [0, 1, 2]
            assert list(verify(function, x, 1).fixed) == [1]
            assert list(verify(function, x, (0, 1), False, True).fixed) == [0, 1]
            assert list(verify(function, x, -1, correction=0, keepdim=True).fixed) == [2]
            assert list(verify(function, x, unbiased=False).fixed) == [0, 1, 2]


def test_reductions_of_a_whole_dim():
    x = signed(2, 4, 6)
    for function in (torch.argmax, Tensor.argmin):
        assert list(verify(function, x).fixed) == [0, 1, 2]
        assert list(verify(function, x, -1, True).fixed) == [2]
    for function in (torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp):
        assert list(verify(function, x, -1).fixed) == [2]
        assert list(verify(function, x, (0, 1), True).fixed) == [0, 1]
    for function in (torch.median, Tensor.nanmedian):
        assert list(verify(function, x).fixed) == [0, 1, 2]
        assert len(verify(function, x, 1, keepdim=True).outs) == 2
    assert list(verify(torch.mode, x).fixed) == [2]
    assert list(verify(torch.mode, x, 0).fixed) == [0]
    assert list(verify(torch.kthvalue, x, 2).fixed) == [2]
    assert list(verify(torch.kthvalue, x, 2, 1, True).fixed) == [1]
    x_with_nan = x.clone()
    x_with_nan[0, 0, 0] = float("nan")
    verify(torch.nanmean, x_with_nan, 1)
    assert list(verify(torch.aminmax, x, dim=1).fixed) == [1]
    assert len(verify(torch.aminmax, x).outs) == 2
    verify(torch.quantile, x, 0.3, 1)
    verify(torch.quantile, x, torch.tensor([0.2, 0.7], dtype=torch.float64), 1, keepdim=True, _refusals=False)
    verify(torch.nanquantile, x, 0.5)
    verify(torch.trace, signed(4, 6))
    if hasattr(torch, "hash_tensor"):  # of newer versions
        verify(torch.hash_tensor, signed(4, 6), 1, _refusals=False)


@pytest.mark.parametrize(("name", "kind"), [("max", "max"), ("min", "min")])
def test_three_forms_of_the_extremes(name, kind):
    x = signed(2, 4, 6)
    for function in (getattr(torch, name), getattr(Tensor, name)):
        assert verify(function, x).reduced == dict.fromkeys((0, 1, 2), kind)
        spec = verify(function, x, 1)
        assert len(spec.outs) == 2 and list(spec.fixed) == [1] and not spec.reduced
        assert f"a{name} gives the value alone" in spec.fixed[1]
        assert verify(function, x, dim=-1, keepdim=True).outs[0] == ((0,), (1,), ())
        spec = verify(function, x, signed(4, 1, seed=1))
        assert not spec.fixed and not spec.reduced
        assert verify(function, x, other=signed(4, 1, seed=1)) == spec


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(name):
    x = signed(2, 4, 6)
    for function in (getattr(torch, name), getattr(Tensor, name), getattr(F, name), getattr(torch.special, name)):
        spec = verify(function, x, -1)
        assert spec.fixed == {2: f"{name} normalises over it"} and spec.outs == spec.ins
        verify(function, x, dim=1, dtype=torch.float64)
    with pytest.warns(UserWarning, match="Implicit"):
        assert list(verify(getattr(F, name), x).fixed) == [0]
    with pytest.warns(UserWarning, match="Implicit"):
        assert list(verify(getattr(F, name), x[0]).fixed) == [1]
    verify(F.softmin, x, 1)
    assert RULES[F.gumbel_softmax].random
    assert list(RULES[F.gumbel_softmax].spec(x, 1, True).fixed) == [2]


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"])
def test_scans(name):
    x = signed(2, 4, 6)
    for function in (getattr(torch, name), getattr(Tensor, name), getattr(Tensor, f"{name}_", None)):
        if function is not None:
            assert list(verify(function, x, 1).fixed) == [1]
            verify(function, x, dim=-1)


def test_sorting():
    x = signed(2, 4, 6)
    for function in (torch.sort, Tensor.sort, torch.argsort, Tensor.argsort):
        assert list(verify(function, x).fixed) == [2]
        assert list(verify(function, x, 0).fixed) == [0]
        verify(function, x, dim=1, descending=True)
        verify(function, x, stable=True, dim=1)
    verify(torch.msort, signed(6, 4))
    for function in (torch.topk, Tensor.topk):
        spec = verify(function, x, 2)
        assert spec.sizes[3] == 2 and list(spec.fixed) == [2]
        verify(function, x, 2, 1)
        verify(function, x, k=2, dim=0, largest=False, _refusals=False)  # both of two


def test_differences():
    x = signed(2, 4, 6)
    assert list(verify(torch.diff, x).fixed) == [2]
    verify(torch.diff, x, 2, 1)
    verify(torch.diff, x, dim=1, prepend=signed(2, 2, 6), append=signed(2, 4, 6, seed=1))
    verify(Tensor.diff, x, append=signed(2, 4, 2))


def test_scalars_have_no_dims():
    x = torch.tensor(2.0, dtype=torch.float64)
    for function in (torch.sum, torch.amax, torch.argmax, torch.std_mean, torch.max):
        spec = RULES[function].spec(x)
        assert spec.ins == ((),) and not spec.fixed and not spec.reduced
    assert RULES[torch.softmax].spec(x, 0).fixed == {}
    verify(torch.softmax, x, 0, _refusals=False)
    verify(torch.cumsum, x, 0)


def test_looking_for_values():
    x, order = signed(2, 4), torch.linspace(-2, 2, 6, dtype=torch.float64)
    assert verify(torch.isin, x, x[0], _refusals=True).fixed.keys() == {2}
    verify(torch.isin, x, float(x[1, 2]))
    verify(torch.isin, 0.5, x, _refusals=False)
    assert verify(torch.bucketize, x, order).reduced == {2: "sum"}
    assert verify(torch.searchsorted, order, x).reduced == {2: "sum"}
    sorter = torch.arange(6).flip(0)
    assert verify(torch.searchsorted, order.flip(0), x, sorter=sorter).fixed.keys() == {2}
    assert verify(torch.searchsorted, order.expand(2, 6).contiguous(), x, right=True).ins[0] == ((0,), (2,))
    verify(torch.bucketize, 0.3, order, _refusals=False)
    assert verify(torch.histc, x, 6, -4.0, 4.0).reduced == {0: "sum", 1: "sum"}
    assert verify(torch.histc, x, bins=6).fixed.keys() == {0, 1}
    assert verify(torch.histc, x, 6, 2.0, 2.0).fixed.keys() == {0, 1}  # equal bounds: those of the values


def test_norms_of_slices_and_reductions_of_segments():
    x = signed(4, 6, 2)
    assert verify(torch.renorm, x, 2, 1, 0.5).fixed.keys() == {0, 2}
    lengths = torch.tensor([1, 3])
    assert verify(torch.segment_reduce, x, "sum", lengths=lengths, unsafe=True).fixed.keys() == {0, 3}
    spec = verify(torch.segment_reduce, x, "max", offsets=torch.tensor([0, 1, 4]), unsafe=True)
    assert spec.outs == (((4,), (1,), (2,)),)
