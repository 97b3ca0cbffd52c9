"""`python -m neuronx_dist.xla_replay` for a function of a user's script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPT = """
import torch
from neuronx_dist import ColumnParallelLinear, RowParallelLinear, comm, materialize

def block(x):
    column = ColumnParallelLinear(8, 16, gather_output=False, device="meta")
    row = RowParallelLinear(16, 8, input_is_parallel=True, device="meta")
    model = materialize(torch.nn.Sequential(column, row), 0, device=x.device)
    loss = model(x).square().mean()
    loss.backward()
    return {"loss": loss, "gradient": column.weight.grad}

def sliced(x):
    return comm.all_reduce(x[comm.rank("tp"):][:2], "tp")

def inputs(rank):
    return (torch.ones(4, 8),)
"""


def command(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "neuronx_dist.xla_replay", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_good_program(tmp_path):
    options = ("--arguments", "script.py:inputs", "--world-size", "4", "--tp", "2", "--dump", "hlo", "--execute")
    done = command(tmp_path, "script.py:block", *options)
    assert done.returncode == 0, done.stderr
    assert "program 0, run 1 time, by ranks 0-1-2-3: 1 collectives" in done.stdout and "all-reduce add" in done.stdout
    assert "ok: ranks that run a program together have the same one" in done.stdout
    assert "rank 0 ['loss']: 0.3086" in done.stdout and "rank 0 ['gradient']: (8, 8)" in done.stdout
    dumped = sorted((tmp_path / "hlo").iterdir())
    assert [path.name for path in dumped] == [f"rank-{rank}-0.hlo" for rank in range(4)]
    assert all("replica_groups={{0,1},{2,3}}" in path.read_text() for path in dumped)


def test_a_wrong_program(tmp_path):
    options = ("--arguments", "script.py:inputs", "--world-size", "2", "--tp", "2")
    done = command(tmp_path, "script.py:sliced", *options)
    assert done.returncode == 1
    assert "WRONG: rank 1 and rank 0 would run different programs" in done.stdout
    assert "script.py:14 in sliced" in done.stdout


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "arguments, message",
    [
        (("script.py", "--world-size", "2"), "names no function"),
        (("nothing.py:f", "--world-size", "2"), "there is no file nothing.py"),
        (("script.py:nothing", "--world-size", "2"), "no attribute 'nothing'"),
        (("script.py:block", "--world-size", "3", "--tp", "2"), "not divisible by tp=2"),
    ],
)
def test_what_cannot_be_asked(tmp_path, arguments, message):
    done = command(tmp_path, *arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_function_that_returns_nothing_is_no_success(tmp_path):
    done = command(tmp_path, "script.py:inputs", "--arguments", "script.py:inputs", "--world-size", "2", "--tp", "2")
    assert done.returncode == 2 and "nothing was computed: return the tensors that count" in done.stderr
