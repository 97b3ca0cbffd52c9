"""Every python block of docs/pipelines.md runs, in the order of the page."""

from __future__ import annotations

import re
from typing import Any

import torch

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from tests.support.paths import ROOT
from tests.support.pipeline_models import Block, Model, batch


def test_the_blocks_of_the_page_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "pipelines.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"Model": Model, "Block": Block, "batch": batch()}
    with comm.as_rank(Mesh(1), 0):
        for number, block in enumerate(blocks):
            exec(compile(block, f"docs/pipelines.md, block {number}", "exec"), names)
    assert "pipeline" in dir(nxd)
    assert len(blocks) == 9 and torch.isfinite(names["loss"]) and len(names["outputs"]) == 4
