"""Runs of the training example that are interrupted and go on: as if they had not been, to the bit."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.test_train_llama import run

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.process


def runs(scenarios: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Runs of the example, one after another: exit code and output of each."""
    words = ["-m", "tests.examples.forked_runs", json.dumps(scenarios)]
    code, text = run(words)
    assert code == 0, text
    results: list[tuple[int, str]] = json.loads(text.splitlines()[-1])
    return results


def metrics(out: Path) -> list[dict[str, Any]]:
    """What a run has written of its steps, but for the time."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "tokens_per_s"} for row in rows]


def close(own: list[dict[str, Any]], others: list[dict[str, Any]], tolerance: float) -> bool:
    return [row.keys() for row in own] == [row.keys() for row in others] and all(
        mine[name] == pytest.approx(other[name], rel=tolerance) for mine, other in zip(own, others) for name in mine
    )


def weights(out: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    return dict(model.state_dict())


def tags(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a run of six steps of a small model."""
    folder = tmp_path_factory.mktemp("model")
    config(hidden_size=32).save_pretrained(folder)
    flags = "--steps 6 --global-batch 4 --seq-len 32 --microbatches 2 --log-every 1 --data-limit 0.2 --warmup 2"
    return [*flags.split(), "--eval-every", "2", "--no-check", "--model", str(folder)]


def config(hidden_size: int) -> Any:
    sizes = dict(hidden_size=hidden_size, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    return transformers.LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes, bos_token_id=None, eos_token_id=0)


def test_a_run_that_is_ended_goes_on_to_the_bit_and_in_any_layout(small: list[str], tmp_path: Path) -> None:
    whole, out, other, sharded = (tmp_path / name for name in ("whole", "run", "other", "sharded"))
    flags = [*small, "--save-every", "2", "--keep", "0", "--out"]
    everything = runs(
        [
            {"flags": [*small, "--out", str(whole)]},
            {
                "flags": [*flags, str(out), "--resume", "auto"],
                "signals": [["step 3/6", signal.SIGTERM]],
                "copies": [str(other), str(sharded)],
            },
            {"flags": [*flags, str(out), "--resume"]},
            {"flags": [*flags, str(other), "--resume", "--tp", "2"], "ranks": 2},
            {
                "flags": [
                    *flags,
                    str(sharded),
                    "--resume",
                    "step_2",
                    "--zero1",
                    "--async-save",
                    "--checkpoint-activations",
                ],
                "ranks": 2,
            },
        ]
    )
    (_, first), (code, ended), *resumed = everything
    for text in (first, ended, *(t for _, t in resumed)):
        print(text)
    assert code == 128 + signal.SIGTERM and [code for code, _ in resumed] == [0, 0, 0]
    assert metrics(out) == metrics(whole)
