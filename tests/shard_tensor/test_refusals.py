"""Refusals: what, where, and what to do; on all ranks alike, and none waits for another."""

from __future__ import annotations

import ast
import traceback
from pathlib import Path

import pytest

from neuronx_dist import shard_tensor
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import DeviceMesh
from tests.shard_tensor.support.name_refusals import NAME_REFUSALS
from tests.shard_tensor.support.refusals import REFUSALS as OTHER_REFUSALS

TIMEOUT = 60.0
REFUSALS = OTHER_REFUSALS | NAME_REFUSALS
FOLDER = Path(shard_tensor.__file__).parent
# Their refusals are about environment variables, names, groups and wrappers of a job: their own tests have them.
APART = {"data_parallel.py", "manager.py", "physicsnemo", "sync.py"}


@pytest.mark.parametrize("name", REFUSALS)
def test_all_ranks_refuse(name):
    function, kind, words = REFUSALS[name]

    def rank():
        mesh = DeviceMesh("cpu", [0, 1])
        with pytest.raises(kind, match=words):
            function(mesh)
        return True

    assert threads.run(Mesh(2), rank, timeout=TIMEOUT) == [True, True]


def raised_at(error: BaseException) -> set[tuple[str, int]]:
    """Files of the package and lines where an error was raised, and those that it came from."""
    places = set()
    while error is not None:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        places.add((frame.f_code.co_filename, line))
        error = error.__cause__ or error.__context__
    return places


@pytest.mark.slow
def test_each_refusal_of_the_package_has_a_case():
    def rank():
        mesh = DeviceMesh("cpu", [0, 1])
        places = set()
        for function, kind, _ in REFUSALS.values():
            with pytest.raises(kind) as caught:
                function(mesh)
            places |= raised_at(caught.value)
        return places

    first, second = threads.run(Mesh(2), rank, timeout=TIMEOUT)
    assert first == second
    statements = [
        (file, node)
        for file in sorted(FOLDER.rglob("*.py"))
        if file.relative_to(FOLDER).parts[0] not in APART
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Raise) and node.exc is not None
    ]
    missing = [
        f"{file.relative_to(FOLDER)}:{node.lineno}: {ast.unparse(node)[:150]}"
        for file, node in statements
        if not any((str(file), line) in first for line in range(node.lineno, (node.end_lineno or node.lineno) + 1))
    ]
    assert missing == [], "no case in support/refusals.py:\n" + "\n".join(missing)
