"""Folders as NeuronX Distributed writes them, made of whole tensors by the facts of its formats alone.

Nothing here uses what reads or writes checkpoints in the package.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# What stands for a tensor in torch_xla's serialization.
TensorReference = type("TensorReference", (), {"__module__": "torch_xla.utils.serialization"})


@dataclass
class Parameter:
    """A whole parameter, and how NxD divides it.

    Attributes:
        dim: that is divided over tp; None: every rank has it.
        stride: number of fused blocks in it.
        stage: of the pipeline.
        state: what AdamW keeps of it, whole.
    """

    value: torch.Tensor
    dim: int | None = None
    stride: int = 1
    stage: int = 0
    state: dict[str, torch.Tensor] = field(default_factory=dict)

    def shard(self, whole: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
        if self.dim is None:
            return whole.clone()
        size = whole.shape[self.dim] // tp // self.stride
        pieces = whole.split(size, self.dim)[rank::tp]
        return torch.cat(pieces, self.dim)


def rows(shard: torch.Tensor, rank: int, dp: int) -> torch.Tensor:
    """ZeRO-1's part: rows, with zeros to a multiple of dp."""
    missing = -shard.shape[0] % dp
    padded = torch.cat([shard, shard.new_zeros(missing, *shard.shape[1:])])
    return padded.chunk(dp)[rank].clone()


def write(
    folder: Path,
    parameters: Mapping[str, Parameter],
    tp: int,
    pp: int,
    dp: int = 2,
    *,
    buffers: Mapping[str, Parameter] | None = None,
    optimizer: str = "zero1",
    xser: bool = False,
    info: bool = True,
    masters: bool = False,
    ep: int | None = None,
    user_content: Any = None,
    scheduler: Any = None,
) -> None:
    """`dir/tag/` of `nxd.save_checkpoint`."""
    folder.mkdir(parents=True)
    (folder / "checkpoint").write_text("1")
    for stage in range(pp):
        local = {name: parameter for name, parameter in parameters.items() if parameter.stage == stage}
        held = local | {name: buffer for name, buffer in (buffers or {}).items() if buffer.stage == stage}
        for rank in range(tp):
            model = OrderedDict((name, x.shard(x.value, rank, tp)) for name, x in held.items())
            expert = "" if ep is None else f"ep_rank_{ep:02d}_"
            coordinates = f"{expert}tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
            _save(model, folder / "model" / f"dp_rank_00_{coordinates}", xser, info)
            if optimizer == "zero1":
                for data in range(dp):
                    state = zero1_state(local, rank, tp, data, dp, masters)
                    _save(state, folder / "optim" / f"dp_rank_{data:02d}_{coordinates}", xser, info)
            elif optimizer == "plain":
                state = {"state": _state(local, rank, tp), "param_groups": _groups(local)}
                _save(state, folder / "optim" / f"dp_rank_00_{coordinates}", xser, info)
    if user_content is not None:
        torch.save(user_content, folder / "user_content.pt")
    if scheduler is not None:
        torch.save(scheduler, folder / "scheduler.pt")
    (folder / "done").write_text("1")


def write_first_way(folder: Path, parameters: Mapping[str, Parameter], tp: int, pp: int, xser: bool = False) -> None:
    """Writes the files of `parallel_layers.checkpointing.save({"model": ..., "step": 3}, folder)`."""
    for stage in range(pp):
        local = {name: parameter for name, parameter in parameters.items() if parameter.stage == stage}
        for rank in range(tp):
            model = OrderedDict((name, parameter.shard(parameter.value, rank, tp)) for name, parameter in local.items())
            file = folder / f"tp_rank_{rank:02d}_pp_rank_{stage:02d}"
            _save({"model": model, "step": 3}, file if xser else file / "checkpoint.pt", xser, info=False)


def _state(local: Mapping[str, Parameter], rank: int, tp: int) -> dict[int, dict[str, torch.Tensor]]:
    return {
        number: {
            entry: parameter.shard(value, rank, tp) if value.dim() else value.clone()
            for entry, value in parameter.state.items()
        }
        for number, parameter in enumerate(local.values())
    }


def _groups(local: Mapping[str, Parameter]) -> list[dict[str, Any]]:
    return [{"lr": 0.125, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": list(range(len(local)))}]


def zero1_state(
    local: Mapping[str, Parameter], rank: int, tp: int, data: int, dp: int, masters: bool = False
) -> dict[str, Any]:
    base = {
        number: {entry: rows(value, data, dp) if value.dim() else value for entry, value in state.items()}
        for number, state in _state(local, rank, tp).items()
    }
    shards = {number: parameter.shard(parameter.value, rank, tp) for number, parameter in enumerate(local.values())}
    state = {
        "state": {},
        "param_groups": _groups(local),
        "base_state": base,
        "shape_info": {number: shard.shape for number, shard in shards.items()},
    }
    if masters:
        state["sharded_master_weights"] = {
            number: rows(parameter.shard(parameter.state["exp_avg"] * 3, rank, tp), data, dp)
            for number, parameter in enumerate(local.values())
        }
    return state


def _save(state: Any, path: Path, xser: bool, info: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not xser:
        torch.save(state, path)
        return
    tensors: list[torch.Tensor] = []

    def referred(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            reference = TensorReference()
            reference.tid = len(tensors)
            tensors.append(value)
            return reference
        if isinstance(value, dict):
            return type(value)((key, referred(item)) for key, item in value.items())
        return value

    rewritten = referred(state)
    folder = path.with_name(path.name + ".tensors")
    folder.mkdir()
    for number, tensor in enumerate(tensors):
        torch.save(tensor, folder / f"tensor_{number}.pt")
    if info:
        described = {
            number: {"dtype": tensor.dtype, "shape": tensor.shape, "expert_model_parallel": False}
            for number, tensor in enumerate(tensors)
        }
        torch.save(described, path.with_name(path.name + ".info.pt"))
    with_torch_xla = {"torch_xla": types.ModuleType("torch_xla"), "torch_xla.utils": types.ModuleType("utils")}
    with_torch_xla["torch_xla.utils.serialization"] = types.ModuleType("serialization")
    with_torch_xla["torch_xla.utils.serialization"].TensorReference = TensorReference  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in with_torch_xla}
    sys.modules.update(with_torch_xla)
    try:
        torch.save(rewritten, path)  # a pickle names a class that is there
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
