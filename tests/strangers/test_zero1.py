"""Calls of torch and others on a ZeRO-1 optimizer, and on states of shards: right, or refused by name."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.gradients.guards import watch_optimizers
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import parallel_state
from tests.strangers.test_wrappers import launched, without_torch_xla
from tests.strangers.toy import Net, local_batch, message_of, whole_weights
from tests.support.pool import processes

Weights = dict[str, torch.Tensor]
MESHES = [Mesh(2), Mesh(4, tp=2)]


def zero1(model: nn.Module, optimizer_class: Any = torch.optim.AdamW, **options: Any) -> Any:
    """The optimizer; of one process that of torch."""
    if comm.size("world") == 1:
        return optimizer_class(model.parameters(), lr=0.1)
    return nxd.NeuronZero1Optimizer(model.parameters(), optimizer_class, lr=0.1, grad_clipping=False, **options)


def train(model: nn.Module, optimizer: Any, steps: int = 2, after: Callable[[], Any] = lambda: None) -> Weights:
    for step in range(steps):
        model(**local_batch(step)).backward()
        nxd.reduce_gradients(model, average_over_data=False)
        optimizer.step()
        optimizer.zero_grad()
        after()
    return whole_weights(model)


def trained() -> Weights:
    model = Net()
    return train(model, zero1(model))


def by_state_dict() -> Weights:
    """Weights and state in a file."""
    model = Net()
    optimizer = zero1(model)
    train(model, optimizer, 1)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file)
    other = Net()
    other.load_state_dict(weights)
    optimizer = zero1(other)
    optimizer.load_state_dict(state)
    return train(other, optimizer, 2)


def by_average(**options: Any) -> Weights:
    model = Net()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    train(model, zero1(model, **options), after=lambda: averaged.update_parameters(model))
    return {name: weight for name, weight in whole_weights(averaged).items() if name != "n_averaged"}


def by_scheduler() -> Weights:
    model = Net()
    optimizer = zero1(model, torch.optim.SGD)
    return train(model, optimizer, 3, StepLR(optimizer, 1, 0.5).step)


def by_hooks() -> Weights:
    model, calls = Net(), []
    optimizer = zero1(model)
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 2)
    weights = train(model, optimizer)
    assert calls == ["before", "after"] * 2
    return weights


CASES: dict[str, Callable[[], Weights]] = {
    "AdamW": trained,
    "torch.save": by_state_dict,
    "EMA": by_average,
    "EMA, overlap": lambda: by_average(overlap=True),
    "scheduler": by_scheduler,
    "hooks": by_hooks,
}


def check(case: Callable[[], Weights], results: list[Weights]) -> None:
    with comm.as_rank(Mesh(1), 0):
        reference = case()
    for weights in results:
        assert weights.keys() == reference.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, reference[name], rtol=1e-9, atol=1e-10)


@pytest.mark.each_value
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_one_process(name, mesh):
    check(CASES[name], comm.threads.run(mesh, CASES[name]))


def by_ddp() -> Weights:
    model = Net()
    wrapped = DistributedDataParallel(model, process_group=parallel_state.get_data_parallel_group())
    optimizer = zero1(wrapped)
    for step in range(2):
        wrapped(**local_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_weights(model)


def by_accelerate() -> Weights:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model = Net()
    optimizer = zero1(model)
    with launched():
        try:
            accelerator = Accelerator(cpu=True)
            wrapped, optimizer = accelerator.prepare(model, optimizer)
            for step in range(2):
                accelerator.backward(wrapped(**local_batch(step)))
                optimizer.step()
                optimizer.zero_grad()
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
    return whole_weights(model)


@pytest.mark.process
@pytest.mark.parametrize(
    "case, tp",
    [
        pytest.param(by_ddp, 1, marks=pytest.mark.full),
        (by_ddp, 2),
        pytest.param(by_accelerate, 1, marks=without_torch_xla),
    ],
)
def test_under_wrappers(case, tp):
    check(trained, processes(2 * tp).run(case, mesh={"tp": tp}))


@pytest.mark.parametrize("call", [copy.copy, pickle.dumps])
def test_shallow_copies_and_pickle_are_refused(call):
    def run() -> str:
        model = Net()
        optimizer = zero1(model)
        train(model, optimizer, 1)
        return message_of(lambda: call(optimizer))

    for refusal in comm.threads.run(Mesh(2), run):
        assert (
            "NeuronZero1Optimizer cannot be pickled, or copied without its parameters" in refusal
            and "load_state_dict" in refusal
        )


@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(2, tp=2), Mesh(4, tp=2)], ids=str)
def test_a_state_of_another_rank_is_refused(mesh):
    def state() -> Any:
        model = Net()
        optimizer = zero1(model)
        train(model, optimizer, 1)
        return optimizer.state_dict()

    first = comm.threads.run(mesh, state)[0]

    def load() -> str:
        model = Net()
        optimizer = zero1(model)
        before = copy.deepcopy(optimizer.state_dict())
        refusal = message_of(lambda: optimizer.load_state_dict(copy.deepcopy(first)))
        assert (optimizer.state_dict() == before) == (refusal != "not refused")
        return refusal

    first_rank, *others = comm.threads.run(mesh, load)
    assert first_rank == "not refused"
    for refusal in others:
        assert "the state dict is of another rank, at {'data': [(0, " in refusal


def saved_state(folder: str, how: str) -> str:
    watch_optimizers()
    model = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1) if how == "torch's" else zero1(model)
    model(**local_batch(0)).backward()
    nxd.reduce_gradients(model, average_over_data=how == "torch's")
    optimizer.step()

    def save() -> None:
        if how == "get_optimizer_state_dict":
            set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
        else:
            dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)

    return message_of(save)


STATES = {
    "torch's": "exp_avg of parameter 0 in the state of AdamW once for all ranks",
    "ZeRO-1": "exp_avg of parameter 0 in the state of NeuronZero1Optimizer once for all ranks",
    "get_optimizer_state_dict": "not a state dict of NeuronZero1Optimizer: it lacks base_state",
}


@pytest.mark.process
@pytest.mark.parametrize("how", STATES)
def test_states_of_shards_are_refused_by_torchs_checkpoints(how, tmp_path):
    for refusal in processes(2).run(saved_state, str(tmp_path), how, mesh={"tp": 2}):
        assert STATES[how] in refusal
    for refusal in processes(2).run(saved_state, str(tmp_path), how, mesh={}):
        assert refusal == "not refused" if how == "torch's" else STATES[how] in refusal


def under_fully_shard() -> str:
    model = Net()
    fully_shard(model, mesh=DeviceMesh.from_group(parallel_state.get_data_parallel_group(), "cpu"))
    return message_of(lambda: zero1(model))


@pytest.mark.process
def test_parameters_of_fully_shard_are_refused():
    for refusal in processes(2).run(under_fully_shard, mesh={}):
        assert "NeuronZero1Optimizer: a parameter is a DTensor, which needs a torch optimizer" in refusal
