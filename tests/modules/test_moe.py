"""Layers of experts over ep and tp beside a loop over the experts in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends import threads
from neuronx_dist.hf import full_state_dict, load_pretrained
from neuronx_dist.mesh import Mesh
from neuronx_dist.modules.moe import ExpertMLPs, MoE, RouterTopK, load_balancing_loss_func, router_z_loss_func
from neuronx_dist.modules.moe.dispatch import Dispatch, Slots, _Journey
from neuronx_dist.modules.moe.moe_parallel_layers import grouped_product
from neuronx_dist.modules.moe.routing import GroupLimitedRouter, RouterSinkhorn
from neuronx_dist.modules.moe.shared_experts import SharedExperts
from neuronx_dist.modules.moe.token_shuffling import token_shuffle, token_unshuffle
from neuronx_dist.parallel_layers.grads import reduce_gradients
from neuronx_dist.parallel_layers.model_groups import initialize_token_shuffle_group
from neuronx_dist.weights.materialize import materialize

HIDDEN, INNER, EXPERTS, TOP_K, STEPS = 8, 12, 8, 2, 3
F64 = torch.float64
ROWS = (5, 3, 2, 6)  # tokens of each data rank


class Whole(nn.Module):
    """The layer in one process, by the names of the parallel one: every expert is asked for its tokens."""

    def __init__(self, glu: bool = True, bias: bool = False, shared: bool = False, normalize: bool = True) -> None:
        super().__init__()
        self.glu, self.normalize = glu, normalize
        up = "gate_up_proj" if glu else "up_proj"
        width = 2 * INNER if glu else INNER
        shapes = {"router.linear_router.weight": (EXPERTS, HIDDEN), "router.linear_router.bias": (EXPERTS,)}
        shapes |= {f"expert_mlps.mlp_op.{up}.weight": (EXPERTS, HIDDEN, width)}
        shapes |= {"expert_mlps.mlp_op.down_proj.weight": (EXPERTS, INNER, HIDDEN)}
        if bias:
            shapes |= {f"expert_mlps.mlp_op.{up}.bias": (EXPERTS, width)}
            shapes |= {"expert_mlps.mlp_op.down_proj.bias": (EXPERTS, HIDDEN)}
        if shared:
            shapes |= {f"shared_experts.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
            shapes |= {"shared_experts.down_proj.weight": (HIDDEN, INNER)}
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            value = torch.randn(shape, generator=generator, dtype=F64) / 2
            module.register_parameter(leaf, nn.Parameter(value))
        with torch.no_grad():
            self.get_parameter("router.linear_router.bias")[3] = -100  # an expert that gets no token

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        router = self.get_submodule("router.linear_router")
        logits = F.linear(x, router.weight, router.bias)
        top, index = logits.softmax(-1).topk(TOP_K, dim=-1)
        if self.normalize:
            top = top / top.sum(-1, keepdim=True)
        experts: Any = self.get_submodule("expert_mlps.mlp_op")
        first = experts.gate_up_proj if self.glu else experts.up_proj
        out = torch.zeros_like(x)
        for number in range(EXPERTS):
            inner = x @ first.weight[number]
            inner = inner + first.bias[number] if hasattr(first, "bias") else inner
            inner = F.silu(inner[:, :INNER]) * inner[:, INNER:] if self.glu else F.silu(inner)
            result = inner @ experts.down_proj.weight[number]
            result = result + experts.down_proj.bias[number] if hasattr(first, "bias") else result
            out = out + ((index == number) * top).sum(-1, keepdim=True) * result
        if hasattr(self, "shared_experts"):
            mlp: Any = self.shared_experts
            inner = F.silu(F.linear(x, mlp.gate_proj.weight)) * F.linear(x, mlp.up_proj.weight)
            out = out + F.linear(inner, mlp.down_proj.weight)
        return out, logits


def layer(
    glu: bool = True,
    bias: bool = False,
    shared: bool = False,
    normalize: bool = True,
    capacity: float | None = None,
    **options: Any,
) -> MoE:
    with torch.device("meta"):
        router = RouterTopK(EXPERTS, TOP_K, HIDDEN, dtype=F64, bias=True)
        experts = ExpertMLPs(
            *(EXPERTS, TOP_K, HIDDEN, INNER, "silu", glu, capacity),
            normalize_top_k_affinities=normalize,
            bias=bias,
            dtype=F64,
        )
        shared_experts = SharedExperts(HIDDEN, INNER, 1, "silu", dtype=F64) if shared else None
        return MoE(router, experts, shared_experts, return_router_logits=True, **options)


def tokens(step: int, dp: int, same_rows: bool = False) -> list[torch.Tensor]:
    """Tokens of each data rank, `[rows, batch 2, h]`, rows a multiple of 4."""
    generator = torch.Generator().manual_seed(step)
    counts = [4 if same_rows else 4 * count for count in ROWS[:dp]]
    return [torch.randn(count, 2, HIDDEN, generator=generator, dtype=F64) for count in counts]


def loss_of(out: torch.Tensor, logits: torch.Tensor, count: float) -> torch.Tensor:
    balance = load_balancing_loss_func(logits, EXPERTS, TOP_K)
    return out.square().sum() / count + 0.1 * balance + 0.01 * router_z_loss_func(logits)


SGD: dict[str, Any] = dict(lr=0.1, momentum=0.9, weight_decay=0.01)


def in_one_process(dp: int, same_rows: bool = False, clip: float = 0.5, **options: Any) -> tuple[list[Any], Any, Any]:
    """Steps of SGD with the tokens of `dp` data ranks: the results of each, the weights before and behind them."""
    plain = Whole(**options)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    optimizer = torch.optim.SGD(plain.parameters(), **SGD)
    results = []
    for step in range(STEPS):
        x = torch.cat([part.flatten(0, 1) for part in tokens(step, dp, same_rows)]).requires_grad_()
        out, logits = plain(x)
        loss = threads.run(Mesh(1), partial(loss_of, out, logits, len(x)))[0]
        optimizer.zero_grad()
        loss.backward()
        grads = {name: param.grad.clone() for name, param in plain.named_parameters()}
        norm = nn.utils.clip_grad_norm_(plain.parameters(), clip)
        sizes = [part.shape[0] * 2 for part in tokens(step, dp, same_rows)]
        results.append((loss.detach(), out.detach().split(sizes), x.grad.split(sizes), grads, norm))
        optimizer.step()
    return results, state, {name: param.detach() for name, param in plain.named_parameters()}


def compare_on_rank(
    expected: list[Any],
    state: dict[str, torch.Tensor],
    trained: dict[str, torch.Tensor],
    *,
    zero1: bool = False,
    sequence_parallel: bool = False,
    same_rows: bool = False,
    clip: float = 0.5,
    **options: Any,
) -> None:
    """Compares the steps of this rank with the results of `in_one_process`."""
    model = load_pretrained(layer(sequence_parallel_enabled=sequence_parallel, **options), state)
    if zero1:
        optimizer: Any = nxd.NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, max_norm=clip, **SGD)
    else:
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
    data, dp, tp = comm.rank("dp"), comm.size("dp"), comm.size("tp")
    for step, (loss_1, out_1, grad_1, grads_1, norm_1) in enumerate(expected):
        parts = tokens(step, dp, same_rows)
        x = parts[data]
        if sequence_parallel:
            x = x.chunk(tp)[comm.rank("tp")].contiguous()
        x.requires_grad_()
        out, logits = model(x)
        count = sum(part.shape[0] * 2 for part in parts) / dp
        full = spmd.all_gather(out, "tp", src=spmd.S(0), dst=spmd.I) if sequence_parallel else out
        close(full.detach().flatten(0, 1), out_1[data], "output")
        loss = loss_of(full, logits, count)
        optimizer.zero_grad()
        loss.backward()
        close(comm.all_reduce(loss.detach(), "dp") / dp, loss_1, "loss")
        grad_x = grad_1[data].view_as(full) * dp
        close(x.grad, grad_x.chunk(tp)[comm.rank("tp")] if sequence_parallel else grad_x, "input's gradient")
        if not zero1:
            reduce_gradients(model)
            for name, grad in full_state_dict(model, gradients=True).items():
                close(grad, grads_1[name], f"gradient of {name}")
            norm = nxd.clip_grad_norm(model.parameters(), clip)
        optimizer.step()
        close(optimizer.grad_norm if zero1 else norm, norm_1, "norm")
    for name, value in full_state_dict(model).items():
        close(value, trained[name], name)


def compare(ep: int = 2, tp: int = 1, edp: int = 1, *, same_rows: bool = False, **options: Any) -> None:
    """Losses, gradients, norms and weights of steps of SGD are those of one process with all tokens."""
    of_layer = {name: options[name] for name in ("glu", "bias", "shared", "normalize") if name in options}
    results = in_one_process(ep * edp, same_rows, **of_layer)
    rank = partial(compare_on_rank, *results, same_rows=same_rows, **options)
    threads.run(Mesh(ep * edp * tp, tp=tp, ep=ep), rank, timeout=30.0)


def close(actual: Any, expected: torch.Tensor, what: str) -> None:
    error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error < 1e-10, f"{what} is {error:.1e} away"


@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize("ep, tp, edp", [(1, 1, 1), (1, 2, 2), (2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1), (4, 2, 1)])
def test_steps_are_those_of_one_process(ep: int, tp: int, edp: int, zero1: bool) -> None:
    compare(ep, tp, edp, zero1=zero1)


@pytest.mark.parametrize(
    "options",
    [
        dict(glu=False, normalize=False),
        dict(bias=True, tp=2),
        dict(shared=True),
        dict(shared=True, tp=2),
        dict(shared=True, bias=True, tp=2, sequence_parallel=True),
        dict(capacity=100.0),  # a place for every token: nothing is dropped
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    compare(**options)


def test_shared_experts_run_while_tokens_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between start and end of an exchange, in forward and in backward; second derivatives are right too."""

    events: list[list[str]] = [[], []]

    def note(name: str, *args: Any) -> None:
        events[comm.rank("ep")].append(name)

    for name in ("start", "wait"):
        original = getattr(_Journey, name)
        monkeypatch.setattr(_Journey, name, lambda *args, n=name, f=original: (note(n), f(*args))[1])

    def rank() -> None:
        model = materialize(layer(shared=True), 0)
        x = tokens(0, 2)[comm.rank("dp")].requires_grad_()

        def penalty() -> list[torch.Tensor]:
            out = model(x)[0]
            (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            return [out, slope, *torch.autograd.grad(slope.square().sum(), [*model.parameters()])]

        for actual, expected in zip(penalty(), without_overlap(penalty), strict=True):
            close(actual.detach(), expected.detach(), "output, slope or gradient")
        events[comm.rank("ep")].clear()
        model.shared_experts.register_forward_hook(partial(note, "shared"))
        model.shared_experts.register_full_backward_hook(partial(note, "shared"))
        model(x)[0].square().sum().backward()

    threads.run(Mesh(2, ep=2), rank, timeout=20.0)
    assert events == [["start", "shared", "wait"] * 2] * 2


def without_overlap(function: Callable[[], Any]) -> Any:
    """Calls a function under a mode, where shared experts run after the experts."""

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **kwargs or {})

    with Mode():
        return function()


def test_a_capacity_drops_the_last_tokens_of_each_data_rank() -> None:
    """Two of six choices of an expert fit: the others count 0, in values and in gradients."""

    def rank() -> None:
        model = materialize(layer(capacity=1.0, normalize=False), 0)
        x = tokens(0, 2)[comm.rank("dp")].requires_grad_()
        out, logits = model(x)
        router, experts = model.router, model.expert_mlps
        limit = -(-x.shape[0] * 2 * TOP_K // EXPERTS)
        _, affinities, index = router(x)
        seen, kept = dict.fromkeys(range(EXPERTS), 0), torch.zeros_like(logits)
        for token, choices in enumerate(index.tolist()):
            for number in choices:
                seen[number] += 1
                kept[token, number] = float(seen[number] <= limit)
        assert 0 < kept.sum() < index.numel()
        experts.capacity_factor = None
        expected = experts(x.flatten(0, 1), affinities * kept, index).view_as(x)
        close(out.detach(), expected.detach(), "output")
        mine, one = (torch.autograd.grad(y.square().sum(), [*model.parameters()]) for y in (out, expected))
        for actual, wanted in zip(mine, one):
            close(actual, wanted, "gradient")

    threads.run(Mesh(2, ep=2), rank, timeout=20.0)


@pytest.mark.parametrize("capacity", [3, 40])
def test_slots_without_values_are_as_many_rows_as_there_are(capacity: int) -> None:
    """The programs of XLA and of a check compute what `Dispatch` computes, with its gradients."""

    def rank() -> None:
        generator = torch.Generator().manual_seed(comm.rank("ep"))
        x = torch.randn(20, HIDDEN, generator=generator, dtype=F64, requires_grad=True)
        weights = torch.rand(20, TOP_K, generator=generator, dtype=F64, requires_grad=True)
        index = torch.rand(20, EXPERTS, generator=generator).topk(TOP_K)[1]
        matrices = torch.arange(1.0, EXPERTS + 1, dtype=F64).view(2, -1)[comm.rank("ep")]
        slots, route = Slots(index, EXPERTS, capacity), Dispatch(index, EXPERTS, capacity)
        by_row = torch.cat([number.expand(size, 1) for number, size in zip(matrices, route.sizes)])
        results = [
            slots.to_tokens(slots.to_experts(x) * matrices.repeat_interleave(slots.sizes[0]).unsqueeze(1), weights),
            route.to_tokens(route.to_experts(x) * by_row, weights),
        ]
        gradients = [torch.autograd.grad(y.square().sum(), [x, weights]) for y in results]
        for actual, expected in zip((results[0].detach(), *gradients[0]), (results[1].detach(), *gradients[1])):
            close(actual, expected, "slots")

    threads.run(Mesh(2, ep=2), rank, timeout=20.0)


def counted_rows() -> None:
    def rank() -> list[int]:
        index = torch.tensor([[0, 3], [3, 2]] if comm.rank("ep") else [[3, 1], [0, 1], [3, 0]])
        return Dispatch(index, 4).sizes

    assert threads.run(Mesh(2, ep=2), rank) == [[3, 2], [1, 4]]


def test_experts_know_how_many_rows_come() -> None:
    counted_rows()


def shuffled() -> None:
    """Tokens of two data ranks are exchanged and come back; so do their gradients."""

    def rank() -> set[float]:
        initialize_token_shuffle_group(2)
        x = torch.arange(8.0).view(4, 2) + 10 * comm.rank("dp")
        x.requires_grad_()
        mixed, permutation = token_shuffle(x, seed=3)
        back = token_unshuffle(mixed * 2, permutation)
        assert torch.equal(back.detach(), 2 * x.detach())
        (back * torch.arange(8.0).view(4, 2)).sum().backward()
        assert torch.equal(x.grad, 2 * torch.arange(8.0).view(4, 2))
        return {*mixed[:, 0].tolist()}

    first, second = threads.run(Mesh(2), rank)
    assert first | second == {0.0, 2.0, 4.0, 6.0, 10.0, 12.0, 14.0, 16.0} and max(first) > 9 > min(second)


def test_tokens_are_shuffled_between_data_ranks() -> None:
    shuffled()
    compare(edp=1, ep=2, capacity=100.0, token_shuffle_group_size=2, same_rows=True)


def moved_bias() -> None:
    """The bias follows the counts of all data ranks: expert 0 has too many tokens, expert 1 too few."""

    def rank() -> list[float]:
        router = GroupLimitedRouter(3, 1, HIDDEN, 1, 1)
        router.update_bias(torch.tensor([[0], [2]] if comm.rank("dp") else [[0], [1], [2], [0]]), rate=0.5)
        return router.e_score_correction_bias.tolist()

    assert threads.run(Mesh(2), rank) == [[-0.5, 0.5, 0.0]] * 2


def test_a_routers_bias_is_moved_by_global_counts() -> None:
    moved_bias()


def test_groups_of_experts_limit_a_token() -> None:
    """DeepSeek-V3's choice, with the groups by hand; the bias chooses experts and does not weigh them."""
    torch.manual_seed(0)
    router = GroupLimitedRouter(EXPERTS, TOP_K, HIDDEN, n_group=4, topk_group=1, dtype=F64)
    router.e_score_correction_bias[:2] = 10.0
    _, affinities, index = router(torch.randn(5, HIDDEN, dtype=F64))
    assert index.sort()[0].tolist() == [[0, 1]] * 5 and affinities.max() < 1
    GroupLimitedRouter(EXPERTS, 4, HIDDEN, n_group=4, topk_group=2)
    with pytest.raises(ValueError, match=r"top_k=5 is more than the 4 experts of topk_group=2 groups of 2 .*at most 4"):
        GroupLimitedRouter(EXPERTS, 5, HIDDEN, n_group=4, topk_group=2)
    with pytest.raises(ValueError, match="n_group=0 must divide"):
        GroupLimitedRouter(EXPERTS, 1, HIDDEN, n_group=0, topk_group=0)


def test_sinkhorn_balances_tokens_in_training() -> None:
    torch.manual_seed(0)
    router = RouterSinkhorn(4, 1, HIDDEN, dtype=F64)
    with torch.no_grad():
        router.linear_router.weight.mul_(0.1)[0] += 0.2
    x = torch.randn(64, HIDDEN, dtype=F64).abs()
    balanced = router(x)[2].flatten().bincount(minlength=4)
    favoured = router.eval()(x)[2].flatten().bincount(minlength=4)
    assert favoured[0] > 48 and balanced.max() < 32


def test_sinkhorn_does_not_overflow() -> None:
    """A token's logits may all be larger by any number: its expert is the same."""
    torch.manual_seed(0)
    router = RouterSinkhorn(4, 1, HIDDEN)
    with torch.no_grad():
        router.linear_router.weight[:, 0] = 1.0
    x = torch.randn(64, HIDDEN)
    x[:, 0] = 0
    expected = router(x)[2]
    x[:, 0] = torch.linspace(-150, 150, 64)
    assert torch.equal(router(x)[2], expected)


@pytest.mark.parametrize("router", [RouterTopK, RouterSinkhorn])
def test_routers_take_no_tokens(router: Any) -> None:
    logits, affinities, index = router(4, 1, HIDDEN)(torch.zeros(0, HIDDEN))
    assert logits.shape == affinities.shape == (0, 4) and index.shape == (0, 1)


@pytest.mark.parametrize("bias", [False, True])
def test_autocast_is_of_all_paths(bias: bool) -> None:
    """Experts with equal and with unequal numbers of rows, and ranks with either, compute in autocast's dtype."""

    def rank() -> None:
        torch.manual_seed(0)
        experts = ExpertMLPs(4, 1, 16, 32, "silu", True, None, bias=bias)
        x = torch.randn(8, 16, requires_grad=True)
        affinities = torch.full((8, 4), 0.3, requires_grad=True)
        # ep rank 0's experts 0 and 1 get as many rows as each other, rank 1's experts 2 and 3 do not
        for numbers in ([0, 1, 2, 2, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1, 2, 3], [0] * 8):
            index = torch.tensor(numbers).unsqueeze(1)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = experts(x, affinities, index)
            assert y.dtype == torch.bfloat16
            inputs = [x, affinities, *experts.parameters()]
            expected = experts(x, affinities, index)
            assert expected.dtype == torch.float32
            pairs = [(y.detach(), expected.detach())]
            pairs += zip(*(torch.autograd.grad(out.float().square().sum(), inputs) for out in (y, expected)))
            for a, b in pairs:
                assert (a - b).norm() <= 0.03 * b.norm()

    threads.run(Mesh(1), rank)
    threads.run(Mesh(2, ep=2), rank, timeout=20.0)


@pytest.mark.parametrize("sizes", [[4, 0, 5], [0, 0, 0]])
def test_grouped_kernel_is_the_product_of_each_group(sizes: list[int]) -> None:
    rows, matrices = torch.randn(sum(sizes), 8, requires_grad=True), torch.randn(3, 8, 4, requires_grad=True)
    expected = torch.cat([part @ matrix for part, matrix in zip(rows.split(sizes), matrices)])
    actual = grouped_product(rows, matrices, sizes)
    torch.testing.assert_close(actual, expected)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), [rows, matrices]) for y in (actual, expected))):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [((2, 2, 1), (4, 1, 1)), ((4, 1, 1), (1, 2, 2))])
def test_checkpoints_of_any_ep_load_into_any_other(
    before: tuple[int, int, int], after: tuple[int, int, int], tmp_path: Path
) -> None:
    """Weights and the experts' optimizer state, which is divided over edp."""

    def rank(saves: bool) -> dict[str, torch.Tensor]:
        model = materialize(layer(shared=True), 0 if saves else 1)
        optimizer = nxd.NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.1)

        def step(number: int) -> None:
            optimizer.zero_grad()
            x = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(number), dtype=F64)
            share = x.chunk(comm.size("dp"))[comm.rank("dp")]
            out, logits = model(share)
            loss_of(out, logits, share.shape[0]).backward()
            optimizer.step()

        if saves:
            step(0)
            nxd.save_checkpoint(str(tmp_path), "one", model, optimizer)
        else:
            nxd.load_checkpoint(str(tmp_path), "one", model, optimizer)
        step(1)
        return full_state_dict(model)

    results = []
    for (ep, tp, edp), saves in ((before, True), (after, False)):
        results.append(threads.run(Mesh(ep * tp * edp, tp=tp, ep=ep), partial(rank, saves), timeout=30.0)[0])
    for name, value in results[0].items():
        close(results[1][name], value, name)


class Checked(nn.Module):
    """A layer with its losses, and with one line wrong."""

    def __init__(self, wrong: str = "", **options: Any) -> None:
        super().__init__()
        self.moe, self.wrong = layer(**options), wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moe = self.moe
        if not self.wrong:
            return loss_of(*moe(x), x.shape[0])
        tokens = spmd.convert(x, "tp", src=spmd.I, dst=spmd.R)
        logits, affinities, index = moe.router(x)
        if self.wrong == "dropped all-reduce":
            affinities = spmd.convert(affinities, "tp", src=spmd.I, dst=spmd.R)
            return moe.expert_mlps(tokens, affinities, index).square().sum() / x.shape[0]
        out = moe.expert_mlps(tokens, affinities, index)  # the router's gradient is a partial sum
        return spmd.all_reduce(out, "tp", src=spmd.P, dst=spmd.I).square().sum() / x.shape[0]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, dict(shared=True, bias=True), dict(capacity=1.0)], ids=str)
def test_types_of_a_layer_are_proved(options: dict[str, Any]) -> None:
    x = torch.randn(8, HIDDEN, dtype=F64)
    assert spmd.check(lambda: Checked(**options), x, {"dp": 4, "tp": 2, "ep": 2}).ok


@pytest.mark.parametrize("wrong", ["dropped all-reduce", "partial gradient of the router"])
def test_a_wrong_layer_is_refused(wrong: str) -> None:
    x = torch.randn(8, HIDDEN, dtype=F64)
    assert not spmd.check(lambda: Checked(wrong), x, {"dp": 4, "tp": 2, "ep": 2}).ok


def test_bad_input_is_refused() -> None:
    def rank() -> None:
        with pytest.raises(ValueError, match="3 experts are not divisible by ep=2"):
            ExpertMLPs(3, 1, HIDDEN, INNER, "silu", True, None)

    threads.run(Mesh(2, ep=2), rank)

    def one() -> None:
        with pytest.raises(ValueError, match=r"top_k=4 must be from 1 to num_experts=3"):
            RouterTopK(3, 4, HIDDEN)
        with pytest.raises(ValueError, match="top_k=2.*pass top_k=1"):
            RouterSinkhorn(3, 2, HIDDEN)
        with pytest.raises(ValueError, match="hidden_act='tanh' is not one of gelu"):
            ExpertMLPs(4, 1, HIDDEN, INNER, "tanh", True, None)
        with pytest.raises(ValueError, match="SharedExperts: hidden_act='tanh' is not one of gelu"):
            SharedExperts(HIDDEN, INNER, 1, "tanh")
        with pytest.raises(ValueError, match="num_experts is 4 in the router, and 8 in the experts"):
            MoE(RouterTopK(4, 2, HIDDEN), ExpertMLPs(8, 2, HIDDEN, INNER, "silu", True, None))

    threads.run(Mesh(1), one)


def test_bad_shapes_are_refused() -> None:
    def one() -> None:
        experts = ExpertMLPs(4, 2, HIDDEN, INNER, "silu", True, None)
        affinities, index = torch.ones(6, 4), torch.tensor([[0, 1]] * 6)
        for shape, *rest, message in (
            ((2, 3, HIDDEN), affinities, index, r"hidden_states \[2, 3, 8\] must be \[tokens, 8\]: pass .*flatten"),
            ((6, 9), affinities, index, r"hidden_states \[6, 9\] have 9 features, not hidden_size=8"),
            ((6, 8), affinities, index[:, :1], r"expert_index \[6, 1\] must be \[tokens, top_k\], \[6, 2\]"),
            ((6, 8), affinities[:, :2], index, r"expert_affinities \[6, 2\] must be \[tokens, num_experts\], \[6, 4\]"),
        ):
            with pytest.raises(ValueError, match=message):
                experts(torch.ones(shape), *rest)
        with pytest.raises(ValueError, match=r"RouterTopK: the input \[6, 9\] has 9 features, not hidden_size=8"):
            MoE(RouterTopK(4, 2, HIDDEN), experts)(torch.ones(6, 9))

    threads.run(Mesh(1), one)
