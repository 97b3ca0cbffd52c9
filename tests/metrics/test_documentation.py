"""Every python block of docs/metrics.md runs, in the order of the page, and its table names all figures."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm, metrics
from tests.support.llama import tiny_llama
from tests.support.paths import ROOT


def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    model = LlamaForCausalLM(tiny_llama(num_hidden_layers=1))
    handler = SimpleNamespace(callbacks=[])
    names: dict[str, Any] = {"model": model, "folder": tmp_path, "trainer": SimpleNamespace(callback_handler=handler)}
    names |= {"batch": {"input_ids": torch.zeros(2, 32)}, "train_step": lambda batch: torch.ones(())}
    with comm.as_rank(nxd.Mesh(1), 0):
        for number, block in enumerate(blocks):
            exec(compile(block, f"docs/metrics.md, block {number}", "exec"), names)
        figures = metrics.StepMeter(flops=names["flops"], peak=1.0, predicted_memory=1).figures(1, 1)
    assert set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE)) == figures.keys()
    assert len(blocks) == 3 and handler.callbacks == [names["callback"]]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3 and (tmp_path / "profile.rank0.json").exists()
