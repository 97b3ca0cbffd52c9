"""Checkpoints of experts: saved at any ep, tp, pp and dp, loaded at any other, bit for bit, masters and state included.

Every layout trains the same steps by itself, with gradients that are slices of the same whole ones.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
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
from neuronx_dist.weights.partial_model import parameter_slots
from neuronx_dist.weights.shard_spec import ShardSpec, set_spec, spec_of
from tests.checkpoint.llama_layouts import load, save, whole

EXPERTS, HIDDEN, WIDTH = 8, 4, 6


@dataclass(frozen=True)
class Layout:
    mesh: Mesh
    optimizer: str = "zero1"
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        sizes = (f"{name}{getattr(self.mesh, name)}" for name in ("tp", "pp", "cp", "dp", "ep", "edp"))
        return "-".join([*sizes, self.optimizer])


LAYOUTS = [
    Layout(Mesh(1), "master"),
    Layout(Mesh(2, ep=2)),
    Layout(Mesh(8, ep=2)),  # edp 4
    Layout(Mesh(4, ep=4), "master"),
    Layout(Mesh(8, tp=2, ep=2)),
    Layout(Mesh(4, tp=2)),
    Layout(Mesh(8, tp=2, pp=2, ep=2)),
    Layout(Mesh(4, cp=2, ep=2)),
]
CORNERS = [LAYOUTS[index] for index in (2, 3, 6)]
LOADING = LAYOUTS if os.environ.get("NXD_FULL") else CORNERS


class Experts(nn.Module):
    """Fused gate and up `[experts/ep, hidden, 2 width/tp]`, down `[experts/ep, width/tp, hidden]`, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        tp, experts = comm.size("tp"), EXPERTS // comm.size("ep")
        self.gate_up = nn.Parameter(torch.zeros(experts, HIDDEN, 2 * WIDTH // tp))
        self.down = nn.Parameter(torch.zeros(experts, WIDTH // tp, HIDDEN))
        self.bias = nn.Parameter(torch.zeros(experts, HIDDEN))
        set_spec(self, "gate_up", ShardSpec("tp", 2, 2, tp, (experts, HIDDEN, 2 * WIDTH)))
        set_spec(self, "down", ShardSpec("tp", 1, 1, tp, (experts, WIDTH, HIDDEN)))
        for param in self.parameters():
            param.expert_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias.sum(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nxd.ColumnParallelLinear(HIDDEN, HIDDEN)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.dense(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).sum()


def make(layout: Layout, seed: int | None = None) -> tuple[Any, Any]:
    """A model and its optimizer; without a seed all is zero."""
    model: Any = Net().to(layout.dtype)
    if layout.mesh.pp > 1:
        model = nxd.NxDPPModel(
            model, transformer_layer_cls=Block, num_microbatches=2, input_names=["x"], auto_partition=True
        )
    with torch.no_grad():
        for slot in parameter_slots(model):
            slot.tensor.zero_() if seed is None else slot.tensor.copy_(own_slice(slot.name, slot.tensor, seed))
    params = [slot.tensor for slot in parameter_slots(model)]
    options: dict[str, Any] = dict(lr=0.125, grad_clipping=False)
    if layout.optimizer == "plain":
        return model, torch.optim.AdamW(params, lr=0.125)
    wrapper = nxd.NeuronZero1Optimizer if layout.optimizer == "zero1" else nxd.MasterWeightsOptimizer
    return model, wrapper(params, torch.optim.AdamW, **options)


def own_slice(name: str, param: torch.Tensor, seed: int) -> torch.Tensor:
    """This rank's part of whole random values, by what the layers say of themselves."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{seed}".encode()))
    spec, shape = spec_of(param), list(spec_of(param).unpadded_shape)
    is_expert = hasattr(param, "expert_model_parallel")
    if is_expert:
        shape[0] = EXPERTS
    value = torch.randint(-8, 9, shape, generator=generator).to(param.dtype) / 8  # sums over 8 ranks are exact in bf16
    if is_expert:
        value = value.chunk(comm.size("ep"))[comm.rank("ep")]
    return value if spec.axis is None else spec.local_slice(value, comm.rank(spec.axis))


def train(layout: Layout, model: Any, optimizer: Any, steps: int = 2) -> None:
    for step in range(1, steps + 1):
        for slot in parameter_slots(model):
            # ZeRO-1 takes an expert's gradient to be the sum over the tokens of its ep ranks.
            tokens = comm.size("ep") if layout.optimizer == "zero1" and ".experts." in slot.name else 1
            slot.tensor.grad = own_slice(slot.name, slot.tensor, step) * tokens
        optimizer.step()


def train_and_save(layout: Layout, root: Path) -> None:
    model, optimizer = make(layout, seed=0)
    train(layout, model, optimizer)
    save(model, optimizer, root)


def load_each(layout: Layout, sources: dict[str, Path]) -> dict[str, dict[str, torch.Tensor]]:
    """State of this rank after training, and after loading each checkpoint."""
    model, optimizer = make(layout, seed=0)
    train(layout, model, optimizer)
    results = {"trained": tensors_of(model, optimizer)}
    for name, root in sources.items():
        model, optimizer = make(layout)
        load(model, optimizer, root)
        results[name] = tensors_of(model, optimizer)
    return results


def tensors_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    return {key: x.tensor.clone() for key, x in collect(model, optimizer).tensors.items()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {str(layout): tmp_path_factory.mktemp("experts") for layout in LAYOUTS}
    for layout in LAYOUTS:
        comm.threads.run(layout.mesh, train_and_save, layout, folders[str(layout)])
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_a_layout_saves_what_one_process_saves(layout: Layout, checkpoints: dict[str, Path]) -> None:
    expected, actual = whole(checkpoints[str(LAYOUTS[0])]), whole(checkpoints[str(layout)])
    assert actual.keys() == expected.keys()
    assert expected["optimizer.master.layers.1.experts.gate_up"].shape == (EXPERTS, HIDDEN, 2 * WIDTH)
    different = [key for key in expected if not torch.equal(actual[key], expected[key])]
    assert different == []
    assert all(value.abs().sum() > 0 for value in expected.values())


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LOADING, ids=str)
def test_a_layout_loads_the_same_from_every_other(layout: Layout, checkpoints: dict[str, Path]) -> None:
    for rank, loaded in enumerate(comm.threads.run(layout.mesh, load_each, layout, checkpoints)):
        trained = loaded.pop("trained")
        assert len(loaded) == len(LAYOUTS) and any("experts.down.exp_avg_sq" in key for key in trained)
        for name, tensors in loaded.items():
            assert tensors.keys() == trained.keys()
            different = [key for key in trained if not torch.equal(tensors[key], trained[key])]
            assert different == [], f"rank {rank} after loading {name}"


def test_experts_without_masters_load_into_another_ep(tmp_path: Path) -> None:
    """A torch optimizer, which is not sharded, and fp32 weights; each rank of ep has other experts."""
    layouts = [Layout(Mesh(2, ep=2), "plain", torch.float32), Layout(Mesh(4, ep=4), "plain", torch.float32)]
    comm.threads.run(layouts[0].mesh, train_and_save, layouts[0], tmp_path)
    for results in comm.threads.run(layouts[1].mesh, load_each, layouts[1], {"ep2": tmp_path}):
        assert all(torch.equal(results["ep2"][key], value) for key, value in results["trained"].items())


def test_another_number_of_experts_is_a_mismatch(tmp_path: Path) -> None:
    def save_two() -> None:
        nxd.save_checkpoint(tmp_path, "a", Experts())

    def load_into_more() -> None:
        model = Experts()
        model.bias = nn.Parameter(torch.zeros(3, HIDDEN))
        model.bias.expert_model_parallel = True  # type: ignore[attr-defined]
        with pytest.raises(
            CheckpointMismatch, match=r"model.bias has shape \(8, 4\) in the checkpoint and \(6, 4\) in this model"
        ):
            nxd.load_checkpoint(tmp_path, "a", model)

    comm.threads.run(Mesh(4, ep=4), save_two)
    comm.threads.run(Mesh(2, ep=2), load_into_more)


def test_a_parameter_of_experts_without_dims_is_refused(tmp_path: Path) -> None:
    def rank() -> None:
        model = nn.ParameterDict({"scale": torch.ones(())})
        model["scale"].expert_model_parallel = True
        with pytest.raises(ValueError, match="scale is marked as a parameter of experts, but is a scalar"):
            nxd.save_checkpoint(tmp_path, "a", model)

    comm.threads.run(Mesh(2, ep=2), rank)


def test_a_layout_over_ep_that_the_parameter_has_itself_counts(tmp_path: Path) -> None:
    """By its `ShardSpec`, dim 0 is divided over ep already."""

    def rank() -> None:
        model = nn.ParameterDict({"expert": torch.full((2, 3), float(comm.rank("ep")))})
        model["expert"].expert_model_parallel = True
        set_spec(model, "expert", ShardSpec("ep", 0, 1, 2, (4, 3)))
        save(model, None, tmp_path)

    comm.threads.run(Mesh(2, ep=2), rank)
    assert whole(tmp_path)["model.expert"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
