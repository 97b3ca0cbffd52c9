"""Calls of torch and others on pipeline models: the values of one process, or a refusal by name."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import parallel_state
from tests.strangers.test_wrappers import by_accelerate, without_torch_xla
from tests.strangers.toy import by_safetensors, by_torch_save, message_of
from tests.support.pool import processes

Weights = dict[str, torch.Tensor]
HIDDEN, BATCH = 6, 8
MESHES = [Mesh(2, pp=2), Mesh(4, pp=2), Mesh(4, pp=4)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Stages(nn.Module):
    """Layers between two linear layers of one weight, and a loss."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.last.weight = self.first.weight
        self.to(dtype)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


def pipeline(
    prepare: Callable[[Any], Any] = lambda model: None, module: nn.Module | None = None, **options: Any
) -> Any:
    """A pipeline model; `prepare` gets the module before."""
    module = Stages() if module is None else module
    prepare(module)
    return nxd.NxDPPModel(
        module,
        transformer_layer_cls=Block,
        num_microbatches=2,
        auto_partition=True,
        input_names=["x"],
        output_loss_value_spec=True,
    )


def local_batch(step: int) -> torch.Tensor:
    x = torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x.chunk(comm.size("dp"))[comm.rank("dp")]


def ran(model: Any) -> Any:
    """The model after a batch, without gradients."""
    model.run_train(x=local_batch(0))
    model.zero_grad()
    return model


def weights_of(model: Any) -> Weights:
    named = model.local_named_parameters()
    return {name.replace("last", "first"): param.detach().clone() for name, param in named}


def trained(model: Any, make: Any = None, steps: int = 2, clip: Any = None) -> Weights:
    make = make or (lambda params: torch.optim.SGD(params, lr=0.1))
    optimizer = make(list(ran(model).local_parameters()))
    for step in range(steps):
        model.run_train(x=local_batch(step))
        if clip is not None:
            clip(list(model.local_parameters()), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def loaded(by_file: Callable[[Weights], Weights]) -> Weights:
    source, model = pipeline(), pipeline()
    trained(source, steps=1)
    model.load_state_dict(by_file(source.state_dict()))
    return trained(model)


def by_average() -> Weights:
    model = ran(pipeline())
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        trained(model, steps=1)
        averaged.update_parameters(model)
    return weights_of(averaged.module)


def by_autocast() -> Weights:
    model = pipeline()
    with torch.autocast("cpu", torch.bfloat16):
        model.run_train(x=local_batch(0))
    return {name.replace("last", "first"): param.grad for name, param in model.local_named_parameters()}


def by_profiler() -> Weights:
    with torch.profiler.profile():
        return trained(pipeline())


def hooks(model: Any) -> None:
    model.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    model.layers[1].linear.register_full_backward_hook(lambda module, grads, outputs: tuple(x * 0.25 for x in grads))
    model.layers[2].register_full_backward_pre_hook(lambda module, grads: tuple(grad * 2 for grad in grads))
    model.layers[3].linear.register_forward_hook(lambda module, args, output: output * 3)


def gradient_hooks(model: nn.Module) -> None:
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 2)


def after(model: Any, change: Callable[[Any], Any]) -> Any:
    change(model)
    return model


class Doubled(nn.Module):
    """Multiplies a weight by 2."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.layers[0].linear, "weight", Doubled())
    parametrizations.weight_norm(model.layers[3].linear)


def by_swapping() -> Weights:
    """Swaps parameters in `module.to`, which this setting makes it do."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return trained(ran(pipeline(module=Stages(torch.float32))).double())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def optimizer(name: str, **options: Any) -> Callable[[], Weights]:
    return lambda: trained(pipeline(), lambda params: getattr(torch.optim, name)(params, lr=0.1, **options))


CASES: dict[str, Callable[[], Weights]] = {
    "SGD": optimizer("SGD", momentum=0.9),
    "AdamW": optimizer("AdamW"),
    "Adafactor": optimizer("Adafactor"),
    "clip_grad_value_": lambda: trained(pipeline(), clip=nn.utils.clip_grad_value_),
    "deepcopy": lambda: trained(copy.deepcopy(pipeline())),
    "deepcopy after a step": lambda: trained(copy.deepcopy(ran(pipeline()))),
    "torch.save": lambda: loaded(by_torch_save),
    "safetensors": lambda: loaded(by_safetensors),
    "EMA": by_average,
    "autocast": by_autocast,
    "hooks": lambda: trained(pipeline(hooks)),
    "hooks after a step": lambda: trained(after(ran(pipeline()), hooks)),
    "hooks of gradients": lambda: trained(pipeline(gradient_hooks)),
    "parametrizations": lambda: trained(pipeline(parametrized)),
    "parametrizations after a step": lambda: trained(after(ran(pipeline()), parametrized)),
    "to": lambda: trained(ran(pipeline(module=Stages(torch.float32))).double()),
    "torch.compile": lambda: trained(torch.compile(pipeline(), backend="eager")),  # run_train is the module's
}
ON_PROCESSES = {"profiler": by_profiler, "swap_tensors": by_swapping}  # they change the state of the process


def check(case: Callable[[], Weights], results: list[Weights]) -> None:
    with comm.as_rank(Mesh(1), 0):
        reference = case()
    assert {name for weights in results for name in weights} == reference.keys()
    for weights in results:
        for name, weight in weights.items():
            rtol = 2e-2 if case is by_autocast else 1e-9
            torch.testing.assert_close(weight, reference[name], rtol=rtol, atol=rtol / 10)


@pytest.mark.slow  # together more than the fast tier has room for
@pytest.mark.each_value
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_one_process(name, mesh):
    check(CASES[name], comm.threads.run(mesh, CASES[name]))


@pytest.mark.process
@pytest.mark.parametrize("name", ON_PROCESSES)
def test_on_processes(name):
    check(ON_PROCESSES[name], processes(4).run(ON_PROCESSES[name], mesh={"pp": 2}))


def lbfgs() -> None:
    model = ran(pipeline())
    torch.optim.LBFGS(model.local_parameters()).step(lambda: model.run_train(x=local_batch(0)))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "LBFGS": (lbfgs, "LBFGS cannot work on some of the parameters: it takes inner products over all parameters"),
    "clip_grad_norm_": (
        lambda: trained(pipeline(), clip=nn.utils.clip_grad_norm_),
        r"the model has 2 pipeline stages.*call neuronx_dist.clip_grad_norm\(parameters, max_norm\)",
    ),
    "functional_call": (
        lambda: torch.func.functional_call(pipeline(), {}, (local_batch(0),)),
        r"a pipeline model cannot be called: use run_train\(\*\*inputs\)",
    ),
    "vmap": (lambda: torch.vmap(pipeline())(local_batch(0)), "a pipeline model cannot be called"),
    "pickle": (lambda: pickle.dumps(pipeline()), r"belongs to the processes of this job.*save the state_dict\(\)"),
    "torch.save": (lambda: torch.save(ran(pipeline()), io.BytesIO()), "belongs to the processes of this job"),
}


@pytest.mark.each_value
@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name, mesh):
    call, message = REFUSED[name]
    for refusal in comm.threads.run(mesh, lambda: message_of(call)):
        assert re.search(message, refusal), refusal


def data_group() -> Any:
    return parallel_state.get_data_parallel_group()


def fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        module, process_group=data_group(), device_id=torch.device("cpu"), use_orig_params=True
    )


def by_fully_shard(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=DeviceMesh.from_group(data_group(), "cpu"))


def fsdp1_layers(module: Any) -> None:
    for number, layer in enumerate(module.layers):
        module.layers[number] = fsdp1(layer)


def fully_shard_layers(module: Any) -> None:
    for layer in module.layers:
        by_fully_shard(layer)


AROUND = r"around a \w*: run_train calls the layers of a stage"
INSIDE = r"(layers.0|the model) is wrapped in \w*, whose communication would be recorded"
WRAPPED: dict[str, tuple[Callable[[], Any], str]] = {
    "ddp": (
        lambda: DistributedDataParallel(ran(pipeline()), process_group=data_group()),
        AROUND + "|module parameters locate in",  # torch's: layers of other stages are on meta
    ),
    "fsdp1": (lambda: fsdp1(ran(pipeline())), AROUND),
    "fully_shard": (lambda: by_fully_shard(ran(pipeline())), AROUND),
    "accelerate": (lambda: by_accelerate(ran(pipeline())), AROUND + "|module parameters locate in"),
    "ddp before": (
        lambda: pipeline(module=DistributedDataParallel(Stages(), process_group=data_group())),
        INSIDE,
    ),
    "fsdp1 of layers": (lambda: pipeline(fsdp1_layers), INSIDE),
    "fully_shard of layers": (lambda: pipeline(fully_shard_layers), INSIDE),
    "fully_shard of layers after a step": (
        lambda: trained(after(ran(pipeline()), fully_shard_layers)),
        INSIDE,
    ),
}


def refusal_of_wrapper(name: str) -> str:
    return message_of(WRAPPED[name][0])


@pytest.mark.process
@pytest.mark.parametrize("degrees", [{"pp": 2}, {"pp": 1}], ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[without_torch_xla] * (name == "accelerate")) for name in WRAPPED]
)
def test_wrappers_are_refused(name, degrees):
    for refusal in processes(2).run(refusal_of_wrapper, name, mesh=degrees):
        assert re.search(WRAPPED[name][1], refusal), refusal


def by_dcp(folder: str, of_torch: bool) -> Weights:
    source, model = pipeline(), pipeline()
    trained(source, steps=1)
    trained(model, steps=2)
    dcp.save(get_model_state_dict(source) if of_torch else source.state_dict(), checkpoint_id=folder)
    state = get_model_state_dict(model) if of_torch else model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    if of_torch:
        set_model_state_dict(model, state)
    else:
        model.load_state_dict(state)
    return weights_of(model)


@pytest.mark.process
@pytest.mark.parametrize("of_torch", [False, True])
def test_torchs_checkpoints_hold_all_stages(of_torch, tmp_path):
    results = processes(4).run(by_dcp, str(tmp_path), of_torch, mesh={"pp": 2})
    check(lambda: trained(pipeline(), steps=1), results)
