"""The tool for mutation: its edits, which tests it runs for one, and that an edit is what these tests execute."""

from __future__ import annotations

import ast
import zlib
from pathlib import Path

import pytest

from tests.mutate import probes
from tests.mutate.__main__ import copy_tree, draw, edited, run_tests, where
from tests.mutate.choose import Recording, Recordings
from tests.mutate.edits import edits_of
from tests.mutate.equivalent import EQUIVALENT
from tests.mutate.recording import Test
from tests.support.paths import ROOT
from tests.support.source_edits import SourceEdit

SOURCE = '''"""Words."""

__all__ = ["f"]
LIMITS = {"tp": 4, "dp": 2, "cp": 1}; Hook = Callable[[int, "str"], None]; KINDS = frozenset("RV", help="some")


@cache
def f(x: "int", y: int = 3, unused: int = 5, *, key="tp") -> "str":
    """More words."""
    assert x > 0
    if x < y and not y:
        raise ValueError("too small: 1")
    for name in ("a", "b", "c"):
        x += y
        x.grad = None
        if name == "a":
            continue
    event.set(True)
    with no_grad():
        g(x.clone(), y, dim=-1)
    return [z for z in x[1:] if z] if x else LIMITS[key]
'''

EDITS = {
    "comparison": {"if x <= y and not y:", 'if name != "a":'},
    "and/or": {"if x < y or not y:"},
    "negated condition": {"if not (x < y and not y):", 'if not (name == "a"):', "else LIMITS[key]", "if not (z)"},
    "dropped condition": {"if x < y:", "if not y:", "if True:", "if False:"},
    "dropped sign or not": {"x < y and (y)", "dim=(1)"},
    "constant": {"set(False)", "y: int = 4", "y: int = 2", '"tp": 5', '("a_", "b", "c")', "x[2:]", "x[0:]", "dim=-2"},
    "ignored argument": {"x += 3", "g(x.clone(), 3, dim=-1)", 'LIMITS["tp"]', "x < 3"},
    "dropped statement": {"        pass\n        x.grad", "+= y\n        pass", "no_grad():\n        pass"},
    "dropped raise": {"        pass\n    for"},
    "continue/break": {"            break"},
    "dropped context": {"if True:\n        g("},
    "dropped call": {"g(x, y, dim=-1)"},
    "dropped argument": {"g(x.clone(), y, )"},
    "swapped arguments": {"g(y, x.clone(), dim=-1)"},
    "dropped element": {"frozenset('V', help", '("a", "b", )', '("b", "c")'},
    "dropped entry": {'{"tp": 4, "cp": 1}'},
    "key": {'"tp_": 4'},
    "dropped bound": {"x[:]"},
    "dropped decorator": {"\n\n\ndef f("},
    "one branch": {"return ([z for z in x[1:] if z])", "return (LIMITS[key])"},
}


@pytest.mark.parametrize("operator", EDITS)
def test_edits(operator: str) -> None:
    results = [edit.edited for edit in edits_of("m.py", SOURCE) if edit.operator == operator and edit.compiles]
    missing = [part for part in EDITS[operator] if not any(part in result for result in results)]
    assert missing == []


def test_every_edit_changes_code_and_nothing_but_code() -> None:
    edits = [edit for edit in edits_of("m.py", SOURCE) if edit.compiles]
    assert {edit.operator for edit in edits} == set(EDITS)
    for edit in edits:
        for text in ('"""Words."""', '"""More words."""', '__all__ = ["f"]', "assert x > 0", 'x: "int"', '-> "str"'):
            assert text in edit.edited
        assert 'help="some"' in edit.edited
        assert 'Hook = Callable[[int, "str"], None]' in edit.edited
        assert "unused: int = 5" in edit.edited  # it stands there for its name
        assert '"too small: 1"' in edit.edited or edit.operator == "dropped raise"
        assert edit.changed[0] and edit.diff


@pytest.mark.slow
def test_a_seed_gives_the_same_edits_of_the_files_asked_for() -> None:
    folder = str(ROOT / "neuronx_dist" / "weights")
    first, again, other = (draw(5, seed, [folder]) for seed in (1, 1, 2))
    assert first == again != other
    assert all(edit.path.startswith("neuronx_dist/weights/") and edit.compiles for edit in [*first, *other])
    assert draw(5, 1, [folder], [where(first[3])]) == [first[3]]
    with pytest.raises(SystemExit, match="no code"):
        draw(5, 1, [str(ROOT / "docs")])


def test_probes_keep_lines_and_see_every_branch(tmp_path: Path) -> None:
    numbers = [number for number, _ in enumerate(probes.blocks(SOURCE))]
    tree = probes.instrument(SOURCE, 10)
    placed = sorted(int(ast.unparse(node.targets[0].slice)) for node in ast.walk(tree) if _is_probe(node))  # type: ignore[attr-defined]
    assert placed == [10 + number for number in numbers]
    # the function, `raise`, after it, the loop's body, `continue`, after the loop, the body of `with`, after it
    assert [block.start[0] for block in probes.blocks(SOURCE)] == [10, 12, 13, 14, 17, 18, 20, 21]


def _is_probe(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith(probes.HITS)


def recording(**hits: list[int]) -> Recordings:
    """A recording of all tests, with one part."""
    return Recordings([part(**hits)])


def part(**hits: list[int]) -> Recording:
    """A part of SOURCE as `neuronx_dist/mesh.py`, with 8 blocks; a test that executes some of them takes 1 s."""
    tests = [
        Test(
            name.replace("__", "/") + ".py::test", 1.0, zlib.compress(bytes(number in executed for number in range(8)))
        )
        for name, executed in hits.items()
    ]
    return Recording(tests, {"neuronx_dist/mesh.py": 0}, {"neuronx_dist/mesh.py": SOURCE})


def edit_at(line: int, source: str = SOURCE) -> SourceEdit:
    return next(edit for edit in edits_of("neuronx_dist/mesh.py", source) if edit.position[0] == line)


def test_the_tests_that_execute_the_edited_block_run_those_of_its_file_first() -> None:
    known = recording(tests__comm__test_a=[0, 3], tests__test_mesh=[0, 3], tests__comm__test_b=[0])
    names = [test.name for test in known.choose(edit_at(15), 10.0).tests]
    assert names == ["tests/test_mesh.py::test", "tests/comm/test_a.py::test"]
    assert len(known.choose(edit_at(15), 1.0).tests) == 1  # as many as fit into the time
    assert known.choose(edit_at(15), 1.0).executing == 2


def test_an_edit_of_a_default_or_a_constant_runs_the_tests_that_use_it() -> None:
    known = recording(tests__comm__test_a=[0], tests__test_topology=[0, 7])
    assert [test.name for test in known.choose(edit_at(8), 10.0).tests] == [test.name for test in known.tests]
    assert [test.name for test in known.choose(edit_at(4), 10.0).tests] == ["tests/test_topology.py::test"]


def test_lines_that_have_moved_are_found_again() -> None:
    known = recording(tests__test_mesh=[0, 3])
    moved = SOURCE.replace("LIMITS = ", "MORE = 1\nEVEN_MORE = 2\nLIMITS = ")
    assert [test.name for test in known.choose(edit_at(17, moved), 10.0).tests] == ["tests/test_mesh.py::test"]


def test_newer_recordings_are_added_and_tests_that_are_gone_are_dropped(tmp_path: Path) -> None:
    known = recording(tests__test_mesh=[0, 3], tests__comm__test_b=[0, 3])
    newer = known.with_newer(part(tests__comm__test_b=[0], tests__comm__test_c=[0, 3]))
    newer.save(tmp_path / "recording")
    read = Recordings.load(tmp_path / "recording")
    names = [test.name for test in read.choose(edit_at(15), 10.0).tests]
    assert names == ["tests/test_mesh.py::test", "tests/comm/test_c.py::test"]  # `test_b` executes it no more
    left = read.existing({"tests/comm/test_c.py::test", "tests/comm/test_b.py::test"})
    assert [test.name for test in left.choose(edit_at(15), 10.0).tests] == ["tests/comm/test_c.py::test"]


@pytest.mark.process
@pytest.mark.slow
def test_a_test_meets_the_edited_file(tmp_path: Path) -> None:
    """An edit that raises on import is noticed, also by processes; one that changes nothing is not."""
    tree = copy_tree(tmp_path)
    path = "neuronx_dist/axis_sizes.py"
    source = (tree / path).read_text()
    pooled = "tests/support/test_pool.py::test_results_come_by_rank"
    for new, word in (("pass\n", "survived"), ("raise RuntimeError\n", "killed")):
        end = len(source)
        with edited(tree, SourceEdit(path, "test", source, end, end, new, (1, 0))):
            assert run_tests(tree, ["tests/test_mesh.py"], 120.0).word == word
            if word == "killed":
                assert run_tests(tree, [pooled], 120.0).word == word
    assert (tree / path).read_text() == source


@pytest.mark.process
@pytest.mark.slow
def test_a_test_that_hangs_is_ended_and_what_it_started_too(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_hang.py").write_text(
        "import subprocess, time\ndef test():\n    subprocess.Popen(['sleep', '60']).wait()\n"
    )
    assert run_tests(tmp_path, ["tests/test_hang.py"], 5.0).word == "timeout"


def test_every_equivalent_edit_exists() -> None:
    """An entry whose code is gone goes as well."""
    texts = [
        " ".join(line.strip() for line in path.read_text().splitlines()) for path in ROOT.glob("neuronx_dist/**/*.py")
    ]
    gone = [old for old, _ in EQUIVALENT if not any(old in text for text in texts)]
    assert gone == []
