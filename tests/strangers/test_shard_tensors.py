"""Calls of torch and others on sharded ShardTensor parameters: the values of one process, or a refusal by name."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from neuronx_dist.shard_tensor import DeviceMesh, Replicate, Shard, ShardTensor, distribute_module
from neuronx_dist.shard_tensor import distribute_tensor as distribute
from tests.shard_tensor.support.cases import assert_close, on_ranks
from tests.support.pool import processes

Weights = dict[str, torch.Tensor]


def drawn(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The model of one process."""
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in module.parameters():
            x.copy_(torch.randn(x.shape, generator=generator, dtype=dtype))
    return module


def model(mesh: DeviceMesh | None, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The model with rows of the first weight and columns of the second one over a mesh, in uneven shards."""
    module = drawn(dtype)
    if mesh is None:
        return module
    parts = mesh.size()

    def split(name: str, layer: nn.Module, mesh: DeviceMesh) -> None:
        if isinstance(layer, nn.Linear):
            dim = 0 if name == "0" else 1
            sizes = [(7 - (parts - 1) * 2, *[2] * (parts - 1))]
            layer.weight = nn.Parameter(distribute(layer.weight.detach(), mesh, [Shard(dim)], sizes=sizes, src=None))

    return distribute_module(module, mesh, split)


def loss_of(module: nn.Module, step: int = 0) -> torch.Tensor:
    dtype = next(module.parameters()).dtype
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)
    return module(x).square().mean()


def values(module: nn.Module) -> Weights:
    return {
        name: (x.full_tensor() if isinstance(x, ShardTensor) else x).detach().clone()
        for name, x in module.named_parameters()
    }


def trained(module: nn.Module, make: Any = None, steps: int = 3, clip: float | None = None) -> Weights:
    make = make or (lambda params: torch.optim.SGD(params, lr=0.1))
    optimizer = make(module.parameters())
    for step in range(steps):
        loss_of(module, step).backward()
        if clip is not None:
            clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return values(module)


def by_torch_save(module: nn.Module) -> Weights:
    """The state dict and the module, in files."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for x in other.parameters():
            x.mul_(0)
    other.load_state_dict(loaded.state_dict())
    return trained(other)


def by_average(module: nn.Module) -> Weights:
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        trained(module, steps=1)
        averaged.update_parameters(module)
    return values(averaged.module)


def by_functional_call(module: nn.Module) -> Weights:
    params = {name: x.detach() for name, x in module.named_parameters()}

    def loss(values: Weights) -> torch.Tensor:
        x = torch.ones(4, 5, dtype=torch.float64)
        return torch.func.functional_call(module, values, (x,)).square().mean()

    result = loss({name: x.requires_grad_() for name, x in params.items()})
    result.backward()
    return {name: (x.grad.full_tensor() if isinstance(x.grad, ShardTensor) else x.grad) for name, x in params.items()}


def by_penalty(module: nn.Module) -> Weights:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    loss = module(x).square().mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + 10 * grad.square().sum()).backward()
    grads = {name: param.grad for name, param in module.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, ShardTensor) else grad for name, grad in grads.items()}


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": torch.func.grad(lambda x: (x @ x.T).softmax(0).log().mean()),
    "vmap of rows": torch.vmap(lambda row: row.softmax(0) * 2),
    "vmap of columns": torch.vmap(lambda column: column.sum() + column, in_dims=1),
    "vmap of grad": torch.vmap(torch.func.grad(lambda column: column.square().exp().mean()), in_dims=1),
    "vjp": lambda x: torch.func.vjp(torch.exp, x)[1](x)[0],
    "jacrev": torch.func.jacrev(lambda x: x.square().sum(0)),
    "autograd's jacobian": lambda x: torch.autograd.functional.jacobian(lambda x: x.square().sum(0), x),
}


def by_functional_grad(module: nn.Module) -> Weights:
    params = {name: x.detach() for name, x in module.named_parameters()}
    grads = torch.func.grad(
        lambda values: torch.func.functional_call(module, values, (torch.ones(4, 5).double(),)).square().mean()
    )(params)
    return {name: x.full_tensor() if isinstance(x, ShardTensor) else x for name, x in grads.items()}


def by_autocast(module: nn.Module) -> Weights:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(module)
    loss.backward()
    return {
        name: (x.grad.full_tensor() if isinstance(x.grad, ShardTensor) else x.grad)
        for name, x in module.named_parameters()
    }


def by_hooks(module: nn.Module) -> Weights:
    module[0].register_forward_hook(lambda layer, args, output: output * 3)
    module[2].register_forward_pre_hook(lambda layer, args: (args[0] * 0.5,))
    for x in module.parameters():
        x.register_hook(lambda grad: grad * 2)
    return trained(module)


class Doubled(nn.Module):
    """Multiplies a weight by 2."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def by_parametrization(module: nn.Module) -> Weights:
    parametrize.register_parametrization(module[0], "weight", Doubled())
    return trained(module)


def optimizer(name: str, **options: Any) -> Callable[[nn.Module], Weights]:
    return lambda module: trained(module, lambda params: getattr(torch.optim, name)(params, lr=0.1, **options))


CASES: dict[str, Callable[[Any], Weights]] = {
    "SGD": optimizer("SGD", momentum=0.9),
    "SGD, foreach": optimizer("SGD", foreach=True),
    "Adam": optimizer("Adam"),
    "AdamW, foreach": optimizer("AdamW", foreach=True),
    "AdamW, fused": optimizer("AdamW", fused=True),
    "RMSprop": optimizer("RMSprop"),
    "Adagrad": optimizer("Adagrad"),
    "clip_grad_norm_": lambda module: trained(module, clip=0.1),
    "deepcopy": lambda module: trained(copy.deepcopy(module)),
    "pickle": lambda module: trained(pickle.loads(pickle.dumps(module))),
    "torch.save": by_torch_save,
    "EMA": by_average,
    "functional_call": by_functional_call,
    "torch.func.grad": by_functional_grad,
    "gradient penalty": by_penalty,
    "hooks": by_hooks,
    "to": lambda module: trained(module.float().double()),
}


@pytest.mark.each_value
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_one_process(name, ranks):
    reference = CASES[name](model(None))
    for weights in on_ranks(ranks, lambda mesh: CASES[name](model(mesh))):
        assert weights.keys() == reference.keys()
        for key, x in reference.items():
            assert_close(weights[key], x, f"{key} after {name}")


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_sharded_tensors(name):
    def run(mesh: DeviceMesh) -> torch.Tensor:
        x = distribute(whole, mesh, [Shard(0)], sizes=[(4, 2)], src=None)
        result: torch.Tensor = TRANSFORMS[name](x).full_tensor()
        return result

    whole = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for result in on_ranks(2, run):
        assert_close(result, TRANSFORMS[name](whole), name)


def test_parametrizations_are_refused():
    def run(mesh: DeviceMesh) -> None:
        with pytest.raises(NotImplementedError, match="set_.* has no handler and writes in place"):
            by_parametrization(model(mesh))

    on_ranks(2, run)


ADDRESSES: dict[str, Callable[[ShardTensor], Any]] = {
    "data_ptr": lambda x: x.data_ptr(),
    "untyped_storage": lambda x: x.untyped_storage(),
    "storage": lambda x: x.storage(),
    "safetensors": lambda x: safetensors.torch.save({"x": x}),
    "frombuffer": lambda x: (ctypes.c_char * (x.numel() * 8)).from_address(x.data_ptr()),
}


@pytest.mark.parametrize("name", ADDRESSES)
def test_the_memory_of_a_shard_is_not_that_of_the_whole(name):
    def run(mesh: DeviceMesh) -> None:
        x = distribute(torch.arange(12.0).view(6, 2), mesh, [Shard(0)], src=None)
        with pytest.raises(RuntimeError, match=r"no rank has the memory of a ShardTensor of shape \(6, 2\).*to_local"):
            ADDRESSES[name](x)

    on_ranks(2, run)


def test_whole_values_are_gathered():
    def run(mesh: DeviceMesh) -> None:
        whole = torch.arange(12.0).view(6, 2)
        x = distribute(whole, mesh, [Shard(0)], src=None)
        assert x.numpy().tolist() == x.__array__().tolist() == x.tolist() == whole.tolist()
        assert torch.from_dlpack(x).equal(whole)
        y = distribute(whole, mesh, [Replicate()], src=None)
        assert y.data_ptr() == y.to_local().data_ptr()

    on_ranks(2, run)


def collective(name: str) -> str:
    mesh = DeviceMesh.from_axes(("tp",))
    x = distribute(torch.arange(8.0).view(4, 2), mesh, [Shard(0)], src=None)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "all_gather": lambda: dist.all_gather([torch.empty(2, 2) for _ in range(2)], x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(4, 2), x),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(1, 2), x),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(2, 2), x),
        "send": lambda: dist.send(x, 1),
        "scatter": lambda: dist.scatter(x, None),
        "gather": lambda: dist.gather(x, None),
    }
    try:
        calls[name]()
    except (ValueError, NotImplementedError) as error:
        assert x.full_tensor().equal(torch.arange(8.0).view(4, 2))
        return str(error)
    return "not refused"


COLLECTIVES = ["all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"]
COLLECTIVES += ["all_to_all_single", "send", "scatter", "gather"]


@pytest.mark.process
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_of_torch_refuse_shards(name):
    for message in processes(2).run(collective, name, mesh={"tp": 2}):
        assert "x.redistribute() and x.full_tensor() communicate by the layout" in message


def wrapped(wrapper: str, sharded: bool) -> tuple[str, Weights]:
    """The refusal, or weights after SGD on two halves of each batch, over dp."""
    mesh = DeviceMesh.from_axes(("dp", "tp"))
    module: nn.Module = distribute_module(model(mesh["tp"]), mesh["tp"]) if sharded else drawn()
    try:
        if wrapper == "ddp":
            module = DistributedDataParallel(module, device_mesh=mesh["dp"])
        elif wrapper == "fsdp1":
            module = FullyShardedDataParallel(
                module, device_mesh=mesh["dp"], device_id=torch.device("cpu"), use_orig_params=True
            )
        else:
            fully_shard(module, mesh=mesh["dp"])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            module(x.chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except (RuntimeError, ValueError) as error:
        return str(error), {}
    if wrapper == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(module):
            return "", {name.replace("_fsdp_wrapped_module.", ""): x.clone() for name, x in module.named_parameters()}
    named = {name.replace("module.", ""): x for name, x in module.named_parameters()}
    return "", {
        name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone() for name, x in named.items()
    }


WRAPPERS = ["ddp", "fsdp1", "fully_shard"]


@pytest.mark.process
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_data_parallelism(wrapper, sharded):
    """Compares plain parameters, and ShardTensors over the ranks of another dim, with one process."""
    reference = trained(drawn())
    for message, weights in processes(4).run(wrapped, wrapper, sharded, mesh={"tp": 2}):
        if sharded and wrapper == "fsdp1":
            assert "FullyShardedDataParallel of a ShardTensor: use fully_shard" in message
            continue
        assert not message and weights.keys() == reference.keys()
        for key, x in reference.items():
            assert_close(weights[key], x, key)
