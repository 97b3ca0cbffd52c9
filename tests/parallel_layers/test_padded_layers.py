"""Layers with `pad=True`, whose sizes tp does not divide: outputs, gradients and steps are those without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_dist.parallel_layers.conv import InputChannelParallelConv2d
from neuronx_dist.parallel_layers.grads import clip_grad_norm, reduce_gradients
from neuronx_dist.spmd import spec_of
from neuronx_dist.weights.shard_spec import gather_full

F64 = torch.float64
CLOSE: Any = dict(rtol=1e-10, atol=1e-10)
VOCAB, HIDDEN, INNER = 11, 6, 10


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN, dtype=F64)
        self.up = nn.Linear(HIDDEN, INNER, dtype=F64)
        self.down = nn.Linear(INNER, HIDDEN, dtype=F64)
        self.head = nn.Linear(HIDDEN, VOCAB, dtype=F64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.down(F.silu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


class Padded(nn.Module):
    """`columns`: the embedding is sharded over its columns, and layers exchange whole tensors."""

    def __init__(self, columns: bool = False, sequence: bool = False) -> None:
        super().__init__()
        common: Any = dict(dtype=F64, pad=True)
        sharded: Any = dict(sequence_parallel_enabled=sequence, sequence_dimension=1 if sequence else None)
        self.embed = ParallelEmbedding(VOCAB, HIDDEN, shard_across_embedding=columns, **common, **sharded)
        self.up = ColumnParallelLinear(HIDDEN, INNER, gather_output=columns, **common, **sharded)
        self.down = RowParallelLinear(INNER, HIDDEN, input_is_parallel=not columns, **common, **sharded)
        self.head = ColumnParallelLinear(HIDDEN, VOCAB, gather_output=False, **common, **sharded)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.down(F.silu(self.up(x)))
        return nxd.parallel_cross_entropy(self.head(x), ids.roll(-1, 1), vocab_size=VOCAB).mean()


def plain() -> Plain:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Plain()


def fill(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            spec = spec_of(param)
            param.copy_(spec.local_slice(state[name], comm.rank(spec.axis)) if spec.axis else state[name])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"columns": True}, {"sequence": True}], ids=str)
def test_steps_are_those_of_one_process(tp: int, options: dict[str, bool]) -> None:
    model_1 = plain()
    state = {name: value.clone() for name, value in model_1.state_dict().items()}
    ids = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model_1.parameters(), lr=0.01)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model_1(ids)
        loss.backward()
        grads = {name: param.grad.clone() for name, param in model_1.named_parameters()}
        expected.append((loss.detach(), grads, nn.utils.clip_grad_norm_(model_1.parameters(), 1.0)))
        optimizer.step()

    def rank() -> None:
        model = Padded(**options)
        fill(model, state)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for loss_1, grads_1, norm_1 in expected:
            optimizer.zero_grad()
            loss = model(ids)
            torch.testing.assert_close(loss.detach(), loss_1, **CLOSE)
            loss.backward()
            reduce_gradients(model)
            for name, param in model.named_parameters():
                torch.testing.assert_close(gather_full(param.grad, spec_of(param)), grads_1[name], **CLOSE)
            torch.testing.assert_close(clip_grad_norm(model.parameters(), 1.0), norm_1, **CLOSE)
            optimizer.step()
        for name, param in model.named_parameters():
            spec = spec_of(param)
            torch.testing.assert_close(gather_full(param, spec), model_1.get_parameter(name).detach(), **CLOSE)
            if spec.unpadded is not None:
                start, stop = spec.positions(comm.rank("tp"))
                assert not param.narrow(spec.dim, stop - start, param.shape[spec.dim] - (stop - start)).any(), name

    threads.run(Mesh(tp, tp=tp), rank)


@pytest.mark.parametrize("stride", [1, 2])
def test_gathered_outputs_and_whole_inputs(stride: int) -> None:
    """Padding is at the end of each fused block."""
    weight, bias, x = torch.randn(10, 6, dtype=F64), torch.randn(10, dtype=F64), torch.randn(2, 3, 6, dtype=F64)
    rows = torch.randn(6, 10, dtype=F64)

    def rank() -> None:
        column = ColumnParallelLinear(6, 10, stride=stride, pad=True, dtype=F64)
        fill(column, {"weight": weight, "bias": bias})
        out = column(x)
        torch.testing.assert_close(out, F.linear(x, weight, bias), **CLOSE)
        assert (column.output_size, column.pad_size, column.output_size_per_partition) == (
            10,
            -10 % (4 * stride),
            12 // 4 if stride == 1 else 4,
        )
        row = RowParallelLinear(10, 6, False, stride=stride, pad=True, dtype=F64)
        fill(row, {"weight": rows})
        torch.testing.assert_close(row(out), F.linear(F.linear(x, weight, bias), rows), **CLOSE)

    threads.run(Mesh(4, tp=4), rank)


def test_aligned_and_padded_outputs() -> None:
    def rank() -> None:
        layer = ColumnParallelLinear(6, 10, pad=True, pad_alignment_size_per_rank=4, keep_padded_output=True)
        out = layer(torch.ones(2, 6))
        assert out.shape == (2, 16) and not out[:, 10:].any() and layer.weight.shape == (8, 6)
        assert out[:, :10].all()

    threads.run(Mesh(2, tp=2), rank)


def test_whole_state_dicts_are_padded_by_the_hook(tmp_path: Path) -> None:
    state = plain().state_dict()

    def rank() -> None:
        model = Padded()
        fill(model, state)
        whole = dict(state)
        model.up.preshard_hook(whole, "up.weight")
        model.down.preshard_hook(whole, "down.weight")
        model.down.preshard_hook(whole, "down.bias")
        model.embed.preshard_hook(whole, "embed.weight")
        for name in ("up.weight", "down.weight", "embed.weight"):
            spec, number = spec_of(model.get_parameter(name)), comm.rank("tp")
            assert torch.equal(whole[name].chunk(4, spec.dim)[number], model.get_parameter(name))
        assert torch.equal(whole["down.bias"], state["down.bias"])
        with pytest.raises(RuntimeError, match="up.weight of the state dict is"):
            model.up.preshard_hook(whole, "up.weight")
        conv = InputChannelParallelConv2d(3, 2, 1, partition_pad=True)
        weights = {"weight": torch.ones(2, 3, 1, 1)}
        conv.preshard_hook(weights, "weight")
        assert weights["weight"].shape == (2, 4, 1, 1) and not weights["weight"][:, 3].any()
        nxd.save_checkpoint(tmp_path, "a", model=model)

    def load() -> None:
        model = Padded()
        nxd.load_checkpoint(tmp_path, "a", model=model)
        for name, param in model.named_parameters():
            assert torch.equal(gather_full(param, spec_of(param)), state[name])

    threads.run(Mesh(4, tp=4), rank)
    threads.run(Mesh(2, tp=2), load)


def test_mistakes_are_named() -> None:
    def refused(build: Any) -> str:
        with pytest.raises(ValueError) as caught:
            threads.run(Mesh(4, tp=4), build)
        return str(caught.value)

    assert "pad it (see pad_model, or pad=True)" in refused(lambda: ColumnParallelLinear(4, 6))
    assert "keep_padded_output=True is not possible with stride=2" in refused(
        lambda: ColumnParallelLinear(4, 6, stride=2, pad=True, keep_padded_output=True)
    )
