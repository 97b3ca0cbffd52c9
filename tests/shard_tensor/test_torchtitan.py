"""A program as torchtitan's, by this package's imports and by torch's: TP x FSDP, checkpointed and compiled blocks.

Both are compared with one process: losses, norms of gradients and weights, before and after a checkpoint of the job.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

from tests.shard_tensor.support.cases import assert_close
from tests.shard_tensor.test_parallel import Llama, apply_tp, data, loss_of
from tests.support.pool import processes

pytestmark = [pytest.mark.process, pytest.mark.slow]

# What a program imports from: the only difference between the two.
IMPORTS = {
    "ours": ("neuronx_dist.shard_tensor", "neuronx_dist.shard_tensor.parallel"),
    "torch's": ("torch.distributed.device_mesh", "torch.distributed.tensor.parallel"),
}
BACKENDS = {"ours": "aot_eager", "torch's": "eager"}  # AOTAutograd of torch 2.13 fails on checkpoints of DTensors
CLIP = 0.2


def parallelized(meshes: Any, styles: dict[str, Any], backend: str) -> Llama:
    mesh = meshes.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Llama()
    apply_tp(model, mesh["tp"], styles)
    for name, block in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))
    for block in model.layers.values():
        block.compile(backend=backend)
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    options = {"mesh": mesh["dp"], "mp_policy": policy}
    fully_shard(model.tok_embeddings, **options)
    for block in model.layers.values():
        fully_shard(block, **options)
    fully_shard([model.norm, model.output], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    return model


def step(model: Any, optimizer: torch.optim.Optimizer, part: slice, loss_parallel: Any) -> dict[str, torch.Tensor]:
    tokens, labels = data(8, 16)
    optimizer.zero_grad()
    with loss_parallel():
        loss = loss_of(model(tokens[part]), labels[part])
        loss.backward()
    norm = clip_grad_norm_(model.parameters(), CLIP, foreach=True)
    optimizer.step()
    return {"loss": whole(loss), "norm": whole(norm)}


def whole(x: Any) -> torch.Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name.replace("_checkpoint_wrapped_module.", ""): whole(x) for name, x in model.named_parameters()}


def program(which: str, folder: str) -> list[dict[str, torch.Tensor]]:
    """Two steps, a checkpoint, a new model that loads it, and another step."""
    meshes, names = map(importlib.import_module, IMPORTS[which])
    part = slice(torch.distributed.get_rank() // 2, torch.distributed.get_rank() // 2 + 1)
    results = []
    model = parallelized(meshes, vars(names), BACKENDS[which])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for _ in range(2):
        results.append(step(model, optimizer, part, names.loss_parallel))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    other = parallelized(meshes, vars(names), BACKENDS[which])
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.01, fused=True)
    model_state, optimizer_state = get_state_dict(other, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(other, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    results.append(step(other, optimizer, part, names.loss_parallel))
    for result in results:
        torch.distributed.all_reduce(result["loss"])
        result["loss"] /= 4
    return [*results, weights(other)]


@pytest.mark.filterwarnings("ignore")
def test_a_program_of_torchtitan(tmp_path):
    twin = Llama()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01, fused=True)
    nothing = importlib.import_module(IMPORTS["ours"][1]).loss_parallel
    expected = [step(twin, optimizer, slice(None), nothing) for _ in range(3)] + [weights(twin)]
    for which in IMPORTS:
        for results in processes(4).run(program, which, str(tmp_path / which), mesh={"tp": 2}):
            for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
                assert result.keys() == wanted.keys()
                for name, x in wanted.items():
                    assert_close(result[name], x, f"{which}: {name}, {number}")
