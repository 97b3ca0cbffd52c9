"""`NxDStrategy` around a user's module: losses, weights, checkpoints are those of Lightning in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf.models import llama_config, reference_model
from tests.support.pool import processes
from tests.support.synthetic import relative_error

pytest.importorskip("lightning")
from tests.lightning import any_module

LAYOUTS: dict[str, tuple[int, dict[str, Any], Any]] = {
    "dp 2, AdamW, ZeRO-1": (2, dict(), torch.optim.AdamW),
    "tp 2, SGD": (2, dict(tp=2, zero1=False), torch.optim.SGD),
    "pp 2, AdamW": (2, dict(pp=2), torch.optim.AdamW),
    "cp 2, SGD, ZeRO-1": (2, dict(cp=2), torch.optim.SGD),
    "tp 2, dp 2, SGD, ZeRO-1": (4, dict(tp=2), torch.optim.SGD),
    "pp 2, dp 2, SGD": (4, dict(pp=2, zero1=False), torch.optim.SGD),
}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    ranks, options, optimizer = LAYOUTS[name]
    alone = any_module.fit(str(tmp_path / "alone"), None, optimizer)
    mesh = {axis: size for axis, size in options.items() if axis != "zero1"}
    results = processes(ranks).run(any_module.fit, str(tmp_path / "ranks"), options, optimizer, mesh=mesh)
    before = dict(reference_model(llama_config()).named_parameters())
    assert min(relative_error(alone["weights"][key], before[key]) for key in before) > 1e-3
    assert len({*alone["rates"]}) > 2
    whole: dict[str, Any] = {}
    for result in results:
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-10)
        assert result["rates"] == pytest.approx(alone["rates"], rel=1e-12)
        for kind in ("validated", "tested"):
            assert result[kind] == pytest.approx(alone[kind], rel=1e-10)
        assert result["best"] == alone["best"]
        whole |= result["weights"]
    assert whole.keys() == alone["weights"].keys()
    assert max(relative_error(whole[key], alone["weights"][key]) for key in whole) < 1e-10
