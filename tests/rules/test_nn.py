"""Norms, attention, padding, pools and losses: what the specs say, and that it is true (see verify_rule)."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neuronx_dist.rules import RULES
from neuronx_dist.rules.bodies import body
from tests.rules.verify_rule import received, verify


def x(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


# --- norms ---


def normalised(label, spec, args, kwargs):
    """The shape that is normalised, of the piece."""
    return (args[0], tuple(args[0].shape[-len(args[1]) :]), *args[2:]), kwargs


def test_norms():
    for shape in ((8,), (6, 8)):
        spec = verify(F.layer_norm, x(4, 6, 8), shape, _adapt=normalised)
        assert spec is not None and len(spec.fixed) == len(shape)
        verify(F.layer_norm, x(4, 6, 8), shape, x(*shape), x(*shape, seed=1), _adapt=normalised, _linear=False)
        verify(F.rms_norm, x(4, 6, 8), shape, x(*shape), _adapt=normalised, _linear=False)
    verify(torch.layer_norm, x(4, 6, 8), (8,), _adapt=normalised)
    verify(torch.rms_norm, x(4, 6, 8), (8,), _adapt=normalised)


def grouped(label, spec, args, kwargs):
    return (args[0], args[1] // 2 if label == spec.ins[0][1][0] else args[1], *args[2:]), kwargs


def test_norms_of_channels():
    verify(F.group_norm, x(2, 8, 6), 4, _adapt=grouped)
    verify(F.group_norm, x(2, 8, 6), 4, x(8), x(8, seed=1), _adapt=grouped, _linear=False)
    mean, var = x(4), x(4).abs() + 1
    verify(F.batch_norm, x(2, 4, 6), mean, var, x(4, seed=1), x(4, seed=2), _linear=False)
    spec = verify(F.batch_norm, x(2, 4, 6), None, None, training=True)
    assert spec is not None and set(spec.fixed) == {0, 2}
    verify(F.instance_norm, x(2, 4, 6))
    verify(F.instance_norm, x(2, 4, 6), weight=x(4), bias=x(4, seed=1), _linear=False)


# --- attention ---


def test_attention():
    q, k, v = x(2, 4, 6, 8), x(2, 4, 10, 8), x(2, 4, 10, 12)
    spec = verify(F.scaled_dot_product_attention, q, k, v, scale=1.0)
    assert spec is not None
    heads, queries, values = (spec.outs[0][dim][0] for dim in (1, 2, 3))
    assert set(spec.fixed) == {spec.ins[1][2][0], spec.ins[0][3][0]}
    assert not {heads, queries, values} & set(spec.fixed)
    verify(F.scaled_dot_product_attention, q, k, v, x(6, 10), scale=1.0)
    verify(F.scaled_dot_product_attention, q, k, v, x(2, 1, 6, 10), scale=1.0)
    verify(F.scaled_dot_product_attention, q, k, v, attn_mask=x(2, 4, 1, 10) > 0, scale=1.0, _refusals=False)
    verify(F.scaled_dot_product_attention, q[0], k[0], v[0], scale=1.0)
    spec = verify(F.scaled_dot_product_attention, q, k, v, is_causal=True, scale=1.0)
    assert spec is not None and queries in spec.fixed


def test_attention_with_fewer_heads_of_key_and_value():
    q, k, v = x(2, 8, 6, 8), x(2, 2, 10, 8), x(2, 2, 10, 12)
    spec = verify(F.scaled_dot_product_attention, q, k, v, enable_gqa=True, scale=1.0)
    assert spec is not None
    heads, group = spec.ins[0][1]
    assert (spec.sizes[heads], spec.sizes[group]) == (2, 4)
    assert spec.ins[1][1] == spec.ins[2][1] == (heads,) and spec.outs[0][1] == (heads, group)
    verify(F.scaled_dot_product_attention, q, k, v, x(2, 8, 6, 10), enable_gqa=True, scale=1.0)
    spec = verify(F.scaled_dot_product_attention, q, x(2, 8, 10, 8), x(2, 8, 10, 12), enable_gqa=True, scale=1.0)
    assert spec is not None and len(spec.outs[0][1]) == 1, "as many of each: no groups"
    for heads_q, heads_kv in ((1, 4), (4, 1)):
        some = x(2, heads_q, 6, 8), x(2, heads_kv, 10, 8), x(2, heads_kv, 10, 12)
        spec = verify(F.scaled_dot_product_attention, *some, scale=1.0)
        assert spec is not None and len(spec.outs[0][1]) == 1, "heads broadcast"


def test_attention_draws_only_with_dropout():
    draws = RULES[F.scaled_dot_product_attention].random
    assert callable(draws) and not draws(1, 2, 3) and draws(1, 2, 3, None, 0.5) and draws(1, 2, 3, dropout_p=0.1)


def test_multi_head_attention_is_what_it_is_made_of():
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    call = (x(2, 6, 8), x(2, 6, 8, seed=1), x(2, 6, 8, seed=2))
    names = [function.__name__ for function in received(lambda: layer(*call))]
    assert names[-1] == "transpose" and "multi_head_attention_forward" in names
    made_of: list = []
    args = [t.transpose(0, 1) for t in call] + [8, 2, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0]
    args += [layer.out_proj.weight, layer.out_proj.bias]
    made_of = received(lambda: body(F.multi_head_attention_forward)(*args))
    assert F.multi_head_attention_forward not in made_of and F.linear in made_of
    assert all(function in RULES for function in made_of), [f for f in made_of if f not in RULES]
    left, right = F.multi_head_attention_forward(*args), body(F.multi_head_attention_forward)(*args)
    assert torch.equal(left[0], right[0]) and torch.equal(left[1], right[1])
    with pytest.raises(TypeError, match="written in python"):
        body(torch.add)
    with pytest.raises(TypeError, match="does not dispatch to modes"):
        body(torch.broadcast_shapes)


def test_bodies_are_true_and_made_of_functions_with_rules():
    calls = [
        (F.multilabel_soft_margin_loss, (x(4, 6), whole(2, 4, 6).double()), {}),
        (F.triplet_margin_with_distance_loss, (x(4, 6), x(4, 6, seed=1), x(4, 6, seed=2)), {}),
        (F.local_response_norm, (x(2, 4, 6), 2), {}),
        (F.lp_pool2d, (x(2, 4, 6, 8).abs(), 2, 2), {}),
    ]
    for function, args, kwargs in calls:
        verify(function, *args, **kwargs)
        made_of = received(lambda: body(function)(*args, **kwargs))  # noqa: B023
        assert [one for one in made_of if one not in RULES] == [], function


# --- padding, pools, images ---


def test_padding():
    verify(F.pad, x(4, 6, 8), (1, 2))
    spec = verify(F.pad, x(4, 6, 8), (0, 0, 1, 1))
    assert spec is not None and set(spec.fixed) == {1}
    verify(F.pad, x(4, 6, 8), (1, 2), value=3.0)
    verify(F.pad, x(4, 6, 8), (1, 1), "reflect")
    verify(F.pad, x(4, 6, 8), (0, 0), value=3.0, _refusals=False)
    verify(F.pad, x(4, 6, 8), (-1, 0))
    verify(torch.constant_pad_nd, x(4, 6), (1, 2), 0)


def test_pools():
    for function in (F.max_pool2d, F.avg_pool2d):
        verify(function, x(2, 4, 8, 12), 2)
        verify(function, x(2, 4, 8, 12), 3, 1, 1)
        verify(function, x(4, 9, 11), (3, 2), ceil_mode=True)
    verify(F.max_pool1d, x(2, 4, 8), 2)
    verify(F.max_pool2d, x(2, 4, 8, 12), 3, return_indices=True)
    verify(F.avg_pool1d, x(2, 4, 8), 3)
    verify(F.adaptive_avg_pool2d, x(2, 4, 8, 12), (3, None))
    verify(F.adaptive_max_pool1d, x(2, 4, 8), 3)
    verify(F.interpolate, x(2, 4, 6, 8), scale_factor=1.5, mode="bilinear")
    verify(F.interpolate, x(2, 4, 6), size=9, mode="linear")


def test_images():

    spec = RULES[F.pixel_shuffle].spec(x(2, 16, 6, 8), 2)
    assert [[spec.sizes[label] for label in dim] for dim in spec.outs[0]] == [[2], [4], [6, 2], [8, 2]]
    channels = spec.ins[0][1][0]
    left = F.pixel_shuffle(x(2, 16, 6, 8)[:, :8], 2)
    assert channels == spec.outs[0][1][0] and torch.equal(left, F.pixel_shuffle(x(2, 16, 6, 8), 2)[:, :2])
    back = RULES[F.pixel_unshuffle].spec(x(2, 4, 12, 16), 2)
    assert (back.ins, back.outs) == (spec.outs, spec.ins)
    mixed = RULES[F.channel_shuffle].spec(x(2, 8, 6), 4)
    assert mixed.ins[0][1] == mixed.outs[0][1][::-1]
    verify(F.unfold, x(2, 4, 6, 8), 2, stride=2, _refusals=False)
    verify(F.fold, x(2, 16, 12), (6, 8), 2, stride=2)


# --- losses ---


def probabilities(*shape: int) -> Tensor:
    return torch.sigmoid(x(*shape))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_losses(reduction):
    options = dict(reduction=reduction, _linear=False)
    a, b, signs = x(4, 6), x(4, 6, seed=1), torch.sign(x(4, 6, seed=2))
    for function in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss):
        verify(function, a, b, **options)
    verify(F.kl_div, a, probabilities(4, 6), **options)
    verify(F.kl_div, a, b, log_target=True, **options)
    verify(F.gaussian_nll_loss, a, b, probabilities(4, 6), **options)
    verify(F.soft_margin_loss, a, signs, **options)
    verify(F.hinge_embedding_loss, a, signs, **options)
    verify(F.margin_ranking_loss, a, b, signs, **options)
    verify(F.binary_cross_entropy, probabilities(4, 6), probabilities(4, 6), **options)
    verify(F.binary_cross_entropy_with_logits, a, probabilities(4, 6), pos_weight=probabilities(6), **options)
    verify(F.cross_entropy, x(4, 6, 2), whole(6, 4, 2), **options)
    verify(F.cross_entropy, x(4, 6), probabilities(4, 6), **options)
    verify(F.cross_entropy, x(6), whole(6), **options)
    verify(F.nll_loss, x(4, 6, 2), whole(6, 4, 2), reduction=reduction)
    verify(F.triplet_margin_loss, a, b, x(4, 6, seed=3), **options)
    verify(F.cosine_embedding_loss, a, b, signs[:, 0], **options)
    verify(F.multilabel_margin_loss, a, whole(6, 4, 6), _refusals=False, **options)
    verify(F.multi_margin_loss, a, whole(6, 4), **options)
    verify(F.multi_margin_loss, a, whole(6, 4), weight=probabilities(6), **options)
    if reduction != "mean":
        verify(F.cross_entropy, x(4, 6), whole(6, 4), probabilities(6), **options)
        lengths = torch.tensor([8, 8]), torch.tensor([3, 3])
        log_probs = F.log_softmax(x(8, 2, 6), -1)
        verify(F.ctc_loss, log_probs, whole(5, 2, 4) + 1, *lengths, _refusals=False, **options)


def test_losses_of_before():
    verify(F.mse_loss, x(4, 6), x(4, 6, seed=1), size_average=False, _linear=False)
    verify(F.mse_loss, x(4, 6), x(4, 6, seed=1), reduce=False, _linear=False)
    verify(F.kl_div, x(4, 6), probabilities(4, 6), reduction="batchmean", _linear=False)
    spec = verify(F.mse_loss, x(4, 6), x(4, 1), reduction="sum", _linear=False)
    assert spec is not None and spec.reduced == {0: "sum", 1: "sum"}


def test_cross_entropy_names_the_repair():
    spec = RULES[F.cross_entropy].spec(x(4, 6), whole(6, 4))
    assert "parallel_cross_entropy" in spec.fixed[1] and spec.reduced == {0: "mean_of_valid"}


def test_reductions_by_number():
    """torch's own functions name them 0, 1, 2."""
    a, target, signs = x(4, 6), probabilities(4, 6), torch.sign(x(4, 6, seed=2))
    for number, how in enumerate(("none", "mean", "sum")):
        for spec in (
            verify(torch.kl_div, a, target, reduction=number, _linear=False),
            verify(torch.hinge_embedding_loss, a, signs, reduction=number, _linear=False),
        ):
            assert spec is not None and spec.reduced == ({0: how, 1: how} if number else {})
