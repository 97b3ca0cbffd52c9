"""Others' wrappers around ShardTensors: the values of one process, or a refusal by name; docs/shard-tensor-wrappers.md.

`support/wrapped.py` has the rows. Each runs in two of the four columns, in turn; with `NXD_FULL=1` in all. So does
`NXD_UPDATE_TEXTS=1`, which writes the row's line of the page anew.
"""

from __future__ import annotations

import os
import re

import pytest

from tests.shard_tensor.support.cases import assert_close
from tests.shard_tensor.support.wrapped import COLUMNS, ROWS, outcome, ranks_of, values_of
from tests.support.paths import ROOT
from tests.support.pool import processes

pytestmark = [pytest.mark.process, pytest.mark.slow]

PAGE = ROOT / "docs" / "shard-tensor-wrappers.md"
EAGER = "leave fullgraph=True out"
SAME_RANKS = "which reduce its gradient already: pass a mesh of other ranks"
# Words of refusals, by row and columns.
REFUSED: dict[str, dict[str, str]] = {
    "`DistributedDataParallel`": {"styles": SAME_RANKS},
    "`FullyShardedDataParallel` (FSDP1)": dict.fromkeys(COLUMNS[1:], "FullyShardedDataParallel of a ShardTensor: use"),
    "`fully_shard`": {"styles": SAME_RANKS},
    "`fully_shard` over torch's mesh": {"styles": SAME_RANKS},
    "`fully_shard` over a mesh of two dims (HSDP)": {"styles": SAME_RANKS},
    "`fully_shard(mp_policy=..)`": {"styles": SAME_RANKS},
    "`ColumnParallelLinear`, `RowParallelLinear`": {"styles": "whose mesh shares no ranks with their group"},
    "`torch.compile(.., fullgraph=True)`": dict.fromkeys(COLUMNS, EAGER),
    "`AveragedModel` (EMA)": {"styles, 2-D": "FSDP does not support deepcopy"},
    "`torch.func.grad`": dict.fromkeys(COLUMNS[2:], "a ShardTensor that torch.func transforms meets one that it does"),
    "`torch.vmap` over rows": {"distribute_module": "leaves the transformed function: pass ShardTensors"},
}


def tolerance(row: str) -> float:
    return 2e-2 if "autocast" in row or "mp_policy" in row else 1e-10  # of bfloat16


def cell(row: str, column: str) -> str:
    """Checks a row in a column, and returns its text in the table."""
    results = processes(ranks_of(row, column)).run(outcome, row, column, mesh={"tp": 2})
    words = REFUSED.get(row, {}).get(column)
    if words is not None:
        for kind, text, _ in results:
            assert words in text, f"{row}, {column}: {kind or 'not refused'}: {text}"
        (kind,) = {kind for kind, _, _ in results}
        return f"refused, {kind}"
    expected = values_of(row, None)
    for kind, text, values in results:
        assert not kind, f"{row}, {column}: {kind}: {text}"
        assert values.keys() == expected.keys()
        for name, x in expected.items():
            assert_close(values[name], x, f"{name} of {row}, {column}", tolerance(row))
    return "exact"


def name_of(row: str) -> str:
    return re.sub(r"\W+", "-", row.replace("`", "")).strip("-")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_wrapper(row):
    page = PAGE.read_text()
    if os.environ.get("NXD_UPDATE_TEXTS"):
        line = " | ".join((f"| {row}", *(cell(row, column) for column in COLUMNS), f"`{name_of(row)}` |"))
        page = re.sub(rf"^\| {re.escape(row)} \|.*$", lambda _: line, page, flags=re.M)
        PAGE.write_text(page)
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {row} | "))
    texts = dict(zip(("row", *COLUMNS, "test"), line.strip("| ").split(" | "), strict=True))
    assert texts["test"] == f"`{name_of(row)}`"
    columns = COLUMNS if os.environ.get("NXD_FULL") else COLUMNS[list(ROWS).index(row) % 2 :: 2]
    for column in columns:
        assert texts[column] == cell(row, column), column


def test_the_page_has_each_row_once():
    rows = re.findall(r"^\| (`.+?) \| ", PAGE.read_text(), re.M)
    assert rows == [*ROWS]
