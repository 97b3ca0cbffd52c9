"""Every python block of docs/data.md runs, in the order of the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm, hf
from tests.data.test_documents import words_tokenizer
from tests.support.llama import tiny_llama
from tests.support.paths import ROOT


def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)
    texts = [" ".join(["hi there how are you fine".split()[n % 6]] * (3 + n % 17)) for n in range(90)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with comm.as_rank(nxd.Mesh(1), 0):
        model = hf.swap(LlamaForCausalLM(tiny_llama(num_hidden_layers=1, vocab_size=32, use_cache=False)))
        names: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        names |= {"files": str(tmp_path / "texts.jsonl"), "folder": tmp_path / "run", "tokenizer": words_tokenizer()}
        for number, block in enumerate(blocks):
            exec(compile(block, f"docs/data.md, block {number}", "exec"), names)
    assert len(blocks) == 6 and names["step"] == 4 and names["batch"]["input_ids"].shape == (8, 32)
    assert [row.count(-100) for row in names["columns"]["labels"]] == [12]
