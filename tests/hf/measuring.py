"""The columns of `docs/models.md`, measured: `python -m tests.hf.measuring [names]` writes `measured.json`."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers

from neuronx_dist import hf, spmd
from neuronx_dist.hf import UnsupportedModelError
from neuronx_dist.hf.plan_reading import read_plan
from neuronx_dist.parallelize import ComputeConfig, parallelize
from tests.hf.parity import differences, without_labels
from tests.pipeline.test_architectures import check as check_pipeline
from tests.support.architectures import MEASURED, Architecture
from tests.support.more_architectures import OF_TRANSFORMERS

__all__ = ["COLUMNS", "measure"]

TOLERANCE = 1e-10


def _equal(architecture: Architecture, tp: int, /, **options: Any) -> bool:
    found = differences(_small(architecture), architecture.inputs(), tp, **options)
    return all(value < TOLERANCE for value in found.values())


def _small(architecture: Architecture) -> Any:
    return architecture.make(2 * len(architecture.layers))


def _swap(architecture: Architecture) -> bool:
    return _equal(architecture, 2) and _equal(architecture, 4)


def _derived(architecture: Architecture) -> bool:
    inputs = without_labels(_small(architecture), architecture.inputs())
    return all(_equal(architecture, tp, plan="derived", inputs=inputs) for tp in (2, 4))


def _sequences(architecture: Architecture) -> bool:
    if architecture.name == "ViT":  # one patch and the class: two tokens
        architecture = replace(architecture, config={**architecture.config, "patch_size": 8})
    return _equal(architecture, 2, sequence_parallel=True)


def _pipeline(architecture: Architecture) -> bool:
    check_pipeline(architecture, 2, 1, layers=2 * len(architecture.layers))
    return True


def _parallelize(architecture: Architecture) -> bool:
    """Parallelizes the model, which proves types and compares values with those of one process."""
    with tempfile.TemporaryDirectory() as folder:
        config = ComputeConfig(plan_ngpus=2)
        parallelize(_small(architecture), architecture.inputs(), "tp", config, gen_savedir=folder, load_module=False)
    return True


def _padding(architecture: Architecture) -> bool:
    """Four heads, two key/value heads and a vocabulary of 32 over three ranks."""
    return _equal(architecture, 3, pad_heads=True, pad_vocab=True)


def _replication(architecture: Architecture) -> bool | None:
    """Two key/value heads on four ranks; None: it has as many as others, or attention is not sharded by heads."""
    grouped = architecture.config.get("num_key_value_heads") == 2 and read_plan(_small(architecture)).attentions
    return _equal(architecture, 4) if grouped else None


def _checked(architecture: Architecture) -> bool:
    return spmd.check(lambda: hf.swap(_small(architecture)), architecture.inputs(), {"tp": 2}).ok


COLUMNS: dict[str, Callable[[Architecture], bool | None]] = {
    "swap": _swap,
    "derived": _derived,
    "SP": _sequences,
    "pp": _pipeline,
    "parallelize": _parallelize,
    "padding": _padding,
    "replication": _replication,
    "checked": _checked,
}


def measure(architecture: Architecture, column: str) -> str:
    """Returns "yes", "no" with a remark, or "-" where the column does not apply."""
    try:
        result = COLUMNS[column](architecture)
    except UnsupportedModelError:
        return "refused"
    except Exception as error:
        print(architecture.name, column, type(error).__name__, str(error)[:300], file=sys.stderr)
        return "refused" if isinstance(error, ValueError) and str(error).startswith("swap: ") else "no"
    return "-" if result is None else "yes" if result else "no"


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    chosen = [each for each in OF_TRANSFORMERS if not sys.argv[1:] or each.name in sys.argv[1:]]
    table = json.loads(MEASURED.read_text()) if MEASURED.exists() and sys.argv[1:] else {}
    for each in chosen:
        table[each.name] = {column: measure(each, column) for column in COLUMNS}
        print(each.name, table[each.name], flush=True)
    Path(MEASURED).write_text(json.dumps(table, indent=1) + "\n")
