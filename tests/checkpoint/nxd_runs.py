"""A small model, its parameters with their optimizer state, and NxD's folders of them (test_nxd_reading*.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.checkpoint.errors import CheckpointMismatch
from neuronx_dist.checkpoint.run_state import collect
from neuronx_dist.mesh import Mesh
from tests.checkpoint import nxd_folder
from tests.checkpoint.nxd_folder import Parameter

LAYOUTS = [Mesh(1), Mesh(2, tp=2), Mesh(4, tp=2), Mesh(4, tp=4)]


class Block(nn.Module):
    """Every way in which a parameter is divided: by rows, by columns, in fused blocks, not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nxd.ColumnParallelLinear(8, 16, bias=True, gather_output=False, stride=2)
        self.down = nxd.RowParallelLinear(8, 8, input_is_parallel=True)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("scale", torch.zeros(3))


class Net(nn.Module):
    def __init__(self, vocabulary: int = 12) -> None:
        super().__init__()
        self.embed = nxd.ParallelEmbedding(vocabulary, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nxd.ColumnParallelLinear(8, vocabulary, bias=False)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, Parameter]:
    """Full state of the run that saved, of two stages."""
    generator = torch.Generator().manual_seed(5)

    def parameter(shape: tuple[int, ...], dim: int | None = None, stride: int = 1, stage: int = 0) -> Parameter:
        value, first, second = (torch.randn(shape, generator=generator) for _ in range(3))
        state = {"step": torch.tensor(7.0), "exp_avg": first, "exp_avg_sq": second.square()}
        return Parameter(value.to(dtype), dim, stride, stage, state)

    whole = {"embed.weight": parameter((12, 8), 0)}
    for layer in range(2):
        prefix = f"layers.{layer}"
        whole[f"{prefix}.gate_up.weight"] = parameter((16, 8), 0, 2, layer)
        whole[f"{prefix}.gate_up.bias"] = parameter((16,), 0, 2, layer)
        whole[f"{prefix}.down.weight"] = parameter((8, 8), 1, 1, layer)
        whole[f"{prefix}.down.bias"] = parameter((8,), None, 1, layer)
        whole[f"{prefix}.norm.weight"] = parameter((8,), None, 1, layer)
        whole[f"{prefix}.norm.bias"] = parameter((8,), None, 1, layer)
    whole["head.weight"] = parameter((12, 8), 0, 1, 1)
    return whole


def buffers() -> dict[str, Parameter]:
    return {f"layers.{layer}.scale": Parameter(torch.arange(3.0) + layer, None, 1, layer) for layer in range(2)}


def adamw(model: nn.Module, kind: str = "zero1") -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    if kind == "plain":
        return torch.optim.AdamW(trained, lr=0.01)
    return nxd.NeuronZero1Optimizer(trained, torch.optim.AdamW, lr=0.01)


def assert_holds(model: nn.Module, optimizer: Any, expected: dict[str, Parameter]) -> None:
    """Each tensor that this rank would save is this part of the whole one."""
    state = collect(model, optimizer)
    whole = {f"model.{name}": x.value for name, x in (expected | buffers()).items()}
    for name, x in expected.items():
        whole |= {f"optimizer.state.{name}.{entry}": value for entry, value in x.state.items()}
    assert state.tensors.keys() <= whole.keys()
    assert len(state.tensors) == len(whole) - (0 if optimizer else 3 * len(expected))
    for key, tensor in state.tensors.items():
        for piece in tensor.pieces:
            where = tuple(slice(at, at + size) for at, size in zip(piece.offset, piece.shape))
            assert torch.equal(tensor.tensor[piece.local], whole[key][where]), key
    if optimizer is not None:
        assert [group["lr"] for group in optimizer.param_groups] == [0.125]
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


def load(folder: Path, tag: str | None = None, kind: str | None = "zero1", **options: Any) -> tuple[Any, Any, Any]:
    model = Net()
    optimizer = None if kind is None else adamw(model, kind)
    content = nxd.load_checkpoint(folder, tag, model, optimizer, **options)
    return model, optimizer, content


def write(folder: Path, whole: dict[str, Parameter] | None = None, tp: int = 2, pp: int = 2, **options: Any) -> None:
    nxd_folder.write(folder, parameters() if whole is None else whole, tp, pp, buffers=buffers(), **options)


def refused(folder: Path, message: str, error: type[Exception] = CheckpointMismatch) -> None:
    """Nothing is loaded, on no rank, and the message says why."""

    def rank() -> None:
        model = Net()
        before = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(error, match=message):
            nxd.load_checkpoint(folder, None, model, adamw(model))
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters()))

    comm.threads.run(Mesh(2, tp=2), rank)
