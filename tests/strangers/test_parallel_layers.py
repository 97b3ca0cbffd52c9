"""Calls of torch and others on tensor-parallel layers: the values of one process."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import parametrize

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from tests.strangers.toy import Net, average_of, batch, whole_weights
from tests.support.pool import processes

Weights = dict[str, torch.Tensor]


def trained(model: nn.Module, steps: int = 2) -> Weights:
    """Weights after SGD, and `loss`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        loss = model(**batch(step))
        loss.backward()
        nxd.reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": loss.detach().clone(), **whole_weights(model)}


def by_deepcopy() -> Weights:
    return trained(copy.deepcopy(Net()))


def by_pickle() -> Weights:
    return trained(pickle.loads(pickle.dumps(Net())))


def by_torch_save() -> Weights:
    file = io.BytesIO()
    torch.save(Net(), file)
    file.seek(0)
    return trained(torch.load(file, weights_only=False))


def by_safetensors() -> Weights:
    """Each rank has a file."""
    source, model = Net(), Net()
    with torch.no_grad():
        for param in source.parameters():
            param.mul_(1.5)
    model.load_state_dict(safetensors.torch.load(safetensors.torch.save(source.state_dict())))
    return trained(model)


def by_state_dict_on_meta() -> Weights:
    source = Net()
    with torch.device("meta"):
        model = copy.deepcopy(source).to("meta")
    model.load_state_dict(source.state_dict(), assign=True)
    return trained(model)


def by_average() -> Weights:
    return whole_weights(average_of(Net(), lambda model: trained(model, 1)))


def by_functional_call() -> Weights:
    model = Net()
    params = {name: param.detach() for name, param in model.named_parameters()}

    def loss_of(values: Weights) -> torch.Tensor:
        return torch.func.functional_call(model, values, kwargs=batch(0))

    grads, loss = torch.func.grad_and_value(loss_of)(params)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.sub_(grads[name])
    return {"loss": loss, **whole_weights(model)}


def by_autocast() -> Weights:
    model = Net(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch(0))
    loss.backward()
    return {"loss": loss.detach(), **{name: weight.float() for name, weight in whole_weights(model).items()}}


def by_profiler() -> Weights:
    with torch.profiler.profile() as profile:
        weights = trained(Net(), 1)
    assert any("linear" in event.key or "addmm" in event.key or "mm" in event.key for event in profile.key_averages())
    return weights


def halve(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def by_hooks() -> Weights:
    """Forward and backward hooks of modules, gradient hooks of parameters and of outputs."""
    model = Net()
    model.up.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    model.down.register_forward_hook(lambda module, args, output: output * 3)
    model.down.register_full_backward_hook(lambda module, grads, outputs: tuple(grad * 0.25 for grad in grads))
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 2)
        param.register_post_accumulate_grad_hook(halve)
    return trained(model)


class Scaled(nn.Module):
    """Multiplies a weight by 2."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def by_parametrization() -> Weights:
    model = Net()
    parametrize.register_parametrization(model.up, "weight", Scaled())
    parametrize.register_parametrization(model.embed, "weight", Scaled())
    weights = trained(model)
    parametrize.remove_parametrizations(model.up, "weight")
    parametrize.remove_parametrizations(model.embed, "weight")
    return {"loss": weights["loss"], **whole_weights(model)}


def by_swapping() -> Weights:
    """Swaps parameters in `module.to`, which this setting makes it do."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return trained(Net(torch.float32).double())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def by_conversion() -> Weights:
    return trained(Net(torch.float32).double())


CASES: dict[str, Callable[[], Weights]] = {
    "deepcopy": by_deepcopy,
    "pickle": by_pickle,
    "torch.save": by_torch_save,
    "safetensors": by_safetensors,
    "state dict assigned on meta": by_state_dict_on_meta,
    "EMA": by_average,
    "functional_call": by_functional_call,
    "autocast": by_autocast,
    "profiler": by_profiler,
    "hooks": by_hooks,
    "parametrize": by_parametrization,
    "swap_tensors": by_swapping,
    "to": by_conversion,
}
NOT_IN_THREADS = {"profiler", "swap_tensors"}  # they change the state of the whole process


def check(name: str, results: list[Weights]) -> None:
    with comm.as_rank(Mesh(1), 0):
        reference = CASES[name]()
    for weights in results:
        assert weights.keys() == reference.keys()
        for key, weight in weights.items():
            rtol = 2e-2 if name == "autocast" else 1e-9
            torch.testing.assert_close(weight, reference[key], rtol=rtol, atol=1e-10)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", sorted(CASES.keys() - NOT_IN_THREADS))
def test_values_are_those_of_one_process(name, tp):
    check(name, comm.threads.run(Mesh(tp, tp=tp), CASES[name]))


@pytest.mark.process
@pytest.mark.parametrize("name", sorted(NOT_IN_THREADS))
def test_on_processes(name):
    check(name, processes(2).run(CASES[name], mesh={"tp": 2}))
