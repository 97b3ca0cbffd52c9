"""The blocks of docs/lightning.md and docs/accelerate.md run as they are written, on two ranks."""

from __future__ import annotations

import logging
import re
import warnings
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from tests.hf.models import llama_config
from tests.strangers.test_wrappers import launched, without_torch_xla
from tests.support.paths import ROOT
from tests.support.pool import processes

pytest.importorskip("lightning")
STEPS = "max_steps=2, logger=False, enable_progress_bar=False, enable_model_summary=False, val_check_interval=2"


def run_blocks(page: str, numbers: list[int], folder: str) -> dict[str, float]:
    """Runs blocks one after the other in a folder with a model; returns the last metrics of the trainer, or norms."""
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    from neuronx_dist import comm
    from tests.lightning.any_module import rows

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if comm.rank("world") == 0:
        AutoModelForCausalLM.from_config(llama_config()).save_pretrained(f"{folder}/path/to/folder")
    comm.barrier()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    for number in numbers:
        names["loader"], names["held_out"] = DataLoader(rows(), batch_size=4), DataLoader(rows(1), batch_size=4)
        code = blocks[number] if number == numbers[-1] else blocks[number].partition("\ntrainer = ")[0]
        with chdir(folder):
            exec(compile(code.replace("max_steps=1000", STEPS), f"{page}, block {number}", "exec"), names)
    if "trainer" in names:
        return {name: float(value) for name, value in names["trainer"].callback_metrics.items()}
    return {"norm": float(names["norm"]), "rows": float(sum(map(len, names["predicted"])))}


def run_launched(folder: str) -> dict[str, float]:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with launched():
        return run_blocks("accelerate.md", [0], folder)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("numbers", "mesh"), [([0], {"tp": 2}), ([0, 1], {"pp": 2})], ids=str)
def test_blocks_of_lightning(numbers: list[int], mesh: dict[str, int], tmp_path: Path) -> None:
    first, second = processes(2).run(run_blocks, "lightning.md", numbers, str(tmp_path), mesh=mesh)
    assert first == second and first["val_loss"] > 1 and first["loss"] > 1
    assert (tmp_path / "checkpoints").is_dir()


@without_torch_xla
@pytest.mark.slow
@pytest.mark.process
def test_the_block_of_accelerate(tmp_path: Path) -> None:
    first, second = processes(2).run(run_launched, str(tmp_path), mesh={"tp": 2})
    assert first == second and first["norm"] > 0 and first["rows"] == 32
    assert (tmp_path / "checkpoints" / "end").is_dir()
