"""Factories, random numbers, questions, and the rest of the rules; and which functions have no rule."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import get_overridable_functions, get_testing_overrides, resolve_name

from neuronx_dist.rules import RULES
from tests.rules.verify_rule import received, verify

KINDS = {"op", "factory", "uniform", "zero", "random", "copy_of_meta", "scalar", "pass", "decompose"}


def x(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


def weights(gates: int) -> list[Tensor]:
    """Weights of a recurrent network from 5 features to 3, whose steps have so many gates."""
    shapes = ((gates * 3, 5), (gates * 3, 3), (gates * 3,), (gates * 3,))
    return [x(*shape, seed=number) for number, shape in enumerate(shapes)]


# --- recurrent networks, grids ---


def test_recurrent_networks():
    state = x(1, 4, 3)
    last = (True, 1, 0.0, False, False, False)
    spec = verify(torch.lstm, x(2, 4, 5), (state, x(1, 4, 3, seed=1)), weights(4), *last)
    assert spec is not None and spec.ins[0][1][0] not in spec.fixed
    for function, gates in ((torch.gru, 3), (torch.rnn_tanh, 1), (torch.rnn_relu, 1)):
        spec = verify(function, x(2, 4, 5), state, weights(gates), *last)
        assert spec is not None and {label for dim in spec.ins[0][::2] for label in dim} <= set(spec.fixed)
        of_batches = verify(function, x(4, 2, 5), state, weights(gates), *last[:-1], True)
        assert of_batches is not None and of_batches.ins[0][0][0] not in of_batches.fixed
    for cell, gates in ((torch.gru_cell, 3), (torch.rnn_tanh_cell, 1), (torch.rnn_relu_cell, 1)):
        verify(cell, x(4, 5), x(4, 3), *weights(gates))
    verify(torch.lstm_cell, x(4, 5), (x(4, 3), x(4, 3, seed=1)), *weights(4))
    assert RULES[torch.lstm].random(x(2, 4, 5), (state, state), [], True, 1, 0.5, True, False, False)  # type: ignore[operator]
    assert not RULES[torch.lstm].random(x(2, 4, 5), (state, state), [], True, 1, 0.5, False, False, False)  # type: ignore[operator]


def test_packed_samples_are_not_independent():
    packed = torch.nn.utils.rnn.pack_sequence([x(4, 5), x(2, 5)])
    call = (packed.data, packed.batch_sizes, x(1, 2, 3), weights(3), True, 1, 0.0, False, False)
    spec = RULES[torch.gru].spec(*call)  # type: ignore[misc]
    assert [tuple(spec.sizes[label] for (label,) in dims) for dims in spec.outs] == [
        tuple(result.shape) for result in torch.gru(*call)
    ]
    assert {label for dims in spec.ins for dim in dims or () for label in dim} <= set(spec.fixed)


def test_affine_grid():
    def images(label, spec, args, kwargs):
        return (args[0], (2, *args[1][1:]), *args[2:]), kwargs

    spec = verify(F.affine_grid, x(4, 2, 3), (4, 1, 6, 8), False, _adapt=images)
    assert spec is not None and len(spec.fixed) == 2
    with pytest.raises(ValueError, match="affine_grid: got 2 matrices for 4 images"):
        RULES[F.affine_grid].spec(x(2, 2, 3), (4, 1, 6, 8))  # type: ignore[misc]


# --- the registry ---


def test_every_rule_is_well_formed():
    for function, rule in RULES.items():
        assert callable(function) and rule.name and rule.kind in KINDS, (function, rule)
        assert (rule.decompose is not None) == (rule.kind == "decompose"), rule
        assert rule.spec is not None or rule.kind != "op", rule
        assert rule.affine is None or callable(rule.affine), rule
        assert all(isinstance(number, int) for group in rule.linear for number in group), rule


def test_a_name_that_ends_in_an_underscore_writes():
    wrong = [
        resolve_name(function)
        for function, rule in RULES.items()
        if (name := getattr(function, "__name__", "")).endswith("_")
        and not name.startswith("_")
        and rule.kind != "pass"
        and rule.inplace is None
    ]
    assert wrong == []


# Who calls one of these on a tensor with types is told that there is no rule. Only ever shorten this list.
WITHOUT_RULE = """
_coalesced_ _fused_rms_norm _fw_primal_copy _indices _indices_copy _make_dual_copy _native_batch_norm_legit
_reshape_alias_copy _rowwise_prune _sparse_broadcast_to_copy _sparse_mask_projection _sym_acos _sym_asin _sym_atan
_sym_cos _sym_cosh _sym_sin _sym_sinh _sym_tan _sym_tanh _values _values_copy _wrapped_linear_prepack
_wrapped_quantized_linear_prepacked adaptive_max_pool1d affine_grid_generator apply_ as_strided_ as_strided_scatter
autocast batch_norm batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats
batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats ccol_indices ccol_indices_copy
_update_names choose_qparams_optimized coalesce col_indices col_indices_copy combinations conv_tbc convolution corrcoef
cosine_embedding_loss cov crow_indices crow_indices_copy ctc_loss cumulative_trapezoid dequantize embedding_bag
fake_quantize_per_channel_affine fake_quantize_per_tensor_affine fbgemm_linear_fp16_weight
fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation
fbgemm_linear_quantize_weight fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix fractional_max_pool2d
fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices frobenius_norm
fused_moving_avg_obs_fake_quant gradient histogramdd hsmm hspmm index indices indices_copy instance_norm
int_repr istft lobpcg lstsq map2_ map_ matrix_sqrth max_pool1d_with_indices miopen_batch_norm miopen_convolution
miopen_convolution_add_relu miopen_convolution_relu miopen_convolution_transpose miopen_depthwise_convolution miopen_rnn
native_batch_norm native_group_norm native_norm norm_except_dim nuclear_norm pca_lowrank pdist linalg_polar
q_per_channel_scales q_per_channel_zero_points quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic
quantized_batch_norm quantized_gru_cell quantized_lstm_cell quantized_max_pool1d quantized_max_pool2d
quantized_max_pool3d quantized_rnn_relu_cell quantized_rnn_tanh_cell resize resize_ resize_as resize_as_
resize_as_sparse_ row_indices row_indices_copy set_ slice_copy slice_inverse smm sparse_mask sparse_resize_
sparse_resize_and_clear_ saddmm sspaddmm stft svd_lowrank tensorinv tensorsolve to_sparse trapezoid trapz
triplet_margin_loss values values_copy vander
"""


def plain_name(function):
    """`torch.linalg.polar` is a decomposition, and `torch.polar` another function."""
    name = function.__name__
    return name if name == "linalg_polar" else name.removeprefix("linalg_")


def test_what_has_no_rule():
    functions = set(get_testing_overrides())
    for listed in get_overridable_functions().values():
        functions.update(listed)
    functions = {f for f in functions if not (getattr(f, "__module__", None) or "").startswith("torch.distributed")}
    missing = {plain_name(function) for function in functions if function not in RULES}
    assert missing - set(WITHOUT_RULE.split()) == set(), "these need a rule"
    here = {plain_name(function) for function in functions}  # other versions have others
    assert set(WITHOUT_RULE.split()) & here - missing == set(), "these have one by now: take them off the list"


# --- questions, and values that leave ---


def test_questions_and_values_that_leave():
    data = x(4, 6)
    asked = received(lambda: (data.shape, data.size(0), data.dim(), data.stride(), data.dtype, data.is_contiguous()))
    asked += received(lambda: (data.requires_grad, data.grad, data.device, data.numel(), len(data), repr(data)))
    assert len(asked) == 12 and {RULES[function].kind for function in asked} == {"pass"}
    one = data[0, 0]
    left = received(lambda: (one.item(), float(one), bool(one > 5), int(one), f"{one}", one.tolist(), one.numpy()))
    assert [RULES[f].kind for f in left if RULES[f].kind not in ("op", "pass")].count("scalar") == 6
    with torch.no_grad():
        pass
    assert [RULES[f].kind for f in received(lambda: torch.no_grad().__enter__())] == ["pass"]
    torch.set_grad_enabled(True)


def test_properties_arrive_as_getters_and_setters():
    data = x(4, 6)
    assert RULES[received(lambda: data.data)[0]].name == "data"
    got = received(lambda: setattr(data, "data", data.clone()))
    assert RULES[got[-1]].inplace == 0
    assert RULES[received(lambda: setattr(data, "grad", None))[0]].kind == "pass"
    verify(Tensor.data.__get__, data)


# --- factories ---


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: torch.zeros(3), "zero"),
        (lambda: x(2).new_zeros(3), "zero"),
        (lambda: torch.zeros_like(x(2)), "zero"),
        (lambda: torch.ones(3), "uniform"),
        (lambda: torch.full((2,), 3.0), "uniform"),
        (lambda: torch.full_like(x(2), 3.0), "uniform"),
        (lambda: x(2).new_full((2,), 3.0), "uniform"),
        (lambda: torch.arange(3), "factory"),
        (lambda: torch.eye(3), "factory"),
        (lambda: torch.linspace(0, 1, 3), "factory"),
        (lambda: torch.tensor([1.0]), "factory"),
        (lambda: torch.as_tensor([1.0]), "factory"),
        (lambda: torch.empty(3), "copy_of_meta"),
        (lambda: torch.empty_like(x(2)), "copy_of_meta"),
        (lambda: x(2).new_empty(3), "copy_of_meta"),
        (lambda: torch.rand(3), "random"),
        (lambda: torch.randn_like(x(2)), "random"),
        (lambda: torch.randint(0, 2, (3,)), "random"),
        (lambda: torch.randperm(3), "random"),
        (lambda: x(2).normal_(), "random"),
        (lambda: torch.nn.init.uniform_(x(2)), "random"),
        (lambda: torch.nn.init.constant_(x(2), 1.0), "uniform"),
    ],
)
def test_factories(call, kind):
    assert RULES[received(call)[-1]].kind == kind


def test_factories_with_operands():
    assert RULES[torch.zeros_like].spec(x(4, 6)).ins == (None,)
    spec = RULES[torch.full].spec((2, 3), torch.tensor(1.0))
    assert spec.ins == ((),) and [spec.sizes[dim[0]] for dim in spec.outs[0]] == [2, 3]
    spec = RULES[Tensor.new_full].spec(x(4), (2,), fill_value=torch.tensor(1.0))
    assert spec.ins == (None, ())
    verify(torch.as_tensor, x(4, 6))
    verify(torch.tensor, [x(), x() + 1])
    assert RULES[torch.tensor].spec([1.0, 2.0]).ins == ()


def test_random_numbers():
    for function in (torch.bernoulli, torch.poisson):
        spec = RULES[function].spec(x(4, 6))
        assert spec.ins == spec.outs and RULES[function].random is True
    spec = RULES[torch.multinomial].spec(x(4, 6), 3)
    assert set(spec.fixed) == {1}
    spec = RULES[torch.normal].spec(x(4, 6), x(6))
    assert spec.ins == (((0,), (1,)), ((1,),))


def test_dropout_draws_where_it_drops():
    draws = RULES[F.dropout].random
    assert callable(draws)
    assert draws(x(2)) and draws(x(2), 0.1) and draws(x(2), p=0.1, training=True)
    assert not draws(x(2), 0.0) and not draws(x(2), p=0.5, training=False) and not draws(x(2), 0.5, False)
    verify(F.dropout, x(4, 6), training=False)
    verify(F.alpha_dropout, x(4, 6), training=False)
    spec = RULES[F.dropout2d].spec(x(2, 4, 6, 8))
    assert set(spec.fixed) == {2, 3} and not RULES[F.dropout2d].spec(x(2, 4, 6, 8), training=False).fixed
    affine = RULES[F.alpha_dropout].affine
    assert affine is not None and affine(x(2), 0.5) and not RULES[F.dropout].affine


# --- the rest ---


def test_slices_that_are_written():
    verify(torch.select_scatter, x(4, 6), x(6), 0, 1)
    verify(torch.slice_scatter, x(4, 6), x(4, 3), 1, 1, 4)
    verify(torch.slice_scatter, x(4, 6), x(4, 6, seed=1), 1, _refusals=False)
    verify(torch.diagonal_scatter, x(4, 6), x(4))
    spec = RULES[Tensor.fill_diagonal_].spec(x(4, 6), 1.0)
    assert len(spec.fixed) == 2


def test_transforms():
    z = torch.complex(x(4, 6), x(4, 6, seed=1))
    verify(torch.fft.fft, z)
    verify(torch.fft.rfft, x(4, 6))
    verify(torch.fft.irfft, z, _refusals=False)
    verify(torch.fft.ifft, z, 8, 0)
    verify(torch.fft.fft2, x(2, 4, 6))
    verify(torch.fft.rfftn, x(2, 4, 6), dim=(0, 2))
    verify(torch.fft.fftshift, x(4, 6), 1)


def test_copies_and_the_rest():
    assert RULES[torch.view_copy].spec(x(4, 6), (24,)).outs == (((0, 1),),)
    verify(torch.permute_copy, x(4, 6), (1, 0))
    verify(torch.unbind_copy, x(4, 6))
    verify(torch.detach_copy, x(4, 6))
    verify(Tensor.__reversed__, x(4, 6))
    verify(F.grid_sample, x(2, 4, 6, 8), torch.tanh(x(2, 10, 12, 2)), align_corners=True)
    verify(torch.grid_sampler_2d, x(2, 4, 6, 8), torch.tanh(x(2, 10, 12, 2)), 0, 1, True)
    verify(torch.unravel_index, whole(24, 8), (4, 6))
    verify(torch.special.chebyshev_polynomial_v, x(4, 6), torch.tensor(2), _refusals=False)
    tokens, experts = x(8, 4).to(torch.bfloat16), x(2, 4, 8).to(torch.bfloat16)
    ends = torch.tensor([2, 8], dtype=torch.int32)
    spec = RULES[torch._grouped_mm].spec(tokens, experts, offs=ends)
    assert spec.ins == (((0,), (1,)), ((3,), (1,), (2,)), ((3,),)) and spec.outs == (((0,), (2,)),)
    assert spec.reduced == {1: "sum"} and set(spec.fixed) == {0, 3}
    spec = RULES[torch._grouped_mm].spec(tokens.T, tokens, offs=ends)
    assert spec.outs == (((3,), (0,), (2,)),) and set(spec.fixed) == {1, 3} and not spec.reduced
    if hasattr(F, "linear_cross_entropy"):
        verify(F.linear_cross_entropy, x(4, 6), x(8, 6), whole(8, 4))
    for function in (torch.unique, torch.bincount):
        assert set(RULES[function].spec(whole(6, 8)).fixed) == {0}
    layer = RULES[torch.native_layer_norm].spec(x(4, 6), (6,), None, None, 1e-5)
    assert layer.outs == (((0,), (1,)), ((0,), ()), ((0,), ()))


class Secret(int):
    """A number that may be used, but not looked at: what a rank's coordinate is during a check."""

    def _read(self, *args):
        raise AssertionError("a spec looked at the rank")

    __index__ = __int__ = __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __bool__ = __hash__ = _read


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.narrow, (1, Secret(2), Secret(4))),
        (torch.select, (0, Secret(1))),
        (Tensor.__getitem__, (Secret(1),)),
        (Tensor.__getitem__, ((slice(Secret(1), None), slice(Secret(2), Secret(4))),)),
        (Tensor.view, (Secret(2), -1, Secret(8))),
        (Tensor.expand, (Secret(4), Secret(8))),
        (Tensor.repeat, (Secret(2), 1)),
        (torch.chunk, (Secret(2), 1)),
        (torch.split, (Secret(2), 1)),
        (torch.roll, (Secret(1), 0)),
        (F.pad, ((Secret(1), Secret(2)),)),
        (F.one_hot, (Secret(3),)),
    ],
)
def test_specs_do_not_look_at_ranks(function, args):
    spec = RULES[function].spec(whole(3, 4, 8), *args)
    assert all(type(size) is int for size in spec.sizes.values())
