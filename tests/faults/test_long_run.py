"""Memory, descriptors and threads of a run with ZeRO-1 and checkpoints do not grow with its steps."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.faults import long_run
from tests.support import forked

pytestmark = pytest.mark.process

MOST = 4 << 20  # bytes, which allocators keep; 300 steps that keep one gradient of 32 kB are 9.6 MB


@pytest.mark.slow
def test_nothing_grows_with_the_steps(tmp_path: Path) -> None:
    steps = 2000 if os.environ.get("NXD_FULL") == "1" else 400
    words = [long_run.__file__, str(steps), str(tmp_path)]
    result = forked.run(words, ranks=2, timeout=280)
    assert result.codes == [0, 0], result.errors
    early, late = json.loads(result.outputs[0])
    for rank, (before, after) in enumerate(zip(early, late, strict=True)):
        print(f"rank {rank}: {before} after {steps // 4} steps, {after} after {steps}")
        assert after[1:] == before[1:], (rank, before, after)
        assert after[0] - before[0] < MOST, (rank, before, after)
    assert len(os.listdir(tmp_path)) == 2
