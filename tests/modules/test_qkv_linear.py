"""The GQA layer beside three linear layers in one process: values, gradients, steps, state dicts, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.modules.qkv_linear import GQAQKVColumnParallelLinear, GQAQKVLinearWithAsyncCommunication
from neuronx_dist.parallel_layers import RowParallelLinear, parallel_state
from neuronx_dist.parallel_layers.grads import reduce_gradients
from neuronx_dist.parallel_layers.pad import pad_model
from neuronx_dist.spmd import SpmdTypeError, spec_of, verify
from neuronx_dist.weights.materialize import materialize
from neuronx_dist.weights.shard_spec import gather_full
from tests.checkpoint import nxd_folder
from tests.parallel_layers.test_pad import HEAD_DIM, HIDDEN, attend

pytestmark = pytest.mark.slow

HEADS, KV_HEADS, STEPS, SEQ = 8, 2, 3, 8
F32, F64 = torch.float32, torch.float64


class Whole(nn.Module):
    """Attention in one process, by the names of the parallel one."""

    def __init__(
        self, dtype: torch.dtype = F64, heads: int = HEADS, kv_heads: int = KV_HEADS, bias: bool = True
    ) -> None:
        super().__init__()
        self.qkv_proj = nn.Module()
        for letter, count in zip("qkv", (heads, kv_heads, kv_heads)):
            weight = torch.randn(count * HEAD_DIM, HIDDEN, dtype=F64) / HIDDEN**0.5
            setattr(self.qkv_proj, f"weight_{letter}", nn.Parameter(weight.to(dtype)))
            values = nn.Parameter(torch.randn(count * HEAD_DIM, dtype=F64).to(dtype)) if bias else None
            setattr(self.qkv_proj, f"bias_{letter}", values)
        self.o_proj = nn.Linear(heads * HEAD_DIM, HIDDEN, False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer: Any = self.qkv_proj
        parts = [
            nn.functional.linear(x, getattr(layer, f"weight_{letter}"), getattr(layer, f"bias_{letter}"))
            for letter in "qkv"
        ]
        return self.o_proj(attend(*parts))


class Parallel(nn.Module):
    def __init__(self, multiplier: int = 1, heads: int = HEADS, kv_heads: int = KV_HEADS, **options: Any) -> None:
        super().__init__()
        options = {"gather_output": False, "dtype": F64, **options}
        sizes = [heads * HEAD_DIM, kv_heads * HEAD_DIM]
        self.qkv_proj = GQAQKVColumnParallelLinear(HIDDEN, sizes, kv_size_multiplier=multiplier, **options)
        sequence = {
            name: options[name] for name in ("sequence_parallel_enabled", "sequence_dimension") if name in options
        }
        self.gathers = options["gather_output"]
        self.o_proj = RowParallelLinear(
            heads * HEAD_DIM, HIDDEN, False, not self.gathers, dtype=options["dtype"], **sequence
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(attend(*self.qkv_proj(x)))


def reference(**options: Any) -> Whole:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Whole(**options)


def rows(step: int, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(4, SEQ, HIDDEN, generator=torch.Generator().manual_seed(step), dtype=F64).to(dtype)


def fill(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            spec = spec_of(param)
            param.copy_(spec.local_slice(state[name], comm.rank(spec.axis)) if spec.axis else state[name])


def whole(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    return gather_full(tensor, spec_of(param))


def compare(tp: int, dtype: torch.dtype, tolerance: float, zero1: bool = False, dp: int = 1, **options: Any) -> None:
    """Losses, norms, gradients and weights of steps of SGD are those of one process."""
    close: Any = dict(rtol=tolerance, atol=tolerance)
    kv_heads = options["kv_heads"] = tp // options["multiplier"] if options["multiplier"] > 1 else KV_HEADS
    plain = reference(dtype=dtype, bias=options.get("bias", True), kv_heads=kv_heads)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    expected = []
    for step in range(STEPS):
        x = rows(step, dtype).requires_grad_()
        loss = plain(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        grads = {name: param.grad.clone() for name, param in plain.named_parameters()}
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        expected.append((loss.detach(), x.grad, grads, norm))
        optimizer.step()
    dim = options.get("sequence_dimension") or 0

    def rank() -> None:
        model = Parallel(dtype=dtype, **options)
        fill(model, state)
        make: Any = nxd.NeuronZero1Optimizer if zero1 else None
        if zero1:
            optimizer = make(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9, max_norm=0.01)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step, (loss_1, grad_1, grads_1, norm_1) in enumerate(expected):
            x = rows(step, dtype).chunk(dp)[comm.rank("dp")]
            grad_x = grad_1.chunk(dp)[comm.rank("dp")] * dp
            if model.qkv_proj.sequence_parallel_enabled:
                x, grad_x = (t.transpose(0, 1) if dim == 0 else t for t in (x, grad_x))
                x, grad_x = (t.chunk(tp, dim)[comm.rank("tp")].contiguous() for t in (x, grad_x))
            x.requires_grad_()
            out = (
                model(x)
                if dim or not model.qkv_proj.sequence_parallel_enabled
                else model.o_proj(attend(*(part.transpose(0, 1) for part in model.qkv_proj(x))).transpose(0, 1))
            )
            loss = out.square().sum() / (rows(0).numel() // dp)
            optimizer.zero_grad()
            loss.backward()
            torch.testing.assert_close(x.grad, grad_x, **close)
            if out.shape != rows(0).chunk(dp)[0].shape:
                loss = comm.all_reduce(loss.detach(), "tp")
            torch.testing.assert_close(comm.all_reduce(loss.detach(), "dp") / dp, loss_1, **close)
            if not zero1:
                reduce_gradients(model)
                for name, param in model.named_parameters():
                    torch.testing.assert_close(whole(param.grad, param), grads_1[name], **close)
                norm = nxd.clip_grad_norm(model.parameters(), 0.01)
            optimizer.step()
            torch.testing.assert_close(
                torch.as_tensor(optimizer.grad_norm if zero1 else norm, dtype=dtype), norm_1, **close
            )
        for name, param in model.named_parameters():
            torch.testing.assert_close(whole(param, param), plain.get_parameter(name).detach(), **close)
        verify(model)

    threads.run(Mesh(tp * dp, tp=tp), rank)


@pytest.mark.parametrize("fuse_qkv", [False, True])
@pytest.mark.parametrize("tp, multiplier", [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
def test_steps_are_those_of_one_process(tp: int, multiplier: int, fuse_qkv: bool) -> None:
    compare(tp, F64, 1e-10, multiplier=multiplier, fuse_qkv=fuse_qkv)


@pytest.mark.parametrize("sequence_dimension", [0, 1])
@pytest.mark.parametrize("tp, multiplier", [(2, 1), (4, 2)])
def test_sequence_parallel(tp: int, multiplier: int, sequence_dimension: int) -> None:
    options: Any = dict(sequence_parallel_enabled=True, sequence_dimension=sequence_dimension)
    compare(tp, F64, 1e-10, multiplier=multiplier, **options)


@pytest.mark.parametrize("options", [dict(bias=False), dict(reduce_dtype=None), dict(zero1=True, dp=2)], ids=str)
def test_options(options: dict[str, Any]) -> None:
    compare(4, F64, 1e-10, multiplier=2, **options)


def test_float32() -> None:
    compare(4, F32, 1e-5, multiplier=2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tp, multiplier", [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_gathered_outputs(tp: int, multiplier: int, bias: bool) -> None:
    """Shards of keys and values stand once for each rank that holds them."""
    plain = reference(bias=bias)
    x, weights = (
        rows(0).requires_grad_(),
        [torch.randn(4, SEQ, n * HEAD_DIM, dtype=F64) for n in (HEADS, KV_HEADS, KV_HEADS)],
    )
    layer: Any = plain.qkv_proj
    outs = [
        nn.functional.linear(x, getattr(layer, f"weight_{letter}"), getattr(layer, f"bias_{letter}"))
        for letter in "qkv"
    ]
    sum((out * w).sum() for out, w in zip(outs, weights)).backward()

    def repeated(value: torch.Tensor) -> torch.Tensor:
        return value.unflatten(-1, (tp // multiplier, -1)).repeat_interleave(multiplier, -2).flatten(-2)

    def rank() -> None:
        model = Parallel(multiplier, gather_output=True, bias=bias)
        fill(model, plain.state_dict())
        y = rows(0).requires_grad_()
        query, key, value = model.qkv_proj(y)
        torch.testing.assert_close(query, outs[0].detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(key, repeated(outs[1].detach()), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(value, repeated(outs[2].detach()), rtol=1e-10, atol=1e-10)
        loss = (query * weights[0]).sum()
        for out, w in zip((key, value), weights[1:]):
            loss = loss + (out * repeated(w)).sum() / multiplier
        loss.backward()
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-10, atol=1e-10)
        for name, param in model.qkv_proj.named_parameters():
            grad = plain.qkv_proj.get_parameter(name).grad
            torch.testing.assert_close(whole(param.grad, param), grad, rtol=1e-10, atol=1e-10)

    threads.run(Mesh(tp, tp=tp), rank)


def test_layout_and_names() -> None:
    def rank() -> None:
        fused, separate = Parallel(2).qkv_proj, Parallel(2, fuse_qkv=False, keep_master_weight=True).qkv_proj
        assert list(fused.state_dict()) == ["weight_qkv", "bias_qkv"]
        letters = [f"{kind}_{letter}" for letter in "qkv" for kind in ("weight", "bias")]
        assert list(separate.state_dict()) == letters == [name for name, _ in fused.named_parameters()]
        assert fused.weight_qkv.shape == fused.state_dict()["weight_qkv"].shape == (4 * HEAD_DIM, HIDDEN)
        assert not hasattr(separate, "weight_qkv") and not hasattr(fused, "master_weight_q")
        assert fused.master_weight_qkv is None and separate.master_weight_k.shape == (KV_HEADS * HEAD_DIM, HIDDEN)
        piece = spec_of(separate.weight_k).local_slice(separate.master_weight_k, comm.rank("tp/2"))
        assert torch.equal(piece.double(), separate.weight_k)
        assert (fused.q_output_size_per_partition, fused.kv_output_size_per_partition) == (2 * HEAD_DIM, HEAD_DIM)
        for param in fused.parameters():  # upstream's fused weight has no marks
            assert param.tensor_model_parallel and param.partition_dim == 0
        assert (spec_of(fused.weight_q).axis, spec_of(fused.weight_k).axis) == ("tp", "tp/2")
        assert parallel_state.get_kv_shared_group(as_list=True) == [[0, 1], [2, 3]]
        with pytest.raises(RuntimeError, match="nference"):
            nn.init.zeros_(fused.weight_qkv)  # a copy: a write would be lost
        separate.load_state_dict(fused.state_dict())
        assert torch.equal(separate.weight_v, fused.weight_v) and torch.equal(separate.bias_q, fused.bias_q)
        fused.weight_q.data.zero_()
        fused.load_state_dict(separate.state_dict())
        assert torch.equal(separate.weight_q, fused.weight_q)

    threads.run(Mesh(4, tp=4), rank)


@pytest.mark.parametrize("meta", [False, True])
def test_initial_weights_are_those_of_one_rank(meta: bool) -> None:
    def rank() -> Any:
        torch.manual_seed(3)
        model = Parallel(max(1, comm.size("tp") // 2), device="meta" if meta else None)
        if meta:
            materialize(model, seed=3)
        return [whole(param, param) for param in model.parameters()]

    one, *others = [found for tp in (1, 2, 4) for found in threads.run(Mesh(tp, tp=tp), rank)]
    assert all(weight.std() > 0 for weight in one)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("fuse_qkv", [False, True])
def test_checkpoints_go_into_any_layout(tmp_path: Path, fuse_qkv: bool) -> None:
    state = reference().state_dict()

    def save() -> None:
        model = Parallel(2, fuse_qkv=fuse_qkv)
        fill(model, state)
        nxd.save_checkpoint(tmp_path, "a", model=model)
        nxd.parallel_layers.save({"model": model.state_dict()}, tmp_path / "first")
        assert ("qkv_proj.weight_qkv" in model.state_dict()) == fuse_qkv

    def load() -> None:
        model = Parallel(1, fuse_qkv=not fuse_qkv)
        nxd.load_checkpoint(tmp_path, "a", model=model)
        for name, param in model.named_parameters():
            assert torch.equal(whole(param, param), state[name])

    def load_again() -> None:
        model = Parallel(2, fuse_qkv=not fuse_qkv)
        nxd.parallel_layers.load(tmp_path / "first", model=model)
        for name, param in model.named_parameters():
            assert torch.equal(whole(param, param), state[name])

    threads.run(Mesh(4, tp=4), save)
    threads.run(Mesh(2, tp=2), load)
    threads.run(Mesh(4, tp=4), load_again)


@pytest.mark.parametrize("names", ["weight_q", "weight_qkv"])
@pytest.mark.parametrize("blocked", [False, True])
def test_files_of_nxd(tmp_path: Path, blocked: bool, names: str) -> None:
    """Files of upstream at tp 4, its layer's heads in the order of trn1 and of trn2, are loaded into tp 2."""
    state = reference(bias=False).state_dict()
    groups, kv = HEADS // KV_HEADS // 2, KV_HEADS
    order = range(2 * kv) if blocked else [head * 2 + copy for copy in range(2) for head in range(kv)]

    def blocks(weight: torch.Tensor, dim: int) -> torch.Tensor:
        parts = weight.unflatten(dim, (2 * kv, groups * HEAD_DIM))
        return torch.cat([parts.select(dim, block) for block in order], dim)

    def repeated(weight: torch.Tensor) -> torch.Tensor:
        parts = weight.unflatten(0, (kv, HEAD_DIM))
        return (parts.repeat_interleave(2, 0) if blocked else parts.repeat(2, 1, 1)).flatten(0, 1)

    query, output = blocks(state["qkv_proj.weight_q"], 0), blocks(state["o_proj.weight"], 1)
    key, value = repeated(state["qkv_proj.weight_k"]), repeated(state["qkv_proj.weight_v"])
    files: dict[str, Any] = {"o_proj.weight": nxd_folder.Parameter(output, 1)}
    if names == "weight_q":
        for letter, weight in zip("qkv", (query, key, value)):
            files[f"qkv_proj.weight_{letter}"] = nxd_folder.Parameter(weight, 0)
    else:
        pieces = [torch.cat(shards) for shards in zip(*(weight.chunk(4) for weight in (query, key, value)))]
        files["qkv_proj.weight_qkv"] = nxd_folder.Parameter(torch.cat(pieces), 0)
    nxd_folder.write(tmp_path / "tag", files, tp=4, pp=1)

    def rank() -> None:
        model = Parallel(1, bias=False)
        nxd.load_checkpoint(tmp_path, "tag", model=model)
        for name, param in model.named_parameters():
            assert torch.equal(whole(param, param), state[name]), name

    threads.run(Mesh(2, tp=2), rank)


@pytest.mark.parametrize("fuse_qkv", [False, True])
def test_padded_heads(fuse_qkv: bool) -> None:
    """6 query heads over 3 key/value heads become 8 over 4 at tp 2: output and gradients are those without."""
    plain = reference(heads=6, kv_heads=3)
    out = plain(rows(0))
    out.square().sum().backward()

    def rank() -> None:
        with torch.device("meta"):
            model = Parallel(heads=6, kv_heads=3, fuse_qkv=fuse_qkv)
        pad_model(model, 2, 3)
        layer = model.qkv_proj
        assert layer.output_sizes == [8 * HEAD_DIM, 4 * HEAD_DIM] and layer.weight_k.shape[0] == 2 * HEAD_DIM
        assert spec_of(layer.bias_q).unpadded == 6 * HEAD_DIM
        model.to_empty(device="cpu")
        fill(model, plain.state_dict())
        local = model(rows(0))
        torch.testing.assert_close(local, out.detach(), rtol=1e-10, atol=1e-10)
        local.square().sum().backward()
        for name, param in model.named_parameters():
            torch.testing.assert_close(whole(param.grad, param), plain.get_parameter(name).grad, rtol=1e-10, atol=1e-10)

    threads.run(Mesh(2, tp=2), rank)


@pytest.mark.parametrize("fuse_qkv", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_functional_form(sequence_parallel: bool, fuse_qkv: bool) -> None:
    """By upstream's arguments, on this rank's shards: outputs and all gradients are the layer's."""

    def rank() -> None:
        torch.manual_seed(0)
        layer = Parallel(2, sequence_parallel_enabled=sequence_parallel).qkv_proj
        x, y = rows(comm.rank("tp")).requires_grad_(), rows(comm.rank("tp")).requires_grad_()
        if not sequence_parallel:
            x, y = rows(0).requires_grad_(), rows(0).requires_grad_()
        expected = layer(x)
        weights = [
            param.detach().clone().requires_grad_() for param in (layer.weight_q, layer.weight_k, layer.weight_v)
        ]
        biases = [param.detach().clone().requires_grad_() for param in (layer.bias_q, layer.bias_k, layer.bias_v)]
        common = (not sequence_parallel, sequence_parallel, 2)
        if fuse_qkv:
            fused = [torch.cat(weights), torch.cat(biases), True, 2 * HEAD_DIM, HEAD_DIM]
            arguments = [y, *[None] * 6, *common, *fused]
        else:
            arguments = [y, *weights, *biases, *common]
        found = GQAQKVLinearWithAsyncCommunication.apply(*arguments)
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
        sum((out**2).sum() for out in found).backward()
        sum((out**2).sum() for out in expected).backward()
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-10, atol=1e-10)
        for copy, letter in zip(weights, "qkv"):
            torch.testing.assert_close(copy.grad, getattr(layer, f"weight_{letter}").grad, rtol=1e-10, atol=1e-10)
        for copy, letter in zip(biases, "qkv"):
            torch.testing.assert_close(copy.grad, getattr(layer, f"bias_{letter}").grad, rtol=1e-10, atol=1e-10)

    threads.run(Mesh(4, tp=4), rank)


def test_collectives() -> None:
    """One for the input's gradient, and one for each parameter of keys and values, over the ranks that hold it."""

    def rank() -> Any:
        model = Parallel(2)
        with comm.record() as forward:
            q, k, v = model.qkv_proj(rows(0).requires_grad_())
        with comm.record() as backward:
            (q.sum() + k.sum() + v.sum()).backward()
        return [[(call.verb, call.axis, call.bytes) for call in calls] for calls in (forward, backward)]

    weight, bias = HEAD_DIM * HIDDEN * 8, HEAD_DIM * 8
    for forward, backward in threads.run(Mesh(4, tp=4), rank):
        copies = [("all_reduce", "tp%2", size) for size in (bias, bias, weight, weight)]
        assert forward == [] and sorted(backward) == sorted([("all_reduce", "tp", 4 * SEQ * HIDDEN * 8), *copies])


def test_unequal_copies_are_found() -> None:
    def rank() -> str:
        model = Parallel(2)
        with torch.no_grad():
            model.qkv_proj.weight_k[0, 0] += comm.rank("tp")
        with pytest.raises(SpmdTypeError) as caught:
            verify(model, axes=["tp"])
        return str(caught.value)

    for message in threads.run(Mesh(4, tp=4), rank):
        assert "qkv_proj.weight_k over tp%2: ranks [0]" in message and "weight_q" not in message


def test_mistakes_are_named() -> None:
    def refused(build: Any) -> str:
        with pytest.raises(ValueError) as caught:
            threads.run(Mesh(4, tp=4), build)
        return str(caught.value)

    layer: Any = lambda sizes=(16, 8), **options: GQAQKVColumnParallelLinear(8, [*sizes], **options)  # noqa: E731
    assert "3 replicas of each shard over tp of size 4" in refused(lambda: layer(kv_size_multiplier=3))
    assert "output_size 2 is not divisible by the tensor parallel size 4" in refused(lambda: layer((16, 2)))
    assert "output_sizes must be [q, kv], got [8, 8, 8]" in refused(lambda: layer((8, 8, 8)))
    assert "gather_output=True is not possible" in refused(lambda: layer(sequence_parallel_enabled=True))
    other = torch.zeros(3, 8)
    assert "weight_qkv of the state dict has 3 rows, and this rank holds 4 + 2 + 2" in refused(
        lambda: layer(bias=False).load_state_dict({"weight_qkv": other})
    )
    assert "the input [2, 4] of torch.float32 does not fit the weight [4, 8]" in refused(
        lambda: layer()(torch.ones(2, 4))
    )
    assert "pad_model: qkv_proj has 2 replicas of each shard" in refused(
        lambda: pad_model(Parallel(2), 4, KV_HEADS + 1)
    )
