"""No device is taken for granted: tensors are where the module is, or where its mesh communicates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm, parallelize
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallelize import ComputeConfig, build_optimizer
from neuronx_dist.parallelize.train.module_tensors import device_of

# Files whose lines say "cpu", and why.
ON_CPU = {
    "cost_tables.py": "dropout saves a wider mask there",
    "composites.py": "targets are read where that waits for no device",
    "value_comparison.py": "a toy run in one process",
    "config.py": "a name of trace_strategy",
    "policies.py": "a name of costs",
    "state_dicts.py": "the mesh's device, if that is another one",
    "whole_mesh.py": "a check on fake tensors, which are there",
    "checkpoints.py": "files of nnScaler's trainer, read before they are loaded",
    "mixed_module.py": "weights of a file, read before they are loaded",
    "trainer_args.py": "weights of a file, read before they are loaded",
}


CPU = torch.device("cpu")


class Placed(nn.Module):
    """A device as the default of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, device: torch.device = CPU) -> torch.Tensor:
        return self.linear(x) + torch.ones(4, device=device)


def test_devices_as_defaults_of_arguments(tmp_path: Path) -> None:
    module, x = Placed(), torch.randn(2, 4)
    parallel: Any = parallelize.parallelize(module, {"x": x}, "dp", ComputeConfig(1, 1), gen_savedir=tmp_path)
    assert 'device=torch.device("cpu")' in parallel.SOURCE and "device=self.device" in parallel.SOURCE
    assert torch.equal(parallel(x), module(x)) and torch.equal(parallel(x, CPU), module(x))
    on_meta = parallel.to("meta")
    assert on_meta(x.to("meta"), torch.device("meta")).is_meta and on_meta(x.to("meta")).is_meta


def test_a_rank_without_tensors_is_where_its_mesh_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank() -> None:
        backend: Any = type(comm.current().backend)
        monkeypatch.setattr(backend, "device", torch.device("meta"))
        assert device_of(nn.ReLU()).type == "meta"
        assert device_of(nn.Linear(1, 1)).type == "cpu"
        optimizer = build_optimizer(nn.ReLU(), torch.optim.SGD, lr=0.1)
        assert optimizer.param_groups[0]["params"][0].is_meta
        assert optimizer.clip_gnorm().is_meta

    threads.run(Mesh(1), rank)


def test_no_file_names_the_cpu_but_these() -> None:
    folder = Path(parallelize.__file__).parent
    named = {path.name for path in folder.rglob("*.py") if re.search(r"[\"']cpu[\"']", path.read_text())}
    assert named == ON_CPU.keys()
