"""Models of other packages on sharded inputs: results and all gradients of one process; docs/shard-tensor-models.md.

`NXD_FULL=1` runs all models of the packages that are installed (`requirements-models.txt`), and with
`NXD_UPDATE_TEXTS=1` writes their rows of the page; a usual run a few of transformers.
"""

from __future__ import annotations

import os

import pytest

from tests.shard_tensor.support.models import PACKAGES
from tests.shard_tensor.support.outside_models import LAYOUTS, cells, differs, expected_of, load, rows, write

MODELS = [(package, name) for package, models in PACKAGES.items() for name in models]
FEW = {
    "LlamaForCausalLM": "2 x 2",
    "SwinForImageClassification": "2 ranks",
    "T5ForConditionalGeneration": "3 ranks, one empty",
    "SegformerForSemanticSegmentation": "2 x 2, one empty",
}


def loaded(package: str) -> None:
    if not load(package):
        pytest.skip(f"{package} is not installed: pip install --no-deps -r requirements-models.txt")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package, name", MODELS, ids=lambda each: each.replace(" ", "-"))
def test_model(package, name):
    loaded(package)
    found = cells(package, name)
    if os.environ.get("NXD_UPDATE_TEXTS"):
        write(package, name, found)
    assert rows()[package, name] == found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FEW)
def test_a_few_models(name):
    loaded("transformers")
    model = PACKAGES["transformers"][name]
    assert differs(model, LAYOUTS[FEW[name]], expected_of(model)) == ""


def test_the_page():
    table = rows()
    assert [*table] == MODELS and len(MODELS) >= 40 and len(PACKAGES) >= 5
    found = [cell for row in table.values() for cell in row]
    assert len(found) == len(MODELS) * len(LAYOUTS)
    assert found.count("exact") >= 0.98 * len(found)
