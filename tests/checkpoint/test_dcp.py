"""torch.distributed.checkpoint reads what we write, and we what it writes: weights, and its state of optimizers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.checkpoint.errors import CheckpointCorrupted, CheckpointError, CheckpointMismatch
from neuronx_dist.checkpoint.run_state import collect
from neuronx_dist.mesh import Mesh

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Plain(nn.Module):
    """One process's model; `Parallel` has the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Parallel(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.up = nxd.ColumnParallelLinear(4, 8, gather_output=False)
        self.down = nxd.RowParallelLinear(8, 4, input_is_parallel=True)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    return [
        {"params": [x for name, x in named.items() if name.endswith("weight")], "weight_decay": 0.25},
        {"params": [x for name, x in named.items() if name.endswith("bias")], "weight_decay": 0.0},
    ]


def trained(lr: Any = 0.0625) -> tuple[Plain, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = Plain()
    optimizer = torch.optim.AdamW(groups_of(model), lr=lr)
    step(model, optimizer, 2)
    model.seen.fill_(3)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for number in range(steps):
        model(torch.linspace(-1, 1, 8).view(2, 4) + number).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def dcp_save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, flatten: bool = False) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def assert_same(model: nn.Module, optimizer: Any, whole: nn.Module, expected: torch.optim.Optimizer) -> None:
    """Each piece of weights and state that this rank holds is that of the whole."""
    values = {f"model.{name}": value for name, value in whole.state_dict().items()}
    for name, param in whole.named_parameters():
        values |= {f"optimizer.state.{name}.{entry}": value for entry, value in expected.state[param].items()}
    state = collect(model, optimizer)
    assert state.tensors.keys() == values.keys()
    for key, tensor in state.tensors.items():
        for piece in tensor.pieces:
            where = tuple(slice(at, at + size) for at, size in zip(piece.offset, piece.shape))
            assert torch.equal(tensor.tensor[piece.local], values[key][where]), key
    for mine, theirs in zip(optimizer.param_groups, expected.param_groups, strict=True):
        assert {name: mine[name] for name in ("weight_decay", "betas", "lr")} == {
            name: float(theirs[name]) if name == "lr" else theirs[name] for name in ("weight_decay", "betas", "lr")
        }


@pytest.mark.each_pair
@pytest.mark.parametrize("zero1", [True, False])
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("tag", ["step_7", None])
def test_what_it_wrote_loads_into_any_layout(tag: str | None, flatten: bool, zero1: bool, tmp_path: Path) -> None:
    whole, expected = trained()
    dcp_save(whole, expected, tmp_path / (tag or ""), flatten)

    def rank() -> None:
        model = Parallel()
        options: dict[str, Any] = dict(lr=1.0, betas=(0.5, 0.5))
        if zero1:
            optimizer: Any = nxd.NeuronZero1Optimizer(groups_of(model), torch.optim.AdamW, **options)
        else:
            optimizer = torch.optim.AdamW(groups_of(model), **options)
        nxd.load_checkpoint(tmp_path, tag, model, optimizer)
        assert_same(model, optimizer, whole, expected)

    comm.threads.run(Mesh(4, tp=2), rank)


def test_a_learning_rate_that_is_a_tensor(tmp_path: Path) -> None:
    whole, expected = trained(torch.tensor(0.0625))
    dcp_save(whole, expected, tmp_path / "a")

    def rank() -> None:
        model = Parallel()
        optimizer = nxd.NeuronZero1Optimizer(groups_of(model), torch.optim.AdamW, lr=1.0)
        nxd.load_checkpoint(tmp_path, "a", model, optimizer)
        assert [type(group["lr"]) for group in optimizer.param_groups] == [float, float]
        assert_same(model, optimizer, whole, expected)

    comm.threads.run(Mesh(2, tp=2), rank)


def test_it_reads_ours_and_goes_on(tmp_path: Path) -> None:
    """Into a plain model and its AdamW, whose next step has the bits of the run that saved."""

    def set_grads(model: nn.Module) -> None:
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)

    def rank() -> None:
        model = Parallel()
        with torch.no_grad():
            for number, param in enumerate(model.parameters()):
                param.fill_(0.125 + number)
        optimizer = nxd.NeuronZero1Optimizer(groups_of(model), torch.optim.AdamW, lr=0.0625, grad_clipping=False)
        for tag in ("a", "b"):
            set_grads(model)
            optimizer.step()
            nxd.save_checkpoint(tmp_path, tag, model, optimizer)

    def read(tag: str) -> tuple[Plain, torch.optim.Optimizer]:
        plain = Plain()
        optimizer = torch.optim.AdamW(groups_of(plain), lr=1.0)
        state = {"model": plain.state_dict(), "optimizer": get_optimizer_state_dict(plain, optimizer)}
        dcp.load(state, checkpoint_id=tmp_path / tag, no_dist=True)
        plain.load_state_dict(state["model"])
        set_optimizer_state_dict(plain, optimizer, state["optimizer"])
        return plain, optimizer

    comm.threads.run(Mesh(4, tp=2), rank)
    plain, optimizer = read("a")
    set_grads(plain)
    optimizer.step()
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.0625, 0.25), (0.0625, 0.0)]
    with comm.as_rank(Mesh(1), 0):
        assert_same(plain, optimizer, *read("b"))


def test_our_groups_are_a_list_for_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    def rank() -> None:
        model = Plain()
        nxd.save_checkpoint(tmp_path, "a", model, torch.optim.SGD(groups_of(model), lr=0.5))

    comm.threads.run(Mesh(1), rank)
    dcp_to_torch_save(tmp_path / "a", tmp_path / "one.pt")
    groups = torch.load(tmp_path / "one.pt", weights_only=True)["optimizer"]["param_groups"]
    assert [(group["weight_decay"], group["params"]) for group in groups] == [
        (0.25, ["up.weight", "down.weight"]),
        (0.0, ["up.bias", "down.bias"]),
    ]


def test_a_save_of_ours_that_was_interrupted_is_not_taken_for_one(tmp_path: Path) -> None:
    def rank() -> None:
        model = Plain()
        nxd.save_checkpoint(tmp_path, "a", model)
        (tmp_path / "a" / "done").unlink()
        with pytest.raises(CheckpointError, match="'a' in .* is incomplete: its save was interrupted"):
            nxd.load_checkpoint(tmp_path, "a", model)
        with pytest.raises(CheckpointError, match="there is no complete checkpoint"):
            nxd.load_checkpoint(tmp_path / "a", None, model)

    comm.threads.run(Mesh(1), rank)


def test_groups_of_another_class_are_refused(tmp_path: Path) -> None:
    dcp_save(*trained(), tmp_path / "a")

    def rank() -> None:
        model = Plain()
        before = model.up.weight.detach().clone()
        with pytest.raises(CheckpointMismatch, match="of another optimizer class"):
            nxd.load_checkpoint(tmp_path, "a", model, torch.optim.SGD(groups_of(model), lr=0.5))
        assert torch.equal(model.up.weight, before)

    comm.threads.run(Mesh(1), rank)


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_in_its_groups_runs(tmp_path: Path) -> None:
    """An option is a pickle of its own."""
    whole, expected = trained()
    witness = tmp_path / "was run"
    expected.param_groups[0]["hook"] = Malicious(witness)
    state = {"model": whole.state_dict(), "optimizer": get_optimizer_state_dict(whole, expected)}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    pickle.loads(pickle.dumps(Malicious(tmp_path / "it works")))
    witness.unlink(missing_ok=True)
    assert (tmp_path / "it works").exists()

    def rank() -> None:
        model = Plain()
        with pytest.raises(CheckpointCorrupted, match="holds more than tensors and plain data; nothing"):
            nxd.load_checkpoint(tmp_path, "a", model, torch.optim.AdamW(groups_of(model)))

    comm.threads.run(Mesh(1), rank)
    assert not witness.exists()
