"""Functions without a handler run on shards where what is sharded is a free label of the checker's rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm, spmd
from neuronx_dist.rules import RULES
from neuronx_dist.shard_tensor import Partial, Replicate, Shard, ShardTensor, distribute_tensor, fallback
from tests.shard_tensor.support.cases import Case, assert_close, on_ranks, run_case, verbs

pytestmark = pytest.mark.slow

IDS = (torch.arange(16 * 3).view(16, 3) % 4) + 1
LENGTHS = (torch.arange(16) % 3) + 1


def paths(x, reduction):
    """CTC of samples in dim 1."""
    steps = torch.full((16,), 6)
    return F.ctc_loss(x.log_softmax(2), IDS, steps, LENGTHS, reduction=reduction)


def weights(gates: int, width: int = 3, hidden: int = 2) -> tuple[tuple[int, ...], ...]:
    return (gates * hidden, width), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,)


def lstm(x, h, c, *params):
    return torch.lstm(x, (h, c), list(params), True, 1, 0.0, True, False, False)


def gru_of_batches(x, h, *params):
    return torch.gru(x, h, list(params), True, 1, 0.0, True, False, True)


BATCH = [(0, 1), (0, 2), (0, 3)]  # what stays whole
STEPS = [(0, 0), (0, 2), (1, 0), (1, 2), (2, 0), (2, 2)]
CASES = [
    Case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), [(16, 8, 3, 2)], whole=BATCH),
    Case("pixel_shuffle of rows", lambda x: F.pixel_shuffle(x, 2), [(2, 4, 16, 3)], whole=[(0, 0), (0, 1), (0, 3)]),
    Case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), [(16, 2, 4, 6)], whole=BATCH),
    Case("affine_grid", lambda x: F.affine_grid(x, torch.Size((16, 5, 3, 4)), False), [(16, 2, 3)], whole=BATCH[:2]),
    Case(
        "grid_sample",
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        [(16, 2, 3, 4), (16, 2, 3, 2)],
        whole=[*BATCH, (1, 1), (1, 2), (1, 3)],
    ),
    Case("rfft over the other dims", lambda x: torch.fft.rfft2(x).abs(), [(16, 4, 6)], whole=BATCH[:2]),
    Case("fft of columns", lambda x: torch.fft.fft(x, dim=0).abs(), [(5, 16)], whole=[(0, 0)]),
    Case("ctc_loss, mean", lambda x: paths(x, "mean"), [(6, 16, 5)], whole=[(0, 0), (0, 2)]),
    Case("ctc_loss, sum", lambda x: paths(x, "sum"), [(6, 16, 5)], whole=[(0, 0), (0, 2)]),
    Case("ctc_loss, none", lambda x: paths(x, "none"), [(6, 16, 5)], whole=[(0, 0), (0, 2)]),
    Case("lstm", lstm, [(4, 16, 3), (1, 16, 2), (1, 16, 2), *weights(4)], plain=(3, 4, 5, 6), whole=STEPS),
    Case(
        "gru, batch first",
        gru_of_batches,
        [(16, 4, 3), (1, 16, 2), *weights(3)],
        plain=(2, 3, 4, 5),
        whole=[(0, 1), (0, 2), (1, 0), (1, 2)],
    ),
    Case(
        "rnn_tanh_cell",
        torch.rnn_tanh_cell,
        [(16, 3), (16, 2), *weights(1)],
        plain=(2, 3, 4, 5),
        whole=[(0, 1), (1, 1)],
    ),
    Case("linalg.inv", lambda x: torch.linalg.inv(x @ x.mT + torch.eye(3)), [(16, 3, 3)], whole=BATCH[:2]),
]


@pytest.mark.each_value
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("ranks", [4, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_a_free_label_is_not_gathered(case, ranks):
    assert run_case(case, (ranks,)) > 0


@pytest.mark.parametrize("dims", [(0, 2), (2, 0)])
def test_two_mesh_dims_cut_two_labels(dims):
    def function(mesh):
        x = torch.arange(6.0 * 8 * 5 * 2, dtype=torch.float64).view(6, 8, 5, 2)
        placements = [Shard(dim) for dim in dims]
        shards = distribute_tensor(x, mesh, placements, sizes=[(1, x.shape[dim] - 1) for dim in dims], src=None)
        with fallback("error"), comm.record() as calls:
            y = F.pixel_shuffle(shards, 2)
        assert list(calls) == [] and y.placements == tuple(placements)
        assert_close(y.full_tensor(), F.pixel_shuffle(x, 2), "pixel_shuffle")

    on_ranks(4, function, (2, 2))


def test_without_a_free_label_operands_are_gathered():
    def function(mesh):
        x = distribute_tensor(torch.randn(6), mesh, [Shard(0)], src=None)
        matrix = distribute_tensor(torch.eye(4), mesh, [Shard(1)], sizes=[(3, 1)], src=None)
        refusals = []
        for call in (lambda: torch.fft.fft(x), lambda: torch.linalg.inv(matrix)):
            with fallback("error"), pytest.raises(NotImplementedError) as caught:
                call()
            refusals.append(str(caught.value).split(":")[0])
        return refusals

    assert on_ranks(2, function) == [["fft_fft has no handler", "linalg_inv has no handler"]] * 2


def test_shards_move_to_a_free_label():
    def function(mesh):
        images = torch.randn(2, 8, 3, 3, dtype=torch.float64)
        shards = distribute_tensor(images, mesh, [Shard(1)], sizes=[(3, 5)], src=None)
        with fallback("error"), comm.record() as calls:
            y = F.pixel_shuffle(shards, 2)  # channels are cut inside of what becomes one pixel
        assert [call.verb for call in calls] == ["exchange"] and y.placements == (Shard(0),)
        assert torch.equal(y.full_tensor(), F.pixel_shuffle(images, 2))

    on_ranks(2, function)


@pytest.mark.parametrize("sizes", [(1, 0), (0, 1)])
def test_one_sample_stays_on_its_rank(sizes):
    x = torch.arange(24.0, dtype=torch.float64).view(1, 2, 3, 4).sin().requires_grad_()
    grid = torch.arange(12.0, dtype=torch.float64).view(1, 3, 2, 2).cos()
    expected = F.grid_sample(x, grid, align_corners=False)
    (grad,) = torch.autograd.grad(expected.square().sum(), x)

    def function(mesh):
        sample = distribute_tensor(x.detach(), mesh, [Shard(0)], sizes=[sizes], src=None).requires_grad_()
        with fallback("error"), comm.record() as calls:
            y = F.grid_sample(sample, grid, align_corners=False)
        assert calls == [] and y.placements == (Shard(0),) and y._spec.sizes == (sizes,)
        assert_close(y.full_tensor(), expected.detach(), "grid_sample")
        y.square().sum().backward()
        assert_close(sample.grad.full_tensor(), grad, "its gradient")

    on_ranks(2, function)


def test_a_sum_is_reduced_to_shards_of_a_free_label():
    x = torch.arange(45.0, dtype=torch.float64).view(5, 3, 3).sin() + 2 * torch.eye(3)

    def function(mesh):
        summand = ShardTensor.from_local(x * (mesh.get_rank() + 1), mesh, [Partial()])
        with fallback("error"), comm.record() as calls:
            y = torch.linalg.inv(summand)
        assert y.placements == (Shard(0),) and verbs(calls) == ["exchange"], (y, verbs(calls))
        assert_close(y.full_tensor(), torch.linalg.inv(x * 3), "inv")

    on_ranks(2, function)


def test_two_mesh_dims_do_not_shard_one_label():
    a, b = torch.eye(3).expand(4, 4, 3, 3).double(), torch.arange(48.0).double().view(4, 4, 3, 1)

    def function(mesh):
        x = distribute_tensor(a, mesh, [Shard(0), Replicate()], src=None)
        y = distribute_tensor(b, mesh, [Replicate(), Shard(0)], src=None)
        with fallback("error"):
            assert_close(torch.linalg.solve(x, y).full_tensor(), b, "solve")

    on_ranks(4, function, (2, 2))


def test_shards_that_disagree_move_to_equal_ones():
    def function(mesh):
        x, grid = torch.randn(6, 2, 3, 3), torch.rand(6, 2, 2, 2)
        x_shards = distribute_tensor(x, mesh, [Shard(0)], sizes=[(1, 5)], src=None)
        grid_shards = distribute_tensor(grid, mesh, [Shard(0)], sizes=[(4, 2)], src=None)
        with fallback("error"):
            y = F.grid_sample(x_shards, grid_shards, align_corners=False)
            F.grid_sample(x_shards, grid_shards.redistribute(sizes=[(1, 5)]), align_corners=False)
        assert torch.equal(y.full_tensor(), F.grid_sample(x, grid, align_corners=False))

    on_ranks(2, function)


def test_a_mesh_dim_whose_label_is_free_stays():
    def function(mesh):
        x = torch.randn(4, 6, 5, dtype=torch.float64)
        shards = distribute_tensor(x, mesh, [Shard(1), Shard(2)], sizes=[(1, 5), (2, 3)], src=None)
        with fallback("error"):
            y = torch.fft.fft(shards, dim=2)
        assert y.placements == (Shard(1), Shard(0)) and y._spec.sizes == ((1, 5), (2, 2))
        assert_close(y.full_tensor().abs(), torch.fft.fft(x, dim=2).abs(), "fft")

    on_ranks(4, function, (2, 2))


def test_a_weight_that_all_samples_share_gets_one_reduced_gradient():
    def function(mesh):
        x = distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)], sizes=[(4, 1)], src=None)
        params = [distribute_tensor(torch.ones(s), mesh, [Replicate()], src=None) for s in ((2, 3), (2, 2), (2,), (2,))]
        for each in params:
            each.requires_grad_()
        state = torch.zeros(5, 2)
        with comm.record() as calls:
            torch.rnn_tanh_cell(x, state, *params).sum().backward()
        return [call.verb for call in calls]

    assert on_ranks(2, function) == [["all_reduce"] * 2] * 2  # the sum, and all gradients together


@pytest.mark.parametrize(
    "function, dtype",
    [
        (lambda x: F.grid_sample(x.bfloat16(), torch.zeros(6, 3, 3, 2).bfloat16(), align_corners=False), torch.float32),
        (lambda x: torch.linalg.vecdot(x, x), torch.bfloat16),
        (lambda x: torch.kl_div(x.bfloat16(), x.bfloat16()), torch.float32),
        (lambda x: torch.linalg.inv(x[:, 0]), torch.float32),
        (lambda x: torch.nn.LSTM(4, 2, batch_first=True)(x[:, 0])[0], torch.bfloat16),
    ],
    ids="grid_sample vecdot kl_div inv lstm".split(),
)
def test_ranks_of_empty_shards_have_the_dtype_of_autocast(function, dtype):
    try:
        with torch.autocast("cpu", torch.bfloat16):
            function(torch.randn(6, 2, 4, 4))
    except RuntimeError as error:
        if "primitive descriptor" in str(error):
            pytest.skip("torch has no LSTM in bfloat16 on this CPU")
        raise

    def on_each(mesh):
        x = distribute_tensor(torch.randn(6, 2, 4, 4), mesh, [Shard(0)], sizes=[(0, 6)], src=None).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), fallback("error"):
            y = function(x)
        y.sum().backward()
        return y.to_local().dtype

    assert on_ranks(2, on_each) == [dtype] * 2


def test_a_function_of_a_user_by_its_rule():
    def double(x):
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(double, (x,), x)
        return x * 2

    spmd.register_rule(double)(lambda x: RULES[torch.relu].spec(x))
    try:

        def function(mesh):
            x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)], sizes=[(4, 2)], src=None)
            with fallback("error"):
                y = double(x)
            return y.placements == (Shard(0),) and y.full_tensor().tolist()

        assert on_ranks(2, function) == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]] * 2
    finally:
        del RULES[double]


def test_equal_numbers_of_other_types_are_other_calls():
    def scaled(x, number):
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(scaled, (x,), x, number)
        return x * number

    spmd.register_rule(scaled)(lambda x, number: RULES[torch.relu].spec(x))
    try:

        def function(mesh):
            x = distribute_tensor(torch.arange(3), mesh, [Shard(0)], sizes=[(1, 2)], src=None)
            zeros = [scaled(x, number).full_tensor() for number in (0.0, -0.0)]
            signs = [torch.signbit(each).tolist() for each in zeros]
            return [scaled(x, number).dtype for number in (1, 1.0, True)], signs

        dtypes = [torch.int64, torch.float32, torch.int64]
        assert on_ranks(2, function) == [(dtypes, [[False] * 3, [True] * 3])] * 2
    finally:
        del RULES[scaled]


def test_an_empty_shard_of_a_summed_dim_adds_zeros():
    """Without values multi_dot's result is a view of what it computed itself, of no operand."""

    def function(mesh):
        a = torch.full((1, 2), 2.0, requires_grad=True)
        x = distribute_tensor(a, mesh, [Shard(1)], sizes=[(2, 0)])
        y = torch.linalg.multi_dot([x, torch.full((2, 1), 3.0, requires_grad=True)])
        return y.full_tensor().tolist()

    assert on_ranks(2, function) == [[[12.0]]] * 2
