"""docs/parallelize.md: its examples run, and what it shows is what is emitted."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist.parallelize
from neuronx_dist import Mesh
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig
from neuronx_dist.parallelize.emit.emitted_class import emit
from neuronx_dist.parallelize.policy.policies import POLICIES, divide
from neuronx_dist.parallelize.train.stored import stored_of
from neuronx_dist.program.decompose import decomposed
from neuronx_dist.program.record import record_program
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "parallelize.md").read_text()
BLOCKS = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_examples(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = next(code for title, code in BLOCKS.items() if title.startswith(f"Example {number}"))
    file = tmp_path / f"example_{number}.py"
    file.write_text(code)  # the key of generated files has the source of what forward runs
    compiled = compile(ast.parse(code), str(file), "exec")

    def rank() -> dict[str, torch.Tensor]:
        names: dict[str, Any] = {"__name__": f"example_{number}"}
        exec(compiled, names)
        return {name: x.detach() for name, x in names["model"].state_dict().items()}

    first, second = threads.run(Mesh(2, tp=2), rank)
    assert list(first) == list(second)
    assert all(torch.isfinite(x).all() for x in first.values())


def test_the_whole_job_of_example_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = next(code for title, code in BLOCKS.items() if title.startswith("Example 3"))
    end2end = example[: example.index("config = ")]
    file = tmp_path / "whole_job.py"
    file.write_text(f"from neuronx_dist.parallelize import explain\n{end2end}{BLOCKS['The whole job']}")
    compiled = compile(file.read_text(), str(file), "exec")
    threads.run(Mesh(2), lambda: exec(compiled, {"__name__": "whole_job"}))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def test_the_file_that_is_shown() -> None:
    module = Net()
    program = decomposed(record_program(module, {"x": torch.randn(8, 16, requires_grad=True)}, training=True))
    division = divide(program, "tp", ComputeConfig(2, 2))
    source = emit(division, name="Net", stored=stored_of(module, division))
    assert re.sub(r"test_docs\.py:\d+", "net.py", source).strip() == BLOCKS["What is emitted"].strip()


def test_every_name_is_in_the_table() -> None:
    table = PAGE[PAGE.index("## Coming from nnScaler") :]
    assert [name for name in neuronx_dist.parallelize.__all__ if f"`{name}`" not in table] == []


def test_every_policy_is_in_the_table_with_its_options() -> None:
    rows = {name: row for row in PAGE.splitlines() for name in POLICIES if row.startswith(f'| `"{name}"` |')}
    assert rows.keys() == POLICIES.keys()
    rows["hybrid"] += rows["pp"] + rows["tp"]
    rows["autodist"] += rows["pp"]
    missing = [
        (name, option)
        for name, (_, options) in POLICIES.items()
        for option in options
        if f"`{option}`" not in rows[name]
    ]
    assert missing == []
