"""A language model written with NxD's names, and its training by the trainer and in one process without it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import neuronx_dist as nxd
from neuronx_dist import comm, trainer
from neuronx_dist.optimizer import MuonAdamW, muon_groups
from neuronx_dist.parallel_layers import parallel_cross_entropy
from neuronx_dist.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.support.synthetic import relative_error

__all__ = ["Block", "LanguageModel", "Options", "check", "config_of", "initialise", "train"]

HIDDEN, VOCAB, SEQ, ROWS, BLOCKS, STEPS = 8, 24, 8, 8, 4, 3
_GENERATOR = torch.Generator().manual_seed(3)
BATCH = [torch.randint(VOCAB, (ROWS, SEQ), generator=_GENERATOR) for _ in range(STEPS)]

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.5, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "muon": partial(MuonAdamW, lr=0.01),
}


@dataclass(frozen=True)
class Options:
    """Options of a run; `meta`: the model is built on meta."""

    zero1: bool = False
    sequence_parallel: bool = False
    optimizer: str = "sgd"
    checkpoint: Any = None
    meta: bool = False


class Block(nn.Module):
    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        shared: dict[str, Any] = dict(
            bias=False, dtype=torch.float64, sequence_parallel_enabled=sequence_parallel, sequence_dimension=1
        )
        self.norm = nxd.LayerNorm(HIDDEN, sequence_parallel_enabled=sequence_parallel, dtype=torch.float64)
        self.up = ColumnParallelLinear(HIDDEN, 3 * HIDDEN, gather_output=False, **shared)
        self.down = RowParallelLinear(3 * HIDDEN, HIDDEN, input_is_parallel=True, **shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    def __init__(self, sequence_parallel: bool = False) -> None:
        super().__init__()
        shared: dict[str, Any] = dict(sequence_parallel_enabled=sequence_parallel, sequence_dimension=1)
        self.embed = ParallelEmbedding(VOCAB, HIDDEN, dtype=torch.float64, **shared)
        self.blocks = nn.ModuleList(Block(sequence_parallel) for _ in range(BLOCKS))
        self.head = ColumnParallelLinear(HIDDEN, VOCAB, bias=False, gather_output=False, dtype=torch.float64, **shared)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return parallel_cross_entropy(logits, labels).mean(), logits


def initialise(module: nn.Module, device: torch.device) -> None:
    """NxD's `param_init_fn`: draws a module's parameters from its class, shape and layout alone."""
    if isinstance(module, nxd.LayerNorm):
        module.weight.data.fill_(1.0)
        module.bias.data.zero_()
    elif isinstance(module, (ColumnParallelLinear, RowParallelLinear, ParallelEmbedding)):
        torch.manual_seed(11)
        module.init_weight_cpu()


def config_of(mesh: nxd.Mesh, options: Options, **changes: Any) -> dict[str, Any]:
    pipeline = {
        "transformer_layer_cls": Block,
        "num_microbatches": 2,
        "output_loss_value_spec": (True, False),
        "input_names": ["input_ids", "labels"],
        "auto_partition": True,
    }
    return trainer.neuronx_distributed_config(
        tensor_parallel_size=mesh.tp,
        pipeline_parallel_size=mesh.pp,
        pipeline_config=pipeline if mesh.pp > 1 else None,
        optimizer_config={"zero_one_enabled": options.zero1, "grad_clipping": True, "max_grad_norm": 0.5},
        activation_checkpoint_config=options.checkpoint,
        sequence_parallel=options.sequence_parallel,
        model_init_config={"meta_device_init": True, "param_init_fn": initialise} if options.meta else None,
        **changes,
    )


def train(mesh: nxd.Mesh, options: Options) -> tuple[list[Any], list[float], dict[str, torch.Tensor]]:
    """Trains one rank's part by the trainer; returns losses, norms and the weights of this rank, whole."""
    torch.manual_seed(0)
    config = config_of(mesh, options)
    model = trainer.initialize_parallel_model(config, LanguageModel, False, options.sequence_parallel)
    params = muon_groups(model) if options.optimizer == "muon" else model.parameters()
    optimizer = trainer.initialize_parallel_optimizer(config, OPTIMIZERS[options.optimizer], params)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, STEPS)
    losses, norms = [], []
    rows = ROWS // mesh.size("dp")
    for ids in BATCH:
        mine = ids[comm.rank("dp") * rows :][:rows]
        loss = model.run_train(input_ids=mine, labels=mine.roll(-1, 1))
        losses.append(None if loss is None else loss.item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        norms.append(float(optimizer.grad_norm))
    whole = {name: gather_full(param, spec_of(param)) for name, param in model.named_parameters()}
    return losses, norms, whole


@cache
def in_one_process(options: Options) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Returns what `train` returns, of a loop over whole batches that uses torch alone."""
    torch.manual_seed(0)
    model = LanguageModel()
    if options.meta:
        for module in model.modules():
            initialise(module, torch.device("cpu"))
    params: Any = muon_groups(model) if options.optimizer == "muon" else model.parameters()
    optimizer = OPTIMIZERS[options.optimizer](params)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, STEPS)
    losses, norms = [], []
    for ids in BATCH:
        loss, _ = model(ids, ids.roll(-1, 1))
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses, norms, {name: param.detach() for name, param in model.named_parameters()}


def check(mesh: nxd.Mesh, options: Options) -> None:
    """Compares the training of all ranks with that of one process."""
    results = comm.threads.run(mesh, train, mesh, options)
    losses, norms, weights = comm.threads.run(nxd.Mesh(1), in_one_process, options)[0]
    last = [result[0] for result in results if result[0][0] is not None]
    for step, expected in enumerate(losses):
        over_data = [rank_losses[step] for rank_losses in last]
        assert abs(sum(over_data) / len(over_data) - expected) < 1e-10, (step, over_data, expected)
    assert any(norm > 0.5 for norm in norms)
    seen = set()
    for _, rank_norms, rank_weights in results:
        assert rank_norms == pytest.approx(norms, abs=1e-10)
        for name, weight in rank_weights.items():
            seen.add(name)
            assert relative_error(weight, weights[name]) < 1e-10, name
    assert seen == weights.keys()
