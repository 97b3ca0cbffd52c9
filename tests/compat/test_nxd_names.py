"""The import name `neuronx_distributed`: every public name of NxD's training half resolves, or says what to use."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.paths import ROOT

pytestmark = pytest.mark.process

GUIDE = ROOT / "docs/from-nxd.md"
NAMES = Path(__file__).with_name("nxd_names.txt")  # of NxD Core 0.18: `module: names`; "." is the package itself

WALK = """
import importlib, warnings
import neuronx_dist.compat

for line in open({path!r}).read().replace("\\n    ", " ").splitlines():
    place, _, names = line.partition(": ")
    module = importlib.import_module("neuronx_distributed" + ("" if place == "." else "." + place))
    for name in names.split():
        try:
            value = getattr(module, name)
        except AttributeError:
            print("missing", place, name)
            continue
        if isinstance(value, type) and value.__module__.partition(".")[0] == "neuronx_distributed":
            try:
                value(1, x=2)
            except NotImplementedError as error:
                print("refused", place, name, error)
            else:
                print("silent", place, name)
        else:
            print("same", place, name)
"""


def _rows(lines: list[str]) -> list[str]:
    """Returns the rows of the guide's table: one for a module, and one for each reason why names of it are not here."""
    here: dict[str, list[str]] = {}
    instead: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        kind, place, name, *rest = line.split(maxsplit=3)
        if kind == "same":
            here.setdefault(place, []).append(name)
        else:
            reason = rest[0].partition(" is not available here: ")[2]
            instead.setdefault((place, reason), []).append(name)
            here.setdefault(place, [])
    rows = []
    for place, names in here.items():
        if names:
            rows.append(f"| {place} | {', '.join(names)} | here |")
        rows += [
            f"| {place} | {', '.join(absent)} | {reason} |" for (at, reason), absent in instead.items() if at == place
        ]
    return rows


def test_every_name_of_nxd_resolves_or_says_what_to_use() -> None:
    """And the guide lists them: NXD_UPDATE_TEXTS=1 writes its table anew."""
    pytest.importorskip("lightning")
    result = forked.run(["-c", WALK.format(path=str(NAMES))])
    assert result.codes == [0], result.errors[0][-2000:]
    lines = result.outputs[0].splitlines()
    assert not [line for line in lines if line.split()[0] in ("missing", "silent")]
    for line in lines:
        assert line.startswith("same") or re.search(r"is not available here: .{20,}", line), line
    assert sum(line.startswith("same") for line in lines) > 250

    table = "\n".join(["| module | names | |", "| --- | --- | --- |", *_rows(lines)]) + "\n"
    before, _, _ = GUIDE.read_text().partition("| module | names | |\n")
    if os.environ.get("NXD_UPDATE_TEXTS"):
        GUIDE.write_text(before + table)
    assert GUIDE.read_text() == before + table


MODULES = """
import sys
import neuronx_dist.compat
import neuronx_distributed as nxd
import neuronx_distributed.parallel_layers.parallel_state as state
from neuronx_distributed.parallel_layers import layers, mappings
from neuronx_distributed.utils.batch_utils import shift_labels
import neuronx_dist

assert state is sys.modules["neuronx_distributed.parallel_layers.parallel_state"]
assert state is neuronx_dist.parallel_layers.parallel_state
assert state.__spec__.name == "neuronx_dist.parallel_layers.parallel_state"
assert layers.ColumnParallelLinear is neuronx_dist.ColumnParallelLinear
assert nxd.parallel_layers.layers is layers and nxd.utils.batch_utils.shift_labels is shift_labels
assert nxd.NxDModel.__name__ == "NxDModel" and nxd.__version__ == neuronx_dist.__version__
for text in ("import neuronx_distributed.nothing", "from neuronx_distributed.parallel_layers import nothing",
             "neuronx_dist_nothing = nxd.nothing"):
    try:
        exec(text)
    except (ImportError, AttributeError) as error:
        print(error)
"""


def test_modules_are_those_of_this_package() -> None:
    result = forked.run(["-c", MODULES])
    assert result.codes == [0], result.errors[0][-2000:]
    assert "No module named 'neuronx_distributed.nothing'" in result.outputs[0]
    assert "cannot import name 'nothing' from 'neuronx_dist.parallel_layers'" in result.outputs[0]
    assert "has no attribute 'nothing'" in result.outputs[0]


def test_the_published_package_is_not_replaced_after_its_import() -> None:
    code = (
        "import sys, types; sys.modules['neuronx_distributed'] = types.ModuleType('neuronx_distributed')\n"
        "import neuronx_dist.compat"
    )
    result = forked.run(["-c", code])
    assert result.codes != [0]
    assert "neuronx_distributed is imported already" in result.errors[0]


def test_the_older_name_of_lightning_is_reported_if_it_is_imported_already() -> None:
    pytest.importorskip("lightning")
    code = (
        "import sys, types; sys.modules['pytorch_lightning'] = types.ModuleType('pytorch_lightning')\n"
        "import neuronx_dist.compat"
    )
    result = forked.run(["-c", code])
    assert result.codes == [0] and "import neuronx_dist.compat before it" in result.errors[0]
    code = (
        "import lightning.pytorch, sys; sys.modules['pytorch_lightning'] = lightning.pytorch\n"
        "import neuronx_dist.compat"
    )
    assert "before it" not in forked.run(["-c", code]).errors[0]


def test_another_name_of_compat_installs_no_stand_in() -> None:
    """`import neuronx_dist.compat.spmd_types` imports `neuronx_dist.compat`, and is no script of NxD."""
    code = (
        "import builtins, sys; before = builtins.__import__\n"
        "import neuronx_dist.compat.spmd_types\n"
        "assert builtins.__import__ is before\n"
        "try:\n    import torch_xla\nexcept ImportError:\n    print('absent')"
    )
    result = forked.run(["-c", code])
    assert result.outputs == ["absent\n"], (result.errors, sys.version)
