"""Checks that a training run's files make sense: `python -m tests.support.run_folder FOLDER STEPS` says so."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM

__all__ = ["check"]


def check(folder: Path, steps: int) -> str:
    """A line about the run.

    Raises:
        AssertionError: something is missing in the folder, or is not what a run of `steps` steps leaves.
    """
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    assert len(rows) == steps, f"metrics.jsonl has {len(rows)} steps, not {steps}"
    missing = {"step", "loss", "grad_norm", "lr", "tokens_per_s"} - rows[0].keys()
    assert not missing, f"metrics.jsonl lacks {sorted(missing)}"
    finite = all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in rows)
    assert finite, "a loss or norm is not finite"
    first, last = rows[0]["loss"], rows[-1]["loss"]
    assert last < first or steps < 10, f"the loss did not fall: {first} to {last}"
    record = json.loads((folder / "run.json").read_text())
    assert record["flags"]["steps"] == steps and record["layout"] and record["versions"], f"run.json: {record}"
    images = [path for path in folder.rglob("*.png") if path.read_bytes().startswith(b"\x89PNG")]
    assert images, f"no loss curve under {folder}"
    configs = list(folder.rglob("config.json"))
    assert len(configs) == 1, f"{len(configs)} Hugging Face folders under {folder}, not 1"
    model, report = AutoModelForCausalLM.from_pretrained(configs[0].parent, output_loading_info=True)
    unfit = report["missing_keys"] or report["unexpected_keys"]
    assert not unfit, f"weights do not fit the config: {report}"
    return f"{folder.name}: {steps} steps, loss {first:.3f} to {last:.3f}, {model.num_parameters():,} parameters load"


if __name__ == "__main__":
    print(check(Path(sys.argv[1]), int(sys.argv[2])))
