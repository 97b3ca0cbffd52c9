"""`save_pretrained` where a rank cannot write: all ranks raise, none waits for the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neuronx_dist import hf
from neuronx_dist.comm.backends import threads
from neuronx_dist.hf import weights
from neuronx_dist.mesh import Mesh

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("what", ["folder", "weights", "config"])
def test_all_ranks_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    folder = tmp_path / "out"

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    if what == "folder":
        folder.write_text("a file")
    elif what == "weights":
        monkeypatch.setattr("safetensors.torch.save_file", full)
    else:
        monkeypatch.setattr(weights, "_write_configs", full)
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)

    def rank() -> str:
        model = hf.swap(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))
        with pytest.raises(OSError, match=f"{folder} could not be written: rank 0: ") as error:
            hf.save_pretrained(model, folder)
        return str(error.value)

    first, second = threads.run(Mesh(2, tp=2), rank)
    assert first == second and ("File exists" if what == "folder" else "No space left on device") in first
