"""Training a two-layer Llama: the same functions under gloo and as replayed XLA programs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm, hf
from neuronx_dist.comm.backends.xla_transfer import TRANSFER_VARIABLE
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import MasterWeightsOptimizer, NeuronZero1Optimizer
from neuronx_dist.xla_replay import ReplayedLoop, replay_loop, training_state
from tests.support.llama_training import Options, batch, config, initial_state


@dataclass(frozen=True)
class Training:
    """`optimizer` is "sgd" or "adamw"; `wrapper` "zero1", "master" or "plain"."""

    optimizer: str = "adamw"
    wrapper: str = "zero1"
    sequence_parallel: bool = False
    tied: bool = False
    clip: float = 1.0
    microbatches: int = 1
    layers: int = 2
    schedule: str | None = None
    chunks: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def options(self) -> Options:
        return Options(tied=self.tied, clip=self.clip, dtype=self.dtype, layers=self.layers)


def make_model(case: Training, place: torch.Tensor) -> nn.Module:
    options = case.options
    with torch.device("meta"):
        model = LlamaForCausalLM(config(options)).to(options.dtype)
    hf.swap(model, sequence_parallel=case.sequence_parallel)
    model = nxd.NxDPPModel(
        model,
        transformer_layer_cls=hf.transformer_layer_class(model),
        num_microbatches=case.microbatches,
        schedule=case.schedule,
        virtual_pipeline_size=case.chunks,
        input_names=["input_ids", "labels", "num_items_in_batch"],
        output_loss_value_spec={"loss": True, "logits": False},
        auto_partition=True,
        broadcast_and_average_loss=True,
        use_zero1_optimizer=case.wrapper == "zero1",
        return_loss_on_cpu=False,
    )
    state = initial_state(options.heads, options.tied, options.layers, options.dtype)
    hf.load_pretrained(model, state, device=place.device)
    return model.train()


def make_optimizer(case: Training, model: nn.Module, lr: torch.Tensor) -> Any:
    params = [param for param in model.local_parameters() if param.requires_grad]
    on_device = lr.device.type != "cpu"
    if case.optimizer == "sgd":
        # torch's SGD reads a learning rate that is a tensor on the host, at every step.
        optimizer_class, arguments = torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.01)
    else:  # `capturable`: the number of the step is counted on the device, and is no constant of the program
        optimizer_class = torch.optim.AdamW
        arguments = dict(lr=lr if on_device else 1e-3, weight_decay=0.1, eps=1e-6, capturable=on_device)
    if case.wrapper == "plain":
        return optimizer_class(params, **arguments)
    wrapper = NeuronZero1Optimizer if case.wrapper == "zero1" else MasterWeightsOptimizer
    return wrapper(params, optimizer_class, max_norm=case.clip, **arguments)


def setup(case: Training, place: torch.Tensor, lr: torch.Tensor) -> tuple[Callable[..., Any], Callable[[], Any]]:
    model = make_model(case, place)
    optimizer = make_optimizer(case, model, lr)

    def step(ids: torch.Tensor, labels: torch.Tensor, new_lr: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if new_lr is not None:
            lr.copy_(new_lr.clamp_min(1e-12))  # torch's capturable Adam divides by it
        items = nxd.global_num_items(labels, case.microbatches)
        loss = model.run_train(input_ids=ids, labels=labels, num_items_in_batch=items)
        if case.wrapper == "plain":
            norm = nxd.clip_grad_norm(model.local_parameters(), case.clip)
            optimizer.step()
        else:
            optimizer.step()
            norm = optimizer.grad_norm
        optimizer.zero_grad()
        return {"loss": loss.detach(), "norm": norm.float()}

    return step, lambda: training_state(model, optimizer)


def setup_by_gathering(*arguments: Any) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """`setup` on devices without a collective-permute."""
    gathering = mock.patch.dict(os.environ, {TRANSFER_VARIABLE: "all_gather"})
    with gathering:
        step, state = setup(*arguments)
    return gathering(step), state


def rows_of(dp: int, dp_rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, labels = (rows.chunk(dp)[dp_rank] for rows in batch("uneven", step))
    return ids.clone(), labels.clone()


SCHEDULE = [0.0, 5e-4, 1e-3, 5e-4, 0.0]  # of learning rates


def scheduled(mesh: Mesh, case: Training) -> ReplayedLoop:
    """A replay of steps whose learning rate, a tensor on the device, warms up from 0 and decays to 0."""
    arguments = [(case, torch.zeros(1), torch.tensor(0.0))] * mesh.world_size
    batches = [
        [(*rows_of(mesh.dp, mesh.coordinate("dp", rank), k), torch.tensor(lr)) for k, lr in enumerate(SCHEDULE)]
        for rank in range(mesh.world_size)
    ]
    return replay_loop(setup, mesh, arguments, batches)


def under_gloo(case: Training, steps: int) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Outputs of every step, and this rank's state after the last one."""
    from torch.utils import _pytree as pytree

    step, state = setup(case, torch.zeros(1), torch.tensor(0.0))
    outputs = [step(*rows_of(comm.size("dp"), comm.rank("dp"), k)) for k in range(steps)]
    leaves = pytree.tree_flatten_with_path(state())[0]
    tensors = {pytree.keystr(path): leaf.detach() for path, leaf in leaves if isinstance(leaf, torch.Tensor)}
    return outputs, tensors
