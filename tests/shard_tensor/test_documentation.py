"""docs/shard-tensor.md: its blocks run in order on 4 ranks, its table is what travels, its files are there."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import distributed, shard_tensor
from neuronx_dist.shard_tensor import (
    Replicate,
    Shard,
    ShardTensor,
    distribute_tensor,
    one_exchange,
    physicsnemo,
    report,
)
from neuronx_dist.shard_tensor.handlers import FUNCTIONS
from tests.shard_tensor.support.cases import assert_close, on_ranks
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "shard-tensor.md").read_text()
TABLE = re.findall(
    r"^\| `(.+?)` \| (.+?) \| (.+?) \|$", PAGE.partition("| function | forward |")[2].partition("\n\n")[0], re.M
)


def operands(mesh: Any, sizes: Any = None, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Names in the table's code; plain tensors where the mesh is None."""

    def part(*shape):
        whole = torch.linspace(0, 1, torch.Size(shape).numel(), dtype=dtype).view(shape).requires_grad_()
        return whole if mesh is None else distribute_tensor(whole, mesh, [Shard(2)], sizes=sizes, src=None)

    def weight(*shape):
        return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=dtype).view(shape).requires_grad_()

    return {
        "one_exchange": one_exchange,
        **{name: part(1, 4, 16, 8) for name in "xts"},
        "w": weight(4, 4, 3, 3),
        "v": weight(8, 8),
        "h": weight(16, 5),
        "F": F,
        "torch": torch,
        "Shard": Shard,
        "Replicate": Replicate,
        "mesh": mesh,
    }


def told(r: Any) -> str:
    """Formats traffic like the table: `1 exchange, 256`."""
    verbs: dict[str, int] = {}
    for each in r.calls:
        verbs[each.call.verb] = verbs.get(each.call.verb, 0) + 1
    counts = " + ".join(f"{count} {verb}" for verb, count in verbs.items())
    return f"{counts}, {r.bytes:,}" if counts else "-"


def traffic(code: str, mesh: Any) -> tuple[str, str]:
    with report() as forward:
        result = eval(code, operands(mesh))
    with report() as backward:
        if result.requires_grad:
            result.backward(torch.ones_like(result))
    assert not forward.gathers and not backward.gathers
    for r in (forward, backward):
        for total in r.by_op().values():
            assert total.predicted in (0, total.planned)  # where there is a plan, it is what was sent
    return told(forward), told(backward)


@pytest.mark.parametrize(("code", "forward", "backward"), TABLE, ids=[row[0] for row in TABLE])
def test_what_travels(code, forward, backward):
    assert on_ranks(4, partial(traffic, code))[1] == (forward, backward)


SPLITS = {2: ((11, 5), (16, 0)), 3: ((2, 9, 5), (0, 16, 0)), 4: ((1, 12, 0, 3), (0, 0, 16, 0))}


def values(code: str, mesh: Any, sizes: Any = None) -> list[torch.Tensor]:
    """The result, and the gradients of all operands."""
    given = operands(mesh, sizes, torch.float64)
    result = eval(code, given)
    leaves = [given[name] for name in "xtswvh"]
    if result.requires_grad:
        (result * result).sum().backward()
    results = [result, *(x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves)]
    return [(x.full_tensor() if isinstance(x, ShardTensor) else x).detach() for x in results]


@pytest.mark.slow  # together more than the fast tier has room for
@pytest.mark.parametrize("code", [row[0] for row in TABLE if ".redistribute" not in row[0] and "full_" not in row[0]])
def test_each_function_of_the_table_equals_one_process_at_uneven_splits(code):
    expected = values(code, None)
    for count, splits in SPLITS.items():
        for split in splits:
            for result in on_ranks(count, lambda mesh, split=split: values(code, mesh, [split])):
                for i, (actual, whole) in enumerate(zip(result, expected, strict=True)):
                    assert_close(actual, whole, f"{code} at {split}: value {i}")


def test_the_table_is_read():
    assert len(TABLE) >= 20


@pytest.mark.slow
def test_the_blocks_run_in_the_order_of_the_page():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

    def run(mesh):
        names: dict[str, Any] = {}
        for number, block in enumerate(blocks):
            exec(compile(block, f"docs/shard-tensor.md, block {number}", "exec"), names)

    on_ranks(4, run)
    assert len(blocks) == 16


def test_every_name_of_physicsnemo_is_in_its_table():
    table = PAGE.split("## PhysicsNeMo's names")[1].split("\n## ")[0]
    short = {"_wrapper": "", "parallel_region": ""}  # written once for several names
    for module, names in physicsnemo.NAMES.items():
        assert module.removeprefix("physicsnemo").removeprefix(".").split(".", 1)[-1] in table
        for name in set(names) - {"DIRECTIONS", "METHODS", "PassingHandle", "ST_AVAILABLE", "register_shard_wrappers"}:
            assert any(name.replace(*pair) in table for pair in [*short.items(), ("", "")]), f"{module}.{name}"


def test_the_files_that_it_names_are_there():
    places = [
        ROOT,
        ROOT / "docs",
        ROOT / "neuronx_dist",
        ROOT / "neuronx_dist" / "shard_tensor",
        ROOT / "examples" / "shard_tensor",
    ]
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE)) | set(re.findall(r"\]\(([^)#]+)\)", PAGE))
    assert len(named) > 25
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []


# What the two texts call, by where it is here: an attribute of an object, or the file that holds the script.
NAMES: dict[str, Any] = {
    **dict.fromkeys(
        ("DistributedManager", "ShardTensor", "scatter_tensor", "Shard", "Replicate", "Partial"), shard_tensor
    ),
    **dict.fromkeys(("DTensor", "DeviceMesh", "distribute_tensor", "distribute_module", "empty", "ones"), distributed),
    **dict.fromkeys(
        ("_spec", "to_local", "from_local", "redistribute", "placements", "backward"), shard_tensor.ShardTensor
    ),
    **dict.fromkeys(
        ("__torch_function__", "__torch_dispatch__", "register_function_handler", "register_dispatch_handler"),
        shard_tensor.ShardTensor,
    ),
    **dict.fromkeys(("mesh",), shard_tensor.ShardTensorSpec),
    **dict.fromkeys(("get_group",), shard_tensor.DeviceMesh),
    **dict.fromkeys(
        ("partition_fn", "input_fn", "output_fn"), inspect.signature(shard_tensor.distribute_module).parameters
    ),
    **dict.fromkeys(("torch.add", "torch.dot"), FUNCTIONS),
    **dict.fromkeys(("state_dict", "_apply"), torch.nn.Module),
    **dict.fromkeys(("has_torch_function", "handle_torch_function"), torch.overrides),
}
SCRIPTS = (
    *(f"vector_{name}_{what}.py" for name in ("add", "dot") for what in ("baseline", "sharded")),
    *(f"knn_brute_force_{what}.py" for what in ("baseline", "sharded", "ring_sharded")),
    *("reshape_subtract.py", "rfc.py"),
)


@pytest.mark.parametrize("name", [*NAMES, *SCRIPTS])
def test_each_name_of_the_two_texts_has_a_home(name):
    rows = PAGE.partition("## Where the tutorial's")[2]
    assert re.search(rf"`[^`]*{re.escape(name)}\b", rows), f"{name} is in no row"
    home = NAMES.get(name)
    if home is None:
        assert (ROOT / "examples" / "shard_tensor" / name).exists()
    elif home is FUNCTIONS:
        assert getattr(torch, name.partition(".")[2]) in FUNCTIONS
    else:
        assert name in home if hasattr(home, "keys") else hasattr(home, name)


def test_the_rows_of_lines_have_a_home_each():
    homes = PAGE.partition("## Where the tutorial's")[2]
    rows = re.findall(r"^\| (\d[\d, -]*) \| (.+) \| (.+) \|$", homes, re.M)
    assert len(rows) == 38  # of both tables
    headings = set(re.findall(r"^## (.+)$", PAGE, re.M))
    for lines, _, home in rows:
        for first, last in re.findall(r"(\d+)-(\d+)", lines):
            assert int(first) < int(last)
        assert set(re.findall(r'"([A-Z][^"]+)"', home)) <= headings
        for module in re.findall(r"`(neuronx_dist\.[a-z_]+)`", home):
            assert importlib.import_module(module)
        assert "`" in home or '"' in home or "not here" in home
