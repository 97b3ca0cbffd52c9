"""Programs of nnScaler run: every name of its guide with its signature, and its examples with their loops."""

from __future__ import annotations

import copy
import inspect
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist.parallelize as package
from neuronx_dist import Mesh
from neuronx_dist.comm import threads
from neuronx_dist.parallel_layers.parallel_state import destroy_model_parallel
from neuronx_dist.parallelize import ComputeConfig, build_optimizer, parallelize
from tests.support.pool import processes

# The guide's, with its defaults. `ParallelModule`'s methods have None where the guide gives no default.
SIGNATURES = {
    "parallelize": "(module_or_module_class, dummy_forward_args, pas_policy, compute_config, *, "
    "gen_savedir='./.nnscaler', reuse=<ReuseType.MATCH: 'match'>, instance_name=None, load_module=True, "
    "module_dtype=None, module_fn=None, init_module_params=True, broadcast_strategy='none', "
    "verify_with=None, verify_args=None)",
    "build_optimizer": "(module, optimizer_fn, compute_config=None, **kwargs)",
    "merge_state_dicts": "(module_state_dicts, optimizer_state_dicts=None)",
    "load_merged_state_dict": "(module, module_state_dict, optimizer=None, optimizer_state_dict=None, *, device=None)",
    "load_merged_state_dicts": "(module, module_state_dict, optimizer=None, optimizer_state_dict=None, *, device=None)",
    "deduped_state_dict": "(module, optimizer=None)",
    "deduped_state_dicts": "(module, optimizer=None)",
    "load_deduped_state_dict": "(module, module_state_dict, optimizer=None, optimizer_state_dict=None, *, device=None)",
    "broadcast_weights": "(module, stride_size=None)",
    "sync_grad_when": "(condition)",
    "ParallelModule": "(init_params=True)",
    "ParallelModule.train_step": "(self, samples, is_dummy_batch=None, scale_fn=None)",
    "ParallelModule.infer_step": "(self, samples)",
    "ParallelModule.parameters_for_optimizer": "(self)",
    "ParallelModule.gather_params": "(self)",
    "ParallelOptimizer.sync_shard_grad": "(self)",
    "ParallelOptimizer.clip_gnorm": "(self, max_norm=None)",
    "ParallelOptimizer.register_reducer_pre_hook": "(self, fn)",
    "ParallelOptimizer.register_reducer_post_hook": "(self, fn)",
}


def signature(name: str) -> str:
    target: Any = package
    for part in name.split("."):
        target = getattr(target, part)
    signature = inspect.signature(target)
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert signature(name) == SIGNATURES[name]


def test_every_name_of_the_guide_is_exported() -> None:
    assert set(package.__all__) >= {name.partition(".")[0] for name in SIGNATURES} | {
        "BroadcastGenFilesStrategy",
        "ComputeConfig",
        "IRGraph",
        "ReuseType",
        "register_op",
    }


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(torch.relu(self.up(x))))


@pytest.mark.parametrize("policy", ["dp", "tp", "data", "autodist"])
def test_every_policy_takes_a_world_of_one(policy: str, tmp_path: Path) -> None:
    x = torch.randn(8, 16)
    parallel_class = parallelize(Net, {"x": x}, policy, ComputeConfig(1, 1), gen_savedir=tmp_path)
    assert isinstance(parallel_class, type)
    model = parallel_class()
    optimizer = build_optimizer(model, torch.optim.AdamW, lr=1e-3)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.inference_mode():
        assert model(x).shape == (8, 16)


def test_compiling_a_class_draws_no_random_numbers(tmp_path: Path) -> None:
    """Rank 0 alone makes the module: what is drawn afterwards is the same on all ranks, a dropout's mask for one."""
    x = torch.randn(8, 16)
    before = torch.get_rng_state()
    parallelize(Net, {"x": x}, "tp", ComputeConfig(2, 2), gen_savedir=tmp_path, load_module=False)
    assert torch.equal(torch.get_rng_state(), before)


class Parent(nn.Module):
    def __init__(self, first: nn.Module, heavy: nn.Module) -> None:
        super().__init__()
        self.first, self.heavy = first, heavy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heavy(self.first(x))


@pytest.mark.parametrize("policy", ["tp", "data", "autodist"])
def test_what_is_before_a_parallel_submodule_trains_as_in_one_process(policy: str, tmp_path: Path) -> None:
    """Example 2: its input has a gradient at run time, and the dummy input says nothing of that."""
    torch.manual_seed(0)
    first, heavy, x = nn.Linear(16, 16).double(), Net().double(), torch.randn(8, 16).double()
    heavy.dropout.p = 0.0
    ends = (first, heavy, x)

    def trained(compile: Any) -> torch.Tensor:
        first, heavy, x = copy.deepcopy(ends)
        model = Parent(first, compile(heavy, x))
        optimizer = build_optimizer(model, torch.optim.SGD, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        return first.weight.detach()

    def rank() -> torch.Tensor:
        return trained(lambda heavy, x: parallelize(heavy, {"x": x}, policy, ComputeConfig(2, 2), gen_savedir=tmp_path))

    wanted = threads.run(Mesh(1), lambda: trained(lambda heavy, x: heavy))[0]
    for weight in threads.run(Mesh(2, tp=2), rank):
        torch.testing.assert_close(weight, wanted, rtol=1e-10, atol=1e-10)


EXAMPLE = """
import sys
from typing import Dict
import torch
from torch import nn
from neuronx_dist.parallelize import parallelize, ComputeConfig, build_optimizer


class LLM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.1)

    def forward(self, x):
        return self.down(self.dropout(torch.relu(self.up(x))))


class End2EndMLP(nn.Module):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.layers = torch.nn.ModuleList([])
        for _ in range(8):
            self.layers.append(nn.Linear(16, 16, bias=False))
        self.loss_fn = nn.BCELoss()

    def forward(self, data: Dict[str, torch.Tensor]):
        x = data['data']
        for layer in self.layers:
            x = layer(x)
        x = torch.sigmoid(x)
        loss = self.loss_fn(x, data['target'])
        return loss


def infer(model, x):
    model.eval()
    with torch.inference_mode():
        return model(x)


def train(model, data):
    loss_fn = nn.MSELoss()
    optimizer = build_optimizer(model, torch.optim.AdamW, lr=1e-2)
    for i, (x, y) in enumerate(data):
        model.train()
        y_pred = model(x)
        loss = loss_fn(y_pred, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_end2end(model, data):
    optimizer = build_optimizer(model, torch.optim.AdamW, lr=1e-2)
    for i, x in enumerate(data):
        model.train()
        losses = model.train_step(x)
        optimizer.step()
        optimizer.zero_grad()


def main():
    torch.manual_seed(5)  # the same on both ranks, which are one unit
    x = torch.randn(8, 16)
    data = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(4)]
    for policy in ("tp", "autodist"):
        compute_config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, use_zero=True)

        class ParallelizedLLM(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(16, 16)
                self.heavy_module = parallelize(LLM(), {'x': x}, policy, compute_config, instance_name=f"part_{policy}")

            def forward(self, x):
                return self.heavy_module(self.first(x))

        whole = parallelize(LLM, {'x': x}, policy, compute_config, instance_name=f"whole_{policy}")
        for model in (whole(), ParallelizedLLM()):
            train(model, data)
            result = infer(model, x)
            other = result.clone()
            torch.distributed.broadcast(other, 0)
            assert torch.equal(result, other), policy
            if isinstance(model, ParallelizedLLM):
                other = model.first.weight.detach().clone()
                torch.distributed.broadcast(other, 0)
                assert torch.equal(model.first.weight, other), policy
        end2end = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, use_end2end=True)
        samples = [{'data': a, 'target': torch.sigmoid(b)} for a, b in data]
        model = parallelize(End2EndMLP, {'data': samples[0]}, policy, end2end, instance_name=policy)()
        train_end2end(model, samples)
        model.eval()
        with torch.inference_mode():
            (loss,) = model.infer_step(samples[0])
        assert loss.shape == ()


if __name__ == "__main__":
    main()
"""


def run_script(folder: str) -> None:
    destroy_model_parallel()  # where there is no mesh, `parallelize` makes it
    before = os.getcwd()
    os.chdir(folder)
    try:
        runpy.run_path("train.py", run_name="__main__")
    finally:
        os.chdir(before)


@pytest.mark.slow
@pytest.mark.process
def test_the_examples_on_two_processes(tmp_path: Path) -> None:
    """Starting by torchrun is tested with our example, in test_processes.py."""
    (tmp_path / "train.py").write_text(EXAMPLE)
    processes(2).run(run_script, str(tmp_path))
    assert (tmp_path / ".nnscaler").is_dir()  # gen_savedir's default
