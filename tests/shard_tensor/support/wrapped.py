"""Wrappers of others around a model with ShardTensors: each row of docs/shard-tensor-wrappers.md as a function.

A row trains the model of a column, or computes with it, and returns tensors by name. It runs on all ranks of the
column, and once on a plain model in one process, to whose tensors those of each rank are equal.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import neuronx_dist as nxd
from neuronx_dist.optimizer import NeuronZero1Optimizer
from neuronx_dist.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_dist.shard_tensor import DeviceMesh, Replicate, Shard, distribute_module, distribute_tensor
from neuronx_dist.shard_tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

__all__ = ["COLUMNS", "ROWS", "Job", "ranks_of", "values_of"]

Values = dict[str, torch.Tensor]
COLUMNS = ("inputs", "distribute_module", "styles", "styles, 2-D")
PREFIXES = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.")


class Net(nn.Module):
    """A norm, and two linear layers with features that 2 ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 7), nn.Linear(7, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


def batch(step: int) -> torch.Tensor:
    """Batch of a step, `[4, 6, 6]`: rows, sequence, features."""
    return torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


class Job:
    """A column on this rank: a model, and where its data lies.

    Args:
        column: None: one process.
        wrapped: whether the row brings a data-parallel wrapper; else "styles, 2-D" takes `fully_shard`.

    Attributes:
        mesh: (dp, tp), or (tp,) of "styles"; ShardTensors are on tp.
        data: ranks with other rows of a batch.
    """

    def __init__(self, column: str | None, wrapped: bool) -> None:
        self.column, self.wrapped = column, wrapped
        self.mesh: Any = None
        self.data: Any = None
        if column is not None:
            has_data = column == "styles, 2-D" or (wrapped and column != "styles")
            self.mesh = DeviceMesh.from_axes(("dp", "tp") if has_data else "tp")
            self.data = self.mesh["dp"] if has_data else None
        self.model = self.parallel(Net())

    def parallel(self, model: Net) -> Net:
        """Makes parameters ShardTensors."""
        if self.column == "distribute_module":
            distribute_module(model, self.mesh["tp"], split)
        elif self.column is not None and self.column.startswith("styles"):
            split_sequence = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
            parallelize_module(model, self.mesh["tp"], {"norm": split_sequence})
            up = ColwiseParallel(input_layouts=Shard(1))
            parallelize_module(
                model, self.mesh["tp"], {"norm": SequenceParallel(), "up": up, "down": RowwiseParallel()}
            )
        return model

    def sharded(self, model: nn.Module, mesh: Any = None) -> nn.Module:
        """Calls `fully_shard` over the data-parallel ranks, if that is part of the column."""
        if mesh is not None or (self.column == "styles, 2-D" and not self.wrapped):
            mesh = mesh or self.mesh["dp"]
            for layer in (model.up, model.down):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    def input(self, step: int) -> torch.Tensor:
        x = batch(step)
        return x if self.data is None else x.chunk(2)[self.data.get_local_rank()].contiguous()

    def laid_out(self, x: torch.Tensor) -> torch.Tensor:
        """Makes an input a ShardTensor, if that is the column."""
        return distribute_tensor(x, self.mesh["tp"], [Shard(1)], sizes=[(4, 2)]) if self.column == "inputs" else x

    def train(
        self,
        model: nn.Module,
        forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
        optimizer: Any = None,
        clip: float | None = None,
        after: Callable[[], Any] = lambda: None,
    ) -> Values:
        """Three steps; returns losses, gradients and weights."""
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        losses = {}
        for step in range(3):
            optimizer.zero_grad()
            loss = (model if forward is None else forward)(self.laid_out(self.input(step))).square().mean()
            loss.backward()
            losses[f"loss {step}"] = self.mean(loss)
            if clip is not None:
                losses[f"norm {step}"] = clip_grad_norm_(model.parameters(), clip)
            grads = {f"gradient of {name}": x.grad for name, x in named(model)}
            optimizer.step()
            after()
        return {**losses, **{name: x for name, x in grads.items() if x is not None}, **dict(named(model))}

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        loss = whole(loss).clone()
        if self.data is not None:
            torch.distributed.all_reduce(loss, group=self.data.get_group())
            loss /= 2
        return loss


def split(name: str, layer: nn.Module, mesh: DeviceMesh) -> None:
    """Shards the first linear layer by rows and the second one by columns, unevenly."""
    if isinstance(layer, nn.Linear):
        placement = Shard(0) if name == "up" else Shard(1)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [placement], sizes=[(5, 2)]))


def whole(x: Any) -> torch.Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()


def named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters by the names that they have in the plain model."""
    result = []
    for name, x in model.named_parameters():
        for prefix in PREFIXES:
            name = name.replace(prefix, "")
        result.append((name, x))
    return result


# --- data-parallel wrappers


def ddp(job: Job) -> Values:
    if job.mesh is None:
        return job.train(job.model)
    return job.train(DistributedDataParallel(job.model, device_mesh=job.data or job.mesh))


def fsdp1(job: Job) -> Values:
    if job.mesh is None:
        return job.train(job.model)
    model = FullyShardedDataParallel(
        job.model, device_mesh=job.data or job.mesh, use_orig_params=True, device_id=torch.device("cpu")
    )
    losses = {name: x for name, x in job.train(model).items() if name.startswith("loss")}
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return {
            **losses,
            **{name: x.detach().clone() for name, x in named(model)},
            **{f"gradient of {name}": x.grad.clone() for name, x in named(model)},
        }


def fully(job: Job) -> Values:
    return job.train(job.model if job.mesh is None else job.sharded(job.model, job.data or job.mesh))


def fully_of_torch(job: Job) -> Values:
    return job.train(job.model if job.mesh is None else job.sharded(job.model, (job.data or job.mesh).to_torch()))


def hybrid(job: Job) -> Values:
    """HSDP: over a mesh of two dims, 2 ranks that replicate and 1 that shards."""
    if job.mesh is None:
        return job.train(job.model)
    data = (job.data or job.mesh).to_torch()
    return job.train(job.sharded(job.model, data._unflatten(0, (2, 1), ("replicate", "shard"))))


def fully_mixed(job: Job) -> Values:
    """Products in bfloat16, gradients reduced in float32."""
    model = job.model.float()
    if job.mesh is not None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=job.data or job.mesh, mp_policy=policy)
    return job.train(model, lambda x: model(x.float()).float())


def zero1(job: Job) -> Values:
    params = job.model.parameters()
    optimizer = None if job.mesh is None else NeuronZero1Optimizer(params, torch.optim.SGD, lr=0.1, grad_clipping=False)
    values = job.train(job.model, optimizer=optimizer)
    return {name: x for name, x in values.items() if not name.startswith("gradient")}


def parallel_layers(job: Job) -> Values:
    """Layers of this package over dp, beside ShardTensors on tp."""
    if job.mesh is not None:
        group = (job.data or job.mesh).communicator()
        up = ColumnParallelLinear(6, 8, gather_output=False, tensor_model_parallel_group=group, dtype=torch.float64)
        down = RowParallelLinear(8, 4, input_is_parallel=True, tensor_model_parallel_group=group, dtype=torch.float64)
        place = group.rank
    else:
        up, down = nn.Linear(6, 8).double(), nn.Linear(8, 4).double()
    with torch.no_grad():
        for layer, shape, dim in ((up, (8, 6), 0), (down, (4, 8), 1)):
            x = torch.linspace(-1, 1, shape[0] * shape[1], dtype=torch.float64).view(shape)
            layer.weight.copy_(x if job.mesh is None else x.chunk(2, dim)[place])
            layer.bias.zero_()
    x = job.laid_out(batch(0))
    y = down(F.gelu(up(job.model.norm(x))))
    loss = y.square().mean()
    loss.backward()
    return {"loss": loss, "gradient": job.model.norm.weight.grad, "bias": down.bias.grad}


# --- what recomputes, compiles and casts


def checkpointed(job: Job) -> Values:
    model = job.sharded(job.model)
    return job.train(model, lambda x: checkpoint(model, x, use_reentrant=False))


def checkpointed_reentrant(job: Job) -> Values:
    model = job.sharded(job.model)
    return job.train(model, lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=True))


def checkpoint_wrapped(job: Job) -> Values:
    for name in ("norm", "up", "down"):
        setattr(job.model, name, checkpoint_wrapper(getattr(job.model, name), preserve_rng_state=False))
    return job.train(job.sharded(job.model))


def compiled(job: Job) -> Values:
    torch.compiler.reset()
    model = job.sharded(job.model)
    return job.train(model, torch.compile(model, backend="aot_eager"))


def compiled_blocks(job: Job) -> Values:
    torch.compiler.reset()
    for name in ("norm", "up", "down"):
        getattr(job.model, name).compile(backend="aot_eager")
    return job.train(job.sharded(job.model))


def compiled_fullgraph(job: Job) -> Values:
    torch.compiler.reset()
    model = job.sharded(job.model)
    return job.train(model, torch.compile(model, backend="aot_eager", fullgraph=True))


def autocast(job: Job) -> Values:
    model = job.sharded(job.model.float())

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x.float())

    return job.train(model, forward)


def scaled(job: Job) -> Values:
    """Scaled gradients, one of which is infinite on one rank in the second step."""
    model = job.sharded(job.model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        x = job.input(step)
        if step == 1:
            x[0, 0, 0] = float("inf") if job.data is None or job.data.get_local_rank() == 0 else 0.0
        scaler.scale(model(job.laid_out(x)).square().mean()).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return {**dict(named(model)), "scale": torch.tensor(scaler.get_scale())}


# --- optimizers


def clipped(job: Job) -> Values:
    return job.train(job.sharded(job.model), clip=0.05)


def adam(job: Job, **options: Any) -> Values:
    model = job.sharded(job.model)
    return job.train(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1, **options))


def averaged(job: Job) -> Values:
    model = job.sharded(job.model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    job.train(model, after=lambda: average.update_parameters(model))
    return dict(named(average.module))


# --- what saves


def folder_of(job: Job) -> str:
    folder = tempfile.mkdtemp()
    if job.mesh is None:
        return folder
    shared = [folder]
    torch.distributed.broadcast_object_list(shared, 0)
    return shared[0]


def saved_by_dcp(job: Job) -> Values:
    """Model and optimizer are saved after two steps, and loaded into new ones of the same kind, for a third one."""
    folder = folder_of(job)
    models = [job.sharded(job.model), job.sharded(job.parallel(Net()))]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    values = job.train(models[0], optimizer=optimizers[0])
    model, optimizer = get_state_dict(models[0], optimizers[0])
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    with torch.no_grad():
        for x in models[1].parameters():
            x.mul_(0)
    model, optimizer = get_state_dict(models[1], optimizers[1])
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(models[1], optimizers[1], model_state_dict=model, optim_state_dict=optimizer)
    again = job.train(models[1], optimizer=optimizers[1])
    return {**values, **{f"again: {name}": x for name, x in again.items()}}


def full_state(job: Job) -> Values:
    """The whole state dict, in plain tensors, on rank 0 alone; all others get it again."""
    model = job.sharded(job.model)
    job.train(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    is_first = job.mesh is None or torch.distributed.get_rank() == 0
    assert is_first == bool(state), f"full state dict: {len(state)} tensors"
    for name, x in state.items():
        assert type(x) is torch.Tensor, f"{name} is a {type(x).__name__}"
    after = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, x in after.items():
        assert type(x) in (torch.Tensor, nn.Parameter), f"{name} is a {type(x).__name__}"
    other = job.sharded(job.parallel(Net()))
    if job.mesh is None:
        other.load_state_dict(state)
    else:
        loading = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other, state, options=loading)
    return {**after, **{f"loaded: {name}": x for name, x in named(other)}}


def saved_by_nxd(job: Job) -> Values:
    folder = folder_of(job)
    models = [job.sharded(job.model), job.sharded(job.parallel(Net()))]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    values = job.train(models[0], optimizer=optimizers[0])
    if job.mesh is None:
        models[1].load_state_dict(models[0].state_dict())
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    else:
        nxd.save_checkpoint(folder, "3", model=models[0], optimizer=optimizers[0])
        nxd.load_checkpoint(folder, "3", model=models[1], optimizer=optimizers[1])
    again = job.train(models[1], optimizer=optimizers[1])
    return {**values, **{f"again: {name}": x for name, x in again.items()}}


def torch_save(job: Job) -> Values:
    model, other = job.sharded(job.model), job.sharded(job.parallel(Net()))
    job.train(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    return job.train(other)


# --- data


def loaded(job: Job) -> Values:
    """Rows of all batches by a sampler over the data-parallel ranks."""
    rows = torch.cat([batch(step) for step in range(3)])
    replicas = 1 if job.data is None else 2
    rank = 0 if job.data is None else job.data.get_local_rank()
    sampler: Any = DistributedSampler(TensorDataset(rows), replicas, rank, shuffle=False)
    loader = DataLoader(TensorDataset(rows), 4 // replicas, sampler=sampler)
    model = job.sharded(job.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in loader:
        optimizer.zero_grad()
        model(job.laid_out(x)).square().mean().backward()
        optimizer.step()
    return dict(named(model))


# --- torch.func, which replaces parameters, as `fully_shard` does: without it


def functional_call(job: Job) -> Values:
    model = job.model
    params = {name: x.detach().clone().requires_grad_() for name, x in model.named_parameters()}
    loss = torch.func.functional_call(model, params, (job.laid_out(batch(0)),)).square().mean()
    loss.backward()
    return {"loss": loss, **{name: x.grad for name, x in params.items()}}


def functional_grad(job: Job) -> Values:
    model = job.model
    x = job.laid_out(batch(0))
    params = {name: param.detach() for name, param in model.named_parameters()}
    return torch.func.grad(lambda values: torch.func.functional_call(model, values, (x,)).square().mean())(params)


def mapped(job: Job) -> Values:
    """Each row of a batch on its own, by `vmap` over rows."""
    model = job.model
    return {"y": torch.vmap(model)(job.laid_out(batch(0)))}


def forward_mode(job: Job) -> Values:
    model = job.model
    x = job.laid_out(batch(0))
    y, tangent = torch.func.jvp(model, (x,), (job.laid_out(batch(1)),))
    return {"y": y, "tangent": tangent}


ROWS: dict[str, tuple[Callable[[Job], Values], bool]] = {
    "`DistributedDataParallel`": (ddp, True),
    "`FullyShardedDataParallel` (FSDP1)": (fsdp1, True),
    "`fully_shard`": (fully, True),
    "`fully_shard` over torch's mesh": (fully_of_torch, True),
    "`fully_shard` over a mesh of two dims (HSDP)": (hybrid, True),
    "`fully_shard(mp_policy=..)`": (fully_mixed, True),
    "`NeuronZero1Optimizer`": (zero1, True),
    "`ColumnParallelLinear`, `RowParallelLinear`": (parallel_layers, True),
    "`checkpoint(.., use_reentrant=False)`": (checkpointed, False),
    "`checkpoint(.., use_reentrant=True)`": (checkpointed_reentrant, False),
    "`checkpoint_wrapper` of each layer": (checkpoint_wrapped, False),
    "`torch.compile`": (compiled, False),
    "`compile()` of each layer": (compiled_blocks, False),
    "`torch.compile(.., fullgraph=True)`": (compiled_fullgraph, False),
    "`torch.autocast`": (autocast, False),
    "`GradScaler`": (scaled, False),
    "`clip_grad_norm_`": (clipped, False),
    "`AdamW`": (adam, False),
    "`AdamW(fused=True)`": (lambda job: adam(job, fused=True), False),
    "`AveragedModel` (EMA)": (averaged, False),
    "`torch.distributed.checkpoint`": (saved_by_dcp, False),
    "`get_model_state_dict(full_state_dict=True)`": (full_state, False),
    "`save_checkpoint`, `load_checkpoint`": (saved_by_nxd, False),
    "`torch.save` of the state dict": (torch_save, False),
    "`DataLoader`": (loaded, False),
    "`torch.func.functional_call`": (functional_call, False),
    "`torch.func.grad`": (functional_grad, False),
    "`torch.vmap` over rows": (mapped, False),
    "`torch.func.jvp`": (forward_mode, False),
}


def ranks_of(row: str, column: str) -> int:
    return 4 if column == "styles, 2-D" or (ROWS[row][1] and column != "styles") else 2


def values_of(row: str, column: str | None) -> Values:
    """Computes a row in a column, on this rank; None: in one process."""
    function, wrapped = ROWS[row]
    return {name: whole(x) for name, x in function(Job(column, wrapped)).items()}


def outcome(row: str, column: str) -> tuple[str, str, Values]:
    """The refusal's class and words, or the values."""
    try:
        return "", "", values_of(row, column)
    except Exception as error:
        return type(error).__name__, str(error), {}
