"""Calls of torch and others on modules of `parallelize`: the values of one process, or a refusal by name."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from neuronx_dist import comm
from neuronx_dist.parallel_layers import parallel_state
from neuronx_dist.parallelize import ComputeConfig, build_optimizer, parallelize
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.parallelize.support import pipelines
from tests.parallelize.support.training import batch, loss_of, original, parallel, whole
from tests.strangers.test_wrappers import by_accelerate, without_torch_xla
from tests.strangers.toy import average_of, by_safetensors, by_torch_save, message_of
from tests.support.pool import processes

Weights = dict[str, torch.Tensor]
CONFIGS = [ComputeConfig(2, 2), ComputeConfig(2, 4), ComputeConfig(1, 2), ComputeConfig(4, 4)]


def name_of(config: ComputeConfig) -> str:
    return f"{config.plan_ngpus}x{config.units}"


def units_of(module: nn.Module) -> list[int]:
    """The units whose data the module sees: of the original in one process all, `alone` of them."""
    alone = getattr(module, "alone", 0)
    return [*range(alone)] or [comm.rank("dp")]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def trained(
    module: nn.Module, make: Any = sgd, steps: int = 2, clip: Any = None, build: Any = build_optimizer
) -> Weights:
    is_alone = hasattr(module, "alone")
    optimizer = make(module.parameters()) if is_alone else build(module, make)
    for step in range(steps):
        sum(loss_of(module, batch(step, unit)) for unit in units_of(module)).backward()
        if clip is not None:
            clip(optimizer, module)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(module)


def weights_of(module: nn.Module) -> Weights:
    """Complete weights; of the original its weights."""
    if hasattr(module, "alone"):
        return {name: param.detach().clone() for name, param in module.named_parameters()}
    return whole(module)


def loaded(module: nn.Module, by_file: Callable[[Weights], Weights]) -> Weights:
    trained(module, steps=1)
    state = by_file(module.state_dict())
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    module.load_state_dict(state)
    return trained(module)


def by_functional_grad(module: nn.Module) -> Weights:
    params = {name: param.detach() for name, param in module.named_parameters()}

    def loss(values: Weights) -> Any:
        units = units_of(module)
        return sum(torch.func.functional_call(module, values, (batch(0, unit),))["loss"] for unit in units)

    grads: Weights = torch.func.grad(loss)(params)
    if hasattr(module, "alone"):
        return grads
    named = dict(module.named_parameters())
    return {name: gather_full(comm.all_reduce(grad, "dp"), spec_of(named[name])) for name, grad in grads.items()}


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3]], ids=name_of)
def test_a_gradient_penalty_is_one_process(config):
    def penalised(module: nn.Module) -> Weights:
        data = batch(0, 0)
        loss = loss_of(module, {**data, "x": data["x"].requires_grad_()})
        (grad,) = torch.autograd.grad(loss, data["x"], create_graph=True)
        (loss + 10 * grad.square().sum()).backward()
        grads = {name: param for name, param in module.named_parameters() if param.grad is not None}
        return {name: gather_full(param.grad, spec_of(param)) for name, param in grads.items()}

    reference = penalised(original("parent"))
    with parallel(config, "parent") as make:
        for grads in comm.threads.run(config.mesh(), lambda: penalised(make())):
            for name, grad in grads.items():
                torch.testing.assert_close(grad, reference[name], rtol=1e-10, atol=1e-12)


def by_vmap(module: nn.Module) -> Weights:
    data = {name: torch.stack([value, value * 2]) for name, value in batch(0, 0).items()}
    return {"losses": torch.vmap(lambda data: loss_of(module, data))(data)}


def by_autocast(module: nn.Module) -> Weights:
    with torch.autocast("cpu", torch.bfloat16):
        return {"loss": loss_of(module, batch(0, 0)).detach()}


def scaled(module: nn.Module, args: Any, result: Any) -> Any:
    return {**result, "loss": result["loss"] * 3}


def by_hooks(module: nn.Module) -> Weights:
    """Hooks of the module and of gradients."""
    module.register_forward_hook(scaled)
    for param in module.parameters():
        param.register_hook(lambda grad: grad * 2)
    return trained(module)


class Doubled(nn.Module):
    """Multiplies a weight by 2."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def by_parametrization(module: Any) -> Weights:
    parametrize.register_parametrization(module.layers[0], "weight", Doubled())
    trained(module)
    parametrize.remove_parametrizations(module.layers[0], "weight")
    return weights_of(module)


CASES: dict[str, Callable[[nn.Module], Weights]] = {
    "SGD": trained,
    "AdamW, foreach": lambda module: trained(module, lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True)),
    "deepcopy": lambda module: trained(copy.deepcopy(module)),
    "deepcopy after a step": lambda module: (trained(module, steps=1), trained(copy.deepcopy(module)))[1],
    "torch.save": lambda module: loaded(module, by_torch_save),
    "safetensors": lambda module: loaded(module, by_safetensors),
    "EMA": lambda module: weights_of(average_of(module, lambda module: trained(module, steps=1))),
    "torch.func.grad": by_functional_grad,
    "vmap": by_vmap,
    "autocast": by_autocast,
    "hooks": by_hooks,
    "parametrization": by_parametrization,
    "to": lambda module: trained(module.float().double()),
}


@pytest.mark.each_value
@pytest.mark.parametrize("config", CONFIGS[:3], ids=name_of)
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_one_process(name, config):
    module = original()
    module.alone = config.units
    reference = CASES[name](module)
    with parallel(config) as make:
        for weights in comm.threads.run(config.mesh(), lambda: CASES[name](make())):
            for key, weight in weights.items():
                rtol = 2e-2 if name == "autocast" else 1e-9
                torch.testing.assert_close(weight, reference[key], rtol=rtol, atol=rtol / 10)


def plain(module: nn.Module, make: Any) -> torch.optim.Optimizer:
    return make(module.parameters())


def step_of(optimizer_class: Any) -> Callable[[Any], Any]:
    return lambda module: trained(module, lambda params: optimizer_class(params, lr=0.01), build=plain)


def clip(optimizer: Any, module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.01)


UNITS = r"parameters are of a Pair on 2 units, whose gradients are not summed.*build_optimizer\(module"


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("config", CONFIGS[1:3], ids=name_of)
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_a_plain_optimizer_on_several_units_is_refused(optimizer_class, config, copied):
    def train() -> None:
        module = make()
        module = copy.deepcopy(module).float().double() if copied else module
        before = weights_of(module)
        for refusal in [message_of(lambda: step_of(optimizer_class)(module))] * 2:
            assert re.search(UNITS, refusal), refusal
        assert all(map(torch.equal, before.values(), weights_of(module).values()))

    with parallel(config) as make:
        comm.threads.run(config.mesh(), train)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3]], ids=name_of)
def test_a_plain_optimizer_on_one_unit_is_right(config):
    module = original()
    module.alone = 1
    reference = trained(module)
    with parallel(config) as make:
        for weights in comm.threads.run(config.mesh(), lambda: step_of(torch.optim.SGD)(make())):
            for key, weight in weights.items():
                torch.testing.assert_close(weight, reference[key], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("copies", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda copies: copies.__name__)
@pytest.mark.parametrize("config", [*CONFIGS[:2], ComputeConfig(1, 2, use_zero=True)], ids=["2x1", "2x2", "1x2, ZeRO"])
def test_copies_of_the_optimizer_are_refused(config, copies):
    """A copy would have the state, without the module whose gradients are summed."""
    with parallel(config) as make:
        for refusal in comm.threads.run(
            config.mesh(), lambda: message_of(lambda: copies(build_optimizer(make(), sgd)))
        ):
            assert re.search(r"Parallel\w+ cannot be pickled or copied: call build_optimizer of the other", refusal), (
                refusal
            )


@pytest.mark.parametrize(
    "config, message",
    [
        (CONFIGS[0], "gradients are shards, of 2"),
        (CONFIGS[1], r"gradients are shards, of 2.*call clip_gnorm\(max_norm\) of the optimizer that build_optimizer"),
        (CONFIGS[2], "gradients are not summed over the 2 units.*call clip_gnorm"),
    ],
    ids=["2x1", "2x2", "1x2"],
)
def test_clipping_is_refused(config, message):
    with parallel(config) as make:
        for refusal in comm.threads.run(config.mesh(), lambda: message_of(lambda: trained(make(), clip=clip))):
            assert re.search(message, refusal), refusal


def test_clipping_of_summed_gradients_is_torchs():
    def clip_summed(optimizer: Any, module: nn.Module) -> None:
        getattr(optimizer, "sync_shard_grad", lambda: None)()
        clip(optimizer, module)

    module, config = original(), CONFIGS[2]
    module.alone = config.units
    reference = trained(module, clip=clip_summed)
    with parallel(config) as make:
        for weights in comm.threads.run(config.mesh(), lambda: trained(make(), clip=clip_summed)):
            for key, weight in weights.items():
                torch.testing.assert_close(weight, reference[key], rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_clipping_of_a_stage_is_refused(tmp_path):
    config = pipelines.config(2, pipeline_nstages=2)

    def run() -> str:
        sample = {"data": pipelines.samples("gpt", 1)[0]}
        module = parallelize(pipelines.module("gpt"), sample, "pp", config, gen_savedir=tmp_path)
        module.train_step(pipelines.samples("gpt", 4))
        with pytest.raises(RuntimeError, match="train_step and infer_step do not call forward"):
            module.register_forward_hook(scaled)
        assert 0 < len([*module.parameters()]) < len(module.parameter_names())
        return message_of(lambda: nn.utils.clip_grad_norm_(module.parameters(), 0.1))

    for refusal in comm.threads.run(config.mesh(2), run):
        assert re.search("the model has 2 pipeline stages.*call clip_gnorm", refusal), refusal


HOOKS = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
]


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_layers_are_refused(name):
    """No code calls a layer: its weights are used."""

    def register() -> str:
        layer: Any = make().layers[1]
        return message_of(lambda: getattr(layer, name)(lambda *args: None))

    with parallel(CONFIGS[0]) as make:
        for refusal in comm.threads.run(CONFIGS[0].mesh(), register):
            assert f"{name}: the emitted forward uses the weights of a layer" in refusal
            assert "Register it on the original module, before parallelize" in refusal


class Outer(nn.Module):
    """A plain layer before a parallel module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8).double()
        self.inner = inner


def wrapped(wrapper: str, config: ComputeConfig, is_inside: bool) -> str:
    with parallel(config) as make:
        module: nn.Module = Outer(make()) if is_inside else make()
        group = parallel_state.get_data_parallel_group()
        calls: dict[str, Callable[[], Any]] = {
            "ddp": lambda: DistributedDataParallel(module, process_group=group),
            "fsdp1": lambda: FullyShardedDataParallel(
                module, process_group=group, device_id=torch.device("cpu"), use_orig_params=True
            ),
            "fully_shard": lambda: fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu")),
            "accelerate": lambda: by_accelerate(module),
        }
        return message_of(calls[wrapper])


@pytest.mark.process
@pytest.mark.each_pair
@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2]], ids=name_of)
@pytest.mark.parametrize(
    "wrapper", ["ddp", "fsdp1", "fully_shard", pytest.param("accelerate", marks=without_torch_xla)]
)
def test_wrappers_are_refused(wrapper, config, is_inside):
    for refusal in processes(2).run(wrapped, wrapper, config, is_inside, mesh={"tp": config.plan_ngpus}):
        assert re.search("around a (Pair|ParallelModule): gradients are summed over the units by the", refusal), refusal


def saved_by_dcp(folder: str) -> str:
    with parallel(CONFIGS[0]) as make:
        module = make()
        return message_of(lambda: dcp.save({"model": module.state_dict()}, checkpoint_id=folder))


@pytest.mark.process
def test_shards_are_refused_by_torchs_checkpoints(tmp_path):
    for refusal in processes(2).run(saved_by_dcp, str(tmp_path), mesh={"tp": 2}):
        assert "layers.0.weight once for all ranks" in refusal
