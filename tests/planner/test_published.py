"""The planner's predictions against published step times of other programs and published times of collectives.

The table of docs/planner-errors.md is that of this file. NXD_UPDATE_TEXTS=1 writes it anew, in two minutes; each test
run compares its column of presets, and the held-out errors of the B200 table.
"""

from __future__ import annotations

import os
from functools import cache

import pytest

from neuronx_dist.planner.calibration import mape, rank_correlation, regret
from neuronx_dist.planner.cluster import RINGS
from tests.planner.published import TABLES, Row, errors, fitted, predicted, published_points
from tests.support.paths import DOCS

PAGE = DOCS / "planner-errors.md"
BEGIN, END = "| source | rows |", "\n\n"
H100 = ("torchtitan, H100", "Megatron-Bridge, H100 fp8", "Megatron-LM, H100")


@cache
def b200() -> tuple[list[Row], list[Row]]:
    """The rows of Llama 70B and of 405B on B200."""
    rows = list(TABLES["SimuMax, B200"]())
    return rows[:12], rows[12:]


@pytest.mark.slow
@pytest.mark.parametrize("fit, held_out, most", [(0, 1, 0.04), (1, 0, 0.05)], ids=["70B for 405B", "405B for 70B"])
def test_a_fit_on_one_model_predicts_the_other(fit: int, held_out: int, most: float) -> None:
    """The best layout of each number of microbatches is chosen; MAPE is at most 5 %."""
    factors, rows = fitted(b200()[fit]), b200()[held_out]
    assert errors(rows, factors).mape <= most
    for number in range(3):  # of microbatches
        same = rows[number::3]
        ours = [predicted(factors, row) / row.layout.global_batch for row in same]
        theirs = [row.seconds / row.layout.global_batch for row in same]
        assert regret(ours, theirs) == 0
        assert rank_correlation(ours, theirs) >= 0.8  # two layouts of 2 and 4 % difference are exchanged in 2 of 6


def test_presets_choose_the_best_layouts_of_b200() -> None:
    """No step was fitted: the preset has the speeds of single operations."""
    for rows in b200():
        assert errors(rows, {}).mape < 0.06
        for number in range(3):
            same = rows[number::3]
            ours = [predicted({}, row) / row.layout.global_batch for row in same]
            theirs = [row.seconds / row.layout.global_batch for row in same]
            assert rank_correlation(ours, theirs) >= 0.8 and regret(ours, theirs) == 0  # two are exchanged


@pytest.mark.parametrize("nbytes, most", [(1 << 30, 0.07), (64 << 20, 0.17)], ids=["1 GiB", "64 MiB"])
def test_collectives_of_a_preset_take_what_nccl_takes(nbytes: int, most: float) -> None:
    """92 published points of 2 to 256 ranks of H100. No speed was fitted to them."""
    points = published_points(nbytes)
    ours, theirs = [point.predicted for point in points], [point.published for point in points]
    assert len(points) == 92 and rank_correlation(ours, theirs) > 0.94
    assert mape(ours, theirs) < most, [
        (*point[:3], f"{point.predicted / point.published - 1:+.0%}") for point in points
    ]
    rings = [point for point in points if point.verb in RINGS and point.hosts > 1 and point.ranks in (2, 4)]
    assert mape([point.predicted for point in rings], [point.published for point in rings]) < most * 2 / 3


@pytest.mark.slow
def test_the_page_has_these_errors() -> None:
    """Columns: presets; fitted on the rows themselves; fitted on others, of another model or of other sources."""
    page = PAGE.read_text()
    table = page[page.index(BEGIN) :].split(END)[0]
    if os.environ.get("NXD_UPDATE_TEXTS"):
        PAGE.write_text(page.replace(table, "\n".join(table.splitlines()[:2] + lines())))
        return
    for name, rows in TABLES.items():
        assert f"| {name} | {len(list(rows()))} | {errors(list(rows()), {})} |" in table


def lines() -> list[str]:
    """The rows of the page's table."""
    tables = {name: list(rows()) for name, rows in TABLES.items()}
    others = {name: [row for other in H100 if other != name for row in tables[other]] for name in H100}
    found = []
    for name, rows in tables.items():
        cells = [
            errors(rows, {}),
            errors(rows, fitted(rows)),
            errors(rows, fitted(others[name])) if name in others else "",
        ]
        if name == "SimuMax, B200, long sequences":
            cells[2] = errors(rows, fitted(tables["SimuMax, B200"]))
        found.append(f"| {name} | {len(rows)} | " + " | ".join(str(cell) or " | " for cell in cells) + " |")
    for name, fit, held_out in (("70B", 0, 1), ("405B", 1, 0)):
        cells = [errors(b200()[held_out], {}), errors(b200()[held_out], fitted(b200()[held_out]))]
        cells.append(errors(b200()[held_out], fitted(b200()[fit])))
        found.insert(
            1,
            f"| of these, Llama {'405B' if fit == 0 else '70B'}, fitted on {name} | 12 | "
            + " | ".join(map(str, cells))
            + " |",
        )
    return found
