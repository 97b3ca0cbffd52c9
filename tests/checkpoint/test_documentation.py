"""Every python block of docs/checkpoints.md runs, in the order of the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from tests.checkpoint.small_run import Net, Run
from tests.support.paths import ROOT


def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "checkpoints.md").read_text(), re.DOTALL)
    with comm.as_rank(Mesh(1), 0):
        run = Run()
        run.train()
        names: dict[str, Any] = {name: getattr(run, name) for name in ("model", "optimizer", "scheduler")}
        names |= {"folder": tmp_path, "build_model": Net}
        for number, block in enumerate(blocks):
            exec(compile(block, f"docs/checkpoints.md, block {number}", "exec"), names)
    assert len(blocks) == 8 and names["step"] == 100
