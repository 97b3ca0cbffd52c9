"""Layers as the replayed ranks run them. `place` is a tensor that says which device to build on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, comm, parallel_cross_entropy, spmd
from neuronx_dist.comm import rank_selection
from neuronx_dist.modules import moe
from neuronx_dist.parallel_layers import mappings
from neuronx_dist.parallel_layers.fused_columns import fuse_columns
from neuronx_dist.parallel_layers.layer_norm import LayerNorm, RMSNorm

Options = dict[str, Any]


def built(module: nn.Module, place: torch.Tensor) -> nn.Module:
    """A module made on meta, with weights that depend on nothing but their names."""
    return nxd.materialize(module, seed=5, device=place.device)


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad for name, param in module.named_parameters() if param.grad is not None}


def linear(kind: str, options: Options, x: torch.Tensor, g: torch.Tensor) -> dict[str, Any]:
    """Output and all gradients of a column- or row-parallel layer."""
    layer_class = ColumnParallelLinear if kind == "column" else RowParallelLinear
    layer = built(layer_class(16, 16, device="meta", **options), x)
    out = layer(x)
    bias = None
    if options.get("skip_bias_add"):
        out, bias = out
    out.backward(g)
    return {"out": out.detach(), "bias": bias, "x": x.grad, **gradients(layer)}


def pair(options: Options, x: torch.Tensor) -> dict[str, Any]:
    """Column, row, a square as loss, and the gradients' mean over the data."""
    column = ColumnParallelLinear(16, 32, gather_output=False, device="meta", **options)
    row = RowParallelLinear(32, 16, input_is_parallel=True, device="meta", **options)
    model = built(nn.Sequential(column, nn.GELU(), row), x)
    loss = model(x).square().mean()
    loss.backward()
    nxd.reduce_gradients(model)
    return {"loss": loss.detach(), "x": x.grad, **gradients(model)}


def fused(x: torch.Tensor) -> dict[str, Any]:
    """Three columns on one input: one input-gradient collective."""
    columns = nn.ModuleList(ColumnParallelLinear(16, n, False, gather_output=False, device="meta") for n in (16, 8, 8))
    built(columns, x)
    fuse_columns(list(columns))
    sum(column(x).square().sum() for column in columns).backward()
    return {"x": x.grad, **gradients(columns)}


def embedding(options: Options, ids: torch.Tensor) -> dict[str, Any]:
    layer = built(ParallelEmbedding(32, 16, device="meta", **options), ids)
    out = layer(ids)
    (out * torch.arange(out.numel(), device=ids.device).view(out.shape)).sum().backward()
    return {"out": out.detach(), **gradients(layer)}


def cross_entropy(options: Options, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    losses = parallel_cross_entropy(logits, labels, **options)
    losses.square().sum().backward()
    return {"losses": losses.detach(), "logits": logits.grad}


def norms(sequence_parallel: bool, x: torch.Tensor) -> dict[str, Any]:
    model = nn.Sequential(
        LayerNorm(16, sequence_parallel_enabled=sequence_parallel, device="meta"),
        RMSNorm(16, sequence_parallel_enabled=sequence_parallel, device="meta"),
    )
    built(model, x)
    model(x).pow(3).sum().backward()
    nxd.reduce_gradients(model)
    return {"x": x.grad, **gradients(model)}


REGIONS = {
    "copy": lambda x: mappings.copy_to_tensor_model_parallel_region(x),
    "reduce": lambda x: mappings.reduce_from_tensor_model_parallel_region(x),
    "scatter": lambda x: mappings.scatter_to_tensor_model_parallel_region(x),
    "gather": lambda x: mappings.gather_from_tensor_model_parallel_region(x),
    "scatter sequence": lambda x: mappings.scatter_to_sequence_parallel_region(x),
    "gather sequence": lambda x: mappings.gather_from_sequence_parallel_region(x),
    "gather sequence, invariant": lambda x: mappings.gather_from_sequence_parallel_region(x, to_model_parallel=False),
    "reduce-scatter sequence": lambda x: mappings.reduce_scatter_to_sequence_parallel_region(x, 1),
    "replicated to partial": lambda x: spmd.convert(x, "tp", src=spmd.R, dst=spmd.P),
    "expert": lambda x: mappings.exit_expert_parallel_region(mappings.enter_expert_parallel_region(x, True), True),
}


def regions(x: torch.Tensor) -> dict[str, Any]:
    """Every region function, forward and backward."""
    found = {}
    for name, region in REGIONS.items():
        leaf = x.detach().clone().requires_grad_()
        out = region(leaf)
        out.square().sum().backward()
        found[name] = (out.detach(), leaf.grad)
    return found


def norm_and_clip(x: torch.Tensor) -> dict[str, Any]:
    """The norm counts sharded gradients on all ranks, and replicated ones once."""
    column = ColumnParallelLinear(16, 32, gather_output=False, device="meta")
    row = RowParallelLinear(32, 16, input_is_parallel=True, device="meta")
    model = built(nn.Sequential(column, row), x)
    model(x).square().sum().backward()
    nxd.reduce_gradients(model)
    norm = nxd.clip_grad_norm(model.parameters(), 0.5)
    return {"norm": norm.float(), **gradients(model)}


def number_of_items(labels: torch.Tensor) -> torch.Tensor:
    return nxd.global_num_items(labels, num_microbatches=2)


# --- what goes wrong ---


def slices_by_rank(x: torch.Tensor) -> torch.Tensor:
    return comm.all_reduce(x[comm.rank("tp") :][:2], "tp")  # the rank becomes a constant


def skips_a_collective(x: torch.Tensor) -> torch.Tensor:
    y = comm.all_reduce(x, "tp")
    return comm.all_reduce(y, "dp") if comm.rank("tp") == 0 else y * 2


def wrong_groups(x: torch.Tensor) -> torch.Tensor:
    import torch_xla.core.xla_model as xm

    return xm.all_reduce("sum", x, groups=[[0, 3], [1, 2]], pin_layout=False)


def reads_a_value(x: torch.Tensor) -> torch.Tensor:
    return x * float(comm.all_reduce(x, "tp").sum())


def set_up_by_rank(x: torch.Tensor) -> Any:
    """A state whose first value is a slice at the rank: pending when the first step begins."""
    mine = torch.zeros(2, 3, device=x.device)
    mine.copy_(x[comm.rank("tp") :][:2])

    def step() -> torch.Tensor:
        mine.add_(1)
        return mine.sum()

    return step, lambda: {"mine": mine}


def set_up_by_communicating(x: torch.Tensor) -> Any:
    total = comm.all_reduce(x, "tp")
    return lambda: total.sum(), lambda: {"total": total}


def counting(x: torch.Tensor) -> Any:
    """A state that is changed, one that is not, and one that is returned."""
    count, fixed = torch.zeros((), device=x.device), x * 2

    def step(more: torch.Tensor) -> dict[str, torch.Tensor]:
        count.add_(comm.all_reduce(more, "tp").sum())
        return {"before": fixed, "count": count}

    return step, lambda: {"count": count, "fixed": fixed}


def pieces(x: torch.Tensor, dim: int) -> Any:
    group = comm.communicator("tp")
    return rank_selection.own_piece(x, group, dim), rank_selection.in_own_piece(x, group, dim)


def experts(x: torch.Tensor) -> dict[str, Any]:
    """A layer of experts: its output, auxiliary losses, and the gradients' sums over the data."""
    router = moe.RouterTopK(4, 2, 16, device="meta")
    mlps = moe.ExpertMLPs(4, 2, 16, 32, "silu", True, None, normalize_top_k_affinities=True, device="meta")
    model = built(moe.MoE(router, mlps, return_router_logits=True), x)
    out, logits = model(x)
    balance = moe.load_balancing_loss_func(logits, 4, 2)
    (out.square().mean() + 0.1 * balance + 0.01 * moe.router_z_loss_func(logits)).backward()
    nxd.reduce_gradients(model)
    return {"out": out.detach(), "balance": balance.detach(), "x": x.grad, **gradients(model)}
