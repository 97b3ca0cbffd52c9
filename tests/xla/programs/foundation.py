"""Programs that test_xla_foundation.py runs on one XLA device, and on the CPU."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import Mesh, comm, hf
from neuronx_dist.comm.launch import end_step
from neuronx_dist.optimizer import MasterWeightsOptimizer, NeuronZero1Optimizer
from neuronx_dist.parallel_layers import random, utils
from tests.xla.programs.training import Training, make_model, make_optimizer, rows_of

XLA, CPU = "xla:0", "cpu"


@contextlib.contextmanager
def rank_on(device: str) -> Iterator[None]:
    """The rank of the process; on the CPU one that knows of no XLA device."""
    if device == CPU:
        with comm.as_rank(Mesh(1), 0):
            random.model_parallel_manual_seed(0)
            yield
    else:
        yield


def programs_executed() -> int:
    from torch_xla.debug import metrics

    data = metrics.metric_data("ExecuteTime")
    return int(data[0]) if data else 0


def programs_compiled() -> int:
    from torch_xla.debug import metrics

    data = metrics.metric_data("CompileTime")
    return int(data[0]) if data else 0


# --- moving a model ---


class Tied(nn.Module):
    """One weight in three modules, one buffer in two, a scalar that is 0, and marks of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.b.weight = self.c.weight = self.a.weight
        self.gate = nn.Parameter(torch.zeros(()))
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.b.register_buffer("same_scale", self.scale)
        self.register_buffer("not_saved", torch.ones(2), persistent=False)
        self.lstm = nn.LSTM(4, 4)  # which keeps lists of its parameters
        weight = self.a.weight
        weight.tensor_model_parallel, weight.partition_dim, weight.shared = True, 0, True
        weight.my_mark = {"any": "thing"}
        self.b.bias.sequence_parallel_enabled = True
        self.a.bias.requires_grad_(False)
        weight.grad = torch.full((4, 4), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.c(self.b(self.a(x)) * self.scale) + self.gate
        return self.lstm(y)[0].square().mean()


def seen(model: Tied) -> dict[str, Any]:
    weight = model.a.weight
    return dict(
        devices={str(x.device) for x in (*model.parameters(), *model.buffers())},
        tied=weight is model.b.weight is model.c.weight,
        buffers_tied=model.scale is model.b.same_scale,
        marks=(weight.tensor_model_parallel, weight.partition_dim, weight.shared, weight.my_mark),
        others=(hasattr(model.a.bias, "shared"), model.b.bias.sequence_parallel_enabled),
        trained=[name for name, param in model.named_parameters() if not param.requires_grad],
        grad=weight.grad.cpu().tolist(),
        grad_is_there=weight.grad.device == weight.device,
        saved=sorted(model.state_dict()),
    )


def move_there_and_back() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x = torch.ones(2, 3, 4)
    found: dict[str, Any] = {"before": seen(model), "loss": float(model(x).detach())}
    before = {id(param) for param in model.parameters()}
    assert utils.move_model_to_device(model, XLA) is model
    found["there"] = seen(model)
    found["same objects"] = {id(param) for param in model.parameters()} == before
    loss = model(x.to(XLA))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    found["loss there"] = float(loss.detach())
    found["loss there after a step"] = float(model(x.to(XLA)).detach())
    model.a.weight.grad = torch.full((4, 4), 0.5, device=XLA)
    utils.move_model_to_device(model, CPU)
    found["back"] = seen(model)
    found["loss back"] = float(model(x).detach())
    return found


def move_what_cannot() -> dict[str, str]:
    """The messages."""
    found = {}
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    used = nn.Linear(2, 2)
    graph = used.weight * 2
    reference = used.weight.view(-1)
    buffered = nn.BatchNorm1d(2)
    buffered.running_mean = torch.zeros(2, device="meta")
    for name, net in (("meta", model), ("meta buffer", buffered), ("in use", used)):
        try:
            utils.move_model_to_device(net, XLA)
        except RuntimeError as error:
            found[name] = str(error)
    del graph, reference
    return found


def llama_moved() -> dict[str, Any]:
    """A Llama of Hugging Face with tied embeddings, its layers swapped, filled on the CPU and then moved."""
    from transformers import LlamaForCausalLM

    from tests.support.llama_training import Options, batch, config, initial_state

    options = Options(tied=True, dtype=torch.float32)
    model = LlamaForCausalLM(config(options))
    hf.swap(model)
    hf.load_pretrained(model, initial_state(options.heads, True, options.layers, options.dtype))
    ids, labels = batch("even", 0)
    mask = torch.ones_like(ids)
    expected = model(input_ids=ids, attention_mask=mask, labels=labels).loss.detach()
    specs = {name: spec for name, _, spec in nxd.spmd.named_specs(model)}
    utils.move_model_to_device(model, XLA)
    loss = model(input_ids=ids.to(XLA), attention_mask=mask.to(XLA), labels=labels.to(XLA)).loss
    loss.backward()
    end_step()
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    return dict(
        loss=float(loss),
        expected=float(expected),
        tied=head is embedding and head.grad is not None,
        specs=specs == {name: spec for name, _, spec in nxd.spmd.named_specs(model)},
        devices={str(x.device) for x in (*model.parameters(), *model.buffers())},
    )


def host_copies() -> dict[str, Any]:
    """Nested state of many tensors that are still to be computed."""
    x = torch.arange(6, dtype=torch.float32).to(XLA)
    param = nn.Parameter(x * 2)
    data = {
        "a": [x + 1, (x > 2, (x * 3).to(torch.bfloat16))],
        "b": param,
        "step": torch.tensor(1.0, device=XLA),
        "ids": (x * 2).long(),
        "here": torch.ones(2),
        "plain": (3, "text", None),
    }
    before = programs_executed()
    waited = utils.move_all_tensor_to_cpu(data, convert=False)
    executed = programs_executed() - before
    copied = utils.move_all_tensor_to_cpu(data)
    return dict(
        copied=copied,
        executed=executed,
        executed_for_copies=programs_executed() - before - executed,
        unchanged=waited is data and data["b"] is param and param.requires_grad,
        same_memory=copied["here"].data_ptr() == data["here"].data_ptr(),
    )


# --- checkpoints ---


class Block(nn.Module):
    """Dropout from both random streams."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 6)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.up(x).relu(), 0.2, self.training)
        with random.get_rng_tracker().fork():
            y = F.dropout(y, 0.1, self.training)
        return self.down(y) * (1 + self.gate)


def make(kind: str, device: str, dtype: torch.dtype = torch.float32, lr: Any = 1e-2) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = utils.move_model_to_device(Block().to(dtype), device)
    options = dict(lr=lr, weight_decay=0.1, eps=1e-6, capturable=device != CPU)
    if kind == "plain":
        return model, torch.optim.AdamW(model.parameters(), **options)
    wrapper = NeuronZero1Optimizer if kind == "zero1" else MasterWeightsOptimizer
    return model, wrapper(model.parameters(), torch.optim.AdamW, save_master_weights=True, **options)


def train(model: nn.Module, optimizer: Any, steps: Iterable[int], device: str) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(device, model.up.weight.dtype)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end_step()
        losses.append(float(loss.detach()))
    return losses


def save(path: Path, model: nn.Module, optimizer: Any) -> None:
    streams = dict(default=random.get_rng_state(), others=random.get_rng_tracker().get_states())
    state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), streams=streams)
    torch.save(utils.move_all_tensor_to_cpu(state), path)


def resume(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Four steps, and two, a file, and two more in a new model and optimizer."""
    random.set_random_seed(5)
    whole = train(*make(kind, XLA, dtype), range(4), XLA)
    random.set_random_seed(5)
    model, optimizer = make(kind, XLA, dtype)
    losses = train(model, optimizer, range(2), XLA)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        save(path, model, optimizer)
        random.set_random_seed(99)
        model, optimizer = make(kind, XLA, dtype)
        train(model, optimizer, range(7, 8), XLA)  # a step, so that there is a state to be replaced
        state = torch.load(path, weights_only=True)  # without map_location: nothing in it is of an XLA device
    model.load_state_dict(state["model"])
    utils.load_optimizer_state_dict(optimizer, state["optimizer"])
    random.set_rng_state(state["streams"]["default"])
    random.get_rng_tracker().set_states(state["streams"]["others"])
    compiled = programs_compiled()
    losses += train(model, optimizer, range(2, 4), XLA)
    return dict(whole=whole, resumed=losses, compiled=programs_compiled() - compiled, state=state)


def across(kind: str, source: str, target: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Two steps on one device, two more on it and on another that read a file. No dropout: the streams differ."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        with rank_on(source):
            model, optimizer = make(kind, source, dtype)
            train(model.eval(), optimizer, range(2), source)
            torch.save(utils.move_all_tensor_to_cpu([model.state_dict(), optimizer.state_dict()]), path)
            expected = train(model, optimizer, range(2, 4), source)
        with rank_on(target):
            lr = comm.host.upload(torch.tensor(1.0), target) if target == XLA else 1.0
            model, optimizer = make(kind, target, dtype, lr)
            state, optimizer_state = torch.load(path, weights_only=True)
            model.eval().load_state_dict(state)
            if kind == "plain":
                utils.load_optimizer_state_dict(optimizer, optimizer_state)
            else:
                optimizer.load_state_dict(optimizer_state)
            found = train(model, optimizer, range(2, 3), target)
            compiled = programs_compiled()
            found += train(model, optimizer, range(3, 4), target)
            inner = getattr(optimizer, "base_optimizer", optimizer)
            (group,) = inner.param_groups
            states = [inner.state[param] for param in group["params"]]
            return dict(
                found=found,
                expected=expected,
                compiled=programs_compiled() - compiled,
                steps=[float(state["step"]) for state in states],
                step_devices={str(state["step"].device) for state in states},
                moments={(str(x.device), x.dtype) for state in states for x in (state["exp_avg"], state["exp_avg_sq"])},
                capturable=group["capturable"],
                lr=(float(group["lr"]), type(group["lr"]).__name__, group["lr"] is lr),
            )


def llama_checkpoints(folder: str) -> dict[str, Any]:
    """A pipeline model of one stage and ZeRO-1: its state dict, the optimizer's files, and Hugging Face's folder."""
    case = Training("adamw", "zero1", tied=True)

    def build() -> tuple[Any, Any]:
        model = make_model(case, torch.zeros(1, device=XLA))
        params = [param for param in model.local_parameters() if param.requires_grad]
        return model, NeuronZero1Optimizer(params, torch.optim.AdamW, lr=1e-3, capturable=True)

    def steps(model: Any, optimizer: Any, numbers: Iterable[int]) -> list[float]:
        losses = []
        for number in numbers:
            ids, labels = (rows.to(XLA) for rows in rows_of(1, 0, number))
            loss = model.run_train(input_ids=ids, labels=labels, num_items_in_batch=nxd.global_num_items(labels, 1))
            optimizer.step()
            optimizer.zero_grad()
            end_step()
            losses.append(float(loss))
        return losses

    model, optimizer = build()
    steps(model, optimizer, range(2))
    state = utils.move_all_tensor_to_cpu(model.state_dict())
    local = utils.move_all_tensor_to_cpu(model.local_state_dict())
    optimizer.save_sharded_state_dict(folder)
    hf.save_pretrained(model, folder)
    expected = steps(model, optimizer, range(2, 4))
    model, optimizer = build()
    model.load_state_dict(state)
    optimizer.load_sharded_state_dict(folder)
    found = steps(model, optimizer, range(2, 4))
    (file,) = Path(folder).glob("optim.*")
    saved = torch.load(file, weights_only=True)
    return dict(
        expected=expected,
        found=found,
        state=state,
        local=sorted(local) == sorted(state),
        saved_on={str(x.device) for x in torch.utils._pytree.tree_leaves(saved) if isinstance(x, torch.Tensor)},
    )


# --- several ranks ---


def state_dicts(found: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A replayed rank's state, `{"['model']['norm.weight']": ...}`, as the model's state dict and the optimizer's."""
    weights: dict[str, torch.Tensor] = {}
    base_state: dict[int, dict[str, torch.Tensor]] = {}
    masters: dict[int, torch.Tensor] = {}
    for key, value in found.items():
        first, *rest = re.findall(r"\['?([^\]']+)'?\]", key)
        if first == "model":
            weights[rest[0]] = value
        elif first == "base" and rest[0] == "params":
            masters[int(rest[1])] = value
        elif first == "base" and rest[0] == "state":
            base_state.setdefault(int(rest[1]), {})[rest[2]] = value
    return weights, {"base_state": base_state, "sharded_master_weights": masters}


def go_on(case: Training, states: list[dict[str, torch.Tensor]], number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Step `number` of a rank on the CPU, from what the same rank had after the steps before on XLA."""
    weights, optimizer_state = state_dicts(states[comm.rank("world")])
    model = make_model(case, torch.zeros(1))
    optimizer = make_optimizer(case, model, torch.tensor(0.0))
    model.load_state_dict({name: value for name, value in weights.items() if name in model.state_dict()})
    optimizer.load_state_dict({**optimizer.state_dict(), **optimizer_state})
    ids, labels = rows_of(comm.size("dp"), comm.rank("dp"), number)
    loss = model.run_train(input_ids=ids, labels=labels, num_items_in_batch=nxd.global_num_items(labels, 1))
    optimizer.step()
    return {"loss": loss, "norm": optimizer.grad_norm}, {n: p.detach() for n, p in model.named_parameters()}


class Gathered:
    """Stands in for `gather_full` on a rank of many, whose collectives one device cannot execute: notes the calls."""

    def __init__(self) -> None:
        self.results: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor, spec: Any) -> torch.Tensor:
        self.results.append(torch.zeros(spec.unpadded_shape, device=tensor.device) + 1)
        return self.results[-1]


def save_as_rank(rank: int, folder: str) -> tuple[list[tuple[int, ...]], int]:
    """Shapes of what a rank of tp 2 x dp 2 gathers to save a model, and how many of them it did not compute."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    case = Training()
    stub = Gathered()
    with (
        comm.as_rank(Mesh(4, tp=2), rank, comm.backends.xla.XlaBackend()),
        mock.patch.object(hf.weights, "gather_full", stub),
        mock.patch.object(xm, "rendezvous", lambda tag, payload: [payload] * 4),
    ):
        model = make_model(case, torch.zeros(1, device=torch_xla.device()))
        hf.save_pretrained(model, folder)
    return [tuple(x.shape) for x in stub.results], sum(torch_xla._XLAC._check_tensor_need_materialization(stub.results))


def device_of_the_loss(on_cpu: bool) -> tuple[str, str]:
    """Returns the devices of a pipeline model's mean loss on an XLA device, and of its microbatches' losses."""
    import torch_xla

    devices = []
    for return_mb_loss in (False, True):
        model = nxd.NxDPPModel(
            nn.Linear(2, 1), output_loss_value_spec=True, return_loss_on_cpu=on_cpu, return_mb_loss=return_mb_loss
        )
        model.original_module.forward = lambda x, layer=model.original_module: nn.Linear.forward(layer, x).mean()
        model.to(torch_xla.device())
        loss = model.run_train(x=torch.ones(2, 2))
        devices.append((loss[0] if return_mb_loss else loss).device.type)
    return devices[0], devices[1]
