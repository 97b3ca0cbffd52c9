"""Every event of traces as a file, with a clock that counts how often it is asked.

`trace.txt` has what was reviewed; NXD_UPDATE_TRACE=1 writes it anew. What is true of every trace, test_trace.py says.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import NxDPPModel
from neuronx_dist.pipeline.run import trace, trace_file
from neuronx_dist.pipeline.schedule import Inference
from tests.support.pipeline_models import batch, make, on_ranks

pytestmark = pytest.mark.slow
FILE = Path(__file__).parent / "trace.txt"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A microsecond for each look at it, for each rank by itself."""
    local = threading.local()

    def now() -> int:
        local.count = getattr(local, "count", itertools.count(1_000_000, 1000))
        return next(local.count)

    for module in (trace, trace_file):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter_ns=now))


def _lines(path: Path) -> Iterator[str]:
    """By rank, in its order."""
    gc.collect()
    events = json.loads(path.read_text())
    assert events[0].keys() == {"name", "ph", "pid", "args"} and events[0]["args"].keys() == {"started"}
    for event in sorted(events[1:], key=lambda event: event["pid"]):
        yield json.dumps(event)


def _break(*_: Any) -> None:
    raise ValueError("broken")


@pytest.mark.parametrize("mesh, schedule", [(Mesh(1), "zb_v"), (Mesh(1), "1f1b")])
def test_traces_of_one_rank(mesh: Mesh, schedule: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def use(pipeline: NxDPPModel) -> None:
        pipeline.run_train(**batch(4))
        pipeline.original_module.layers[1].register_forward_hook(_break)
        with pytest.raises(ValueError, match="broken"):
            pipeline.run_eval(**copy.deepcopy(batch(4)))

    options: dict[str, Any] = dict(num_microbatches=2, output_loss_value_spec=True, schedule=schedule)
    on_ranks(mesh, make(), use, **options, trace_file_path=str(path))
    _compare(f"one rank, {schedule}", [*_lines(path)])


def test_a_trace_of_four_ranks(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def use(pipeline: NxDPPModel) -> None:
        pipeline.run_train(**batch(4))
        pipeline.run(Inference(2, 2), batch(4))

    options: dict[str, Any] = dict(num_microbatches=2, output_loss_value_spec=True, schedule="zb_h1")
    on_ranks(Mesh(4, pp=2), make(), use, **options, trace_file_path=str(path))
    _compare("four ranks", [*_lines(path)])


def _compare(label: str, now: list[str]) -> None:
    parts = dict(part.split("\n", 1) for part in FILE.read_text().split("== ")[1:]) if FILE.exists() else {}
    if os.environ.get("NXD_UPDATE_TRACE"):
        parts[label] = "\n".join(now) + "\n"
        FILE.write_text("".join(f"== {name}\n{text}" for name, text in sorted(parts.items())))
    assert now == parts[label].splitlines()
