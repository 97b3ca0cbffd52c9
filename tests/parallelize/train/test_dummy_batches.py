"""Dummy batches add nothing: no gradient, and nothing to the statistics that forward writes to buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neuronx_dist.comm import threads
from neuronx_dist.parallelize import parallelize
from tests.parallelize.support.pipelines import close, config, first, module, samples

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {  # ranks of a unit, groups of ranks, options
    "one rank": (1, 1, {}),
    "tp2": (2, 1, {"pipeline_nstages": 1}),
    "pp2": (2, 2, {"pipeline_nstages": 2}),
    "gpipe": (2, 2, {"pipeline_nstages": 2, "pipeline_scheduler": "gpipe"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_add_nothing(layout: str, tmp_path: Path) -> None:
    plan, ranks, options = LAYOUTS[layout]
    settings = config(plan, **options)
    given = samples("skip", 4)
    given[1]["x"][0, 0] = float("nan")

    def rank() -> Any:
        parallel: Any = parallelize(module("skip"), {"data": given[0]}, "hybrid", settings, gen_savedir=tmp_path)
        buffers = {name: id(x) for name, x in parallel.named_buffers()}
        results = parallel.train_step(given, [False, True, False, True])
        assert buffers == {name: id(x) for name, x in parallel.named_buffers()}
        gradients = {name: p.grad for name, p in parallel.named_parameters() if "weight" in name and plan == ranks}
        return results, gradients, {name: x.clone() for name, x in parallel.named_buffers() if "norm" in name}

    whole = module("skip")
    wanted = {number: whole(given[number]) for number in (0, 2)}
    sum(first(result) for result in wanted.values()).backward()  # type: ignore[union-attr]
    buffers = {name: x.clone() for name, x in whole.named_buffers()}
    assert int(buffers["norm.num_batches_tracked"]) == 2
    held: set[str] = set()
    for results, gradients, statistics in threads.run(settings.mesh(ranks), rank):
        close([results[number] for number in wanted], list(wanted.values()), 1e-12)
        close(results[3], whole(given[3]), 1e-12)
        close(gradients, {name: whole.get_parameter(name).grad for name in gradients}, 1e-12)
        close(statistics, {name: buffers[name] for name in statistics}, 1e-12)
        held.update(statistics)
    assert held == buffers.keys()
