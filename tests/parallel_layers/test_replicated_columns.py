"""Key/value heads that are fewer than the ranks: each is on several of them, whose gradients are summed in backward."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import ColumnParallelLinear, RowParallelLinear, fuse_columns
from neuronx_dist.parallel_layers.grads import bucket_allreduce_gradients, clip_grad_norm
from neuronx_dist.parallel_layers.pad import pad_model
from neuronx_dist.parallel_layers.replace import LayerPlan, apply
from neuronx_dist.spmd import SpmdTypeError, spec_of, verify
from neuronx_dist.weights.materialize import materialize
from neuronx_dist.weights.shard_spec import gather_full
from tests.parallel_layers.test_pad import HEAD_DIM, HIDDEN, attend

pytestmark = pytest.mark.slow

TP, HEADS, KV_HEADS, STEPS = 4, 8, 2, 3
TOLERANCE: Any = dict(rtol=1e-10, atol=1e-10)


class Whole(nn.Module):
    """Attention in one process."""

    def __init__(self, heads: int = HEADS, kv_heads: int = KV_HEADS, bias: bool = True) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, heads * HEAD_DIM, bias, dtype=torch.float64)
        self.k = nn.Linear(HIDDEN, kv_heads * HEAD_DIM, bias, dtype=torch.float64)
        self.v = nn.Linear(HIDDEN, kv_heads * HEAD_DIM, bias, dtype=torch.float64)
        self.o = nn.Linear(heads * HEAD_DIM, HIDDEN, bias, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.o(attend(self.q(x), self.k(x), self.v(x)))
        return out


class ByHand(nn.Module):
    """The same as an NxD script writes it; with `skip_bias_add` it adds the biases itself."""

    def __init__(self, fused: bool = False, skip_bias_add: bool = False, **options: Any) -> None:
        super().__init__()
        self.skip_bias_add = skip_bias_add
        common: Any = dict(gather_output=False, dtype=torch.float64, skip_bias_add=skip_bias_add, **options)
        self.q = ColumnParallelLinear(HIDDEN, HEADS * HEAD_DIM, **common)
        self.k = ColumnParallelLinear(HIDDEN, KV_HEADS * HEAD_DIM, replicas=TP // KV_HEADS, **common)
        self.v = ColumnParallelLinear(HIDDEN, KV_HEADS * HEAD_DIM, replicas=TP // KV_HEADS, **common)
        self.o = RowParallelLinear(HEADS * HEAD_DIM, HIDDEN, input_is_parallel=True, dtype=torch.float64, **options)
        if fused:
            fuse_columns([self.q, self.k, self.v])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: list[Any] = [layer(x) for layer in (self.q, self.k, self.v)]
        if self.skip_bias_add:
            outputs = [out + bias for out, bias in outputs]
        out: torch.Tensor = self.o(attend(*outputs))
        return out


def _reference(**sizes: Any) -> Whole:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Whole(**sizes)


def _rows(step: int, seq: int = 8) -> torch.Tensor:
    return torch.randn(4, seq, HIDDEN, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _fill(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            spec = spec_of(param)
            param.copy_(spec.local_slice(state[name], comm.rank(spec.axis)) if spec.axis else state[name])


def _train(model: nn.Module, rows: Any, step_of: Any) -> list[Any]:
    """Loss, norm and gradients of steps of SGD, by name."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found: list[Any] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(rows(step)).square().mean()
        loss.backward()
        found.append((loss.detach(), step_of(model), {n: p.grad.clone() for n, p in model.named_parameters()}))
        optimizer.step()
    return found


@pytest.mark.parametrize(
    "options", [dict(), dict(fused=True), dict(skip_bias_add=True), dict(fused=True, skip_bias_add=True)], ids=str
)
@pytest.mark.parametrize("dp", [1, 2])
def test_by_hand_as_one_process(dp: int, options: dict[str, Any]) -> None:
    """Plain backward, NxD's mean over the data, clipping, SGD: nothing knows of replicas but the layer."""
    whole = _reference()
    state = {name: value.clone() for name, value in whole.state_dict().items()}
    expected = _train(whole, _rows, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01))

    def rank() -> None:
        model = ByHand(**options)
        _fill(model, state)

        def reduce(model: nn.Module) -> torch.Tensor:
            bucket_allreduce_gradients([param.grad for param in model.parameters() if param.grad is not None])
            return clip_grad_norm(model.parameters(), 0.01)

        rows = lambda step: _rows(step).chunk(dp)[comm.rank("dp")]  # noqa: E731
        for (loss, norm, grads), (loss_1, norm_1, grads_1) in zip(_train(model, rows, reduce), expected):
            torch.testing.assert_close(comm.all_reduce(loss, "dp") / dp, loss_1, **TOLERANCE)
            torch.testing.assert_close(norm, norm_1, **TOLERANCE)
            for name, param in model.named_parameters():
                torch.testing.assert_close(gather_full(grads[name], spec_of(param)), grads_1[name], **TOLERANCE)
        for name, param in model.named_parameters():
            torch.testing.assert_close(
                gather_full(param, spec_of(param)), whole.get_parameter(name).detach(), **TOLERANCE
            )
        copies = comm.all_gather(model.k.weight.detach().unsqueeze(0), "tp%2", dim=0)
        assert torch.equal(copies[0], copies[1])  # to the bit, after all these steps
        verify(model)

    threads.run(Mesh(TP * dp, tp=TP), rank)


@pytest.mark.parametrize("fused", [False, True])
def test_sequence_parallel(fused: bool) -> None:
    whole = _reference()
    out = whole(_rows(0))
    out.square().sum().backward()

    def rank() -> None:
        model = ByHand(fused=fused, sequence_parallel_enabled=True, sequence_dimension=1)
        _fill(model, whole.state_dict())
        local = model(_rows(0).chunk(TP, 1)[comm.rank("tp")])
        torch.testing.assert_close(local, out.detach().chunk(TP, 1)[comm.rank("tp")], **TOLERANCE)
        local.square().sum().backward()
        for name, param in model.named_parameters():
            spec, grad = spec_of(param), param.grad
            assert grad is not None
            grad = comm.all_reduce(grad, "tp") if spec.sequence_parallel else grad
            torch.testing.assert_close(gather_full(grad, spec), whole.get_parameter(name).grad, **TOLERANCE)

    threads.run(Mesh(TP, tp=TP), rank)


@pytest.mark.parametrize("kv_heads, heads, padded", [(2, 8, None), (1, 4, None), (2, 6, 8), (1, 3, 4)])
@pytest.mark.parametrize("meta", [False, True])
def test_by_a_layer_plan(kv_heads: int, heads: int, padded: int | None, meta: bool) -> None:
    """Groups of query heads may have zeros at their end, which stay zero although their values are not."""
    whole = _reference(heads=heads, kv_heads=kv_heads)
    before = _reference(heads=heads, kv_heads=kv_heads)
    group = None if padded is None else (heads // kv_heads * HEAD_DIM, padded // kv_heads * HEAD_DIM)
    size = None if padded is None else padded * HEAD_DIM
    copied = {"replicas": TP // kv_heads}
    plans = [
        LayerPlan("q", "column", size, ("k", "v"), group=group),
        LayerPlan("k", "column", options=copied),
        LayerPlan("v", "column", options=copied),
        LayerPlan("o", "row", size, group=group),
    ]
    expected = _train(whole, _rows, lambda model: None)

    def rank() -> None:
        model = deepcopy(before)
        if meta:
            model = model.to("meta")
        apply(model, plans)
        if meta:
            model.to_empty(device="cpu")
            _fill(model, before.state_dict())
        for (_, _, grads), (_, _, grads_1) in zip(_train(model, _rows, lambda model: None), expected):
            for name, param in model.named_parameters():
                torch.testing.assert_close(gather_full(grads[name], spec_of(param)), grads_1[name], **TOLERANCE)
        for name, param in model.named_parameters():
            torch.testing.assert_close(
                gather_full(param, spec_of(param)), whole.get_parameter(name).detach(), **TOLERANCE
            )
        if padded is not None:
            for name, dim in (("q", 0), ("o", 1)):
                weight = model.get_parameter(f"{name}.weight")
                start, stop = spec_of(weight).positions(comm.rank("tp"))
                assert not weight.narrow(dim, stop - start, weight.shape[dim] - (stop - start)).any()

    threads.run(Mesh(TP, tp=TP), rank)


def test_layout_of_the_copies() -> None:
    """Adjacent ranks hold the same shard; the layout says so, in our words and in NxD's."""

    def rank() -> None:
        k = ByHand().k
        spec = spec_of(k.weight)
        assert (spec.axis, spec.num_partitions, spec.replicated_over) == ("tp/2", 2, "tp%2")
        assert k.weight.tensor_model_parallel and k.weight.num_partitions == 2 and k.weight.partition_dim == 0
        assert k.weight.shape == (HEAD_DIM, HIDDEN) and "replicas=2" in repr(k)
        whole = torch.arange(KV_HEADS * HEAD_DIM * HIDDEN).view(-1, HIDDEN)
        local = spec.local_slice(whole, comm.rank(spec.axis))
        assert torch.equal(local, whole.chunk(2)[comm.rank("tp") // 2])
        assert torch.equal(gather_full(local, spec), whole)

    threads.run(Mesh(TP, tp=TP), rank)


@pytest.mark.parametrize("meta", [False, True])
def test_initial_weights_are_those_of_one_rank(meta: bool) -> None:
    def rank() -> Any:
        if meta:
            with torch.device("meta"):
                model = ColumnParallelLinear(HIDDEN, 8, gather_output=False, replicas=comm.size("tp") // 2 or 1)
            materialize(model, seed=3)
        else:
            torch.manual_seed(3)
            model = ColumnParallelLinear(HIDDEN, 8, gather_output=False, replicas=comm.size("tp") // 2 or 1)
        return [gather_full(param, spec_of(param)) for param in model.parameters()]

    one, *others = [weights for tp in (1, 2, 4, 8) for weights in threads.run(Mesh(tp, tp=tp), rank)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(one, other))


def test_collectives() -> None:
    """One sum for each replicated parameter, over the ranks that hold it, and of its size; none for others."""

    def rank() -> Any:
        model = ByHand(fused=True)
        with comm.record() as forward:
            out = model(_rows(0).requires_grad_())
        with comm.record() as backward:
            out.sum().backward()
        return [[(call.verb, call.axis, call.bytes) for call in calls] for calls in (forward, backward)]

    activation, weight, bias = 4 * 8 * HIDDEN * 8, HEAD_DIM * HIDDEN * 8, HEAD_DIM * 8
    for forward, backward in threads.run(Mesh(TP, tp=TP), rank):
        assert forward == [("all_reduce", "tp", activation)]
        copies = [("all_reduce", "tp%2", size) for size in (bias, bias, weight, weight)]
        assert sorted(backward) == sorted([("all_reduce", "tp", activation), *copies])


def test_a_frozen_copy_has_no_sum() -> None:
    def rank() -> Any:
        model = ByHand()
        model.k.requires_grad_(False)
        with comm.record() as calls:
            model(_rows(0)).sum().backward()
        return sum(call.axis == "tp%2" for call in calls)

    assert threads.run(Mesh(TP, tp=TP), rank) == [2] * TP  # of v's weight and bias


def test_unequal_copies_are_found() -> None:
    def rank() -> str:
        model = ByHand()
        with torch.no_grad():
            model.k.weight[0, 0] += comm.rank("tp")
        with pytest.raises(SpmdTypeError) as caught:
            verify(model, axes=["tp"])
        return str(caught.value)

    for message in threads.run(Mesh(TP, tp=TP), rank):
        assert "k.weight over tp%2: ranks [0]" in message and "q.weight" not in message


def test_mistakes_are_named() -> None:
    def refused(build: Any, tp: int = TP) -> str:
        with pytest.raises(ValueError) as caught:
            threads.run(Mesh(tp, tp=tp), build)
        return str(caught.value)

    column: Any = lambda **options: ColumnParallelLinear(8, 8, **{"gather_output": False, **options})  # noqa: E731
    assert "3 replicas of each shard over tp of size 4" in refused(lambda: column(replicas=3))
    assert "0 replicas" in refused(lambda: column(replicas=0))
    assert "gather_output=True is not possible with replicas=2" in refused(
        lambda: column(replicas=2, gather_output=True)
    )
    assert "the axis must be 'tp'" in refused(lambda: column(replicas=2, tensor_model_parallel_group="dp"))
    assert "output_size 9 is not divisible by the tensor parallel size 4 / 2 replicas" in refused(
        lambda: ColumnParallelLinear(8, 9, gather_output=False, replicas=2)
    )
    plan = LayerPlan("k", "column", options={"replicas": 3})
    assert "cannot replace k with the options {'replicas': 3}" in refused(lambda: apply(_reference(), [plan]))
    assert "pad_model: k has 2 replicas of each shard" in refused(lambda: pad_model(ByHand(), TP, KV_HEADS))
