"""Edits the package at random, one small edit at a time, and says which of them no test notices: `make mutate`."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import psutil

from tests.mutate.choose import Recording, Recordings
from tests.mutate.edits import edits_of
from tests.mutate.equivalent import EQUIVALENT
from tests.mutate.probes import PACKAGE, numbering
from tests.support.paths import ROOT
from tests.support.source_edits import SourceEdit

__all__ = ["main", "run_tests"]

RECORDING = ROOT / ".mutate" / "recording.pickle"
_XLA = "tests/xla/"  # tests that run in an environment of their own
_PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]


class Outcome(NamedTuple):
    """The tests' answer to an edit: "survived", "killed" (by which test), "timeout"."""

    word: str
    test: str
    seconds: float


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make mutate", description=__doc__)
    parser.add_argument("-n", type=int, default=50, help="number of edits (50)")
    parser.add_argument("--seed", type=int, default=None, help="of the choice (drawn, and printed)")
    parser.add_argument("--files", nargs="*", default=[], help="files or folders to edit (the whole package)")
    parser.add_argument("--seconds", type=float, default=45.0, help="of tests, as recorded, for each edit (45)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="edits at a time (one for each core)")
    parser.add_argument("--xla", type=Path, default=None, metavar="PYTHON", help="the Python that runs tests/xla")
    parser.add_argument(
        "--record", nargs="*", metavar="TESTS", help="record what each test executes (all tests; these are added)"
    )
    parser.add_argument("--fast", action="store_true", help="record the fast tier alone")
    parser.add_argument("--only", nargs="*", default=[], metavar="FILE:LINE", help="of the edits drawn those here")
    options = parser.parse_args(argv)
    xla = options.xla.absolute() if options.xla is not None and options.xla.exists() else None  # run in copies
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory(prefix="neuronx-dist-mutate-") as folder:
        if options.record is not None or not RECORDING.exists():
            chosen = [*(options.record or []), *(["-m", "fast"] if options.fast else [])]
            recorded = record(Path(folder) / "recorded", options.workers, chosen, xla)
            adds = options.record and RECORDING.exists()
            (Recordings.load(RECORDING).with_newer(recorded) if adds else Recordings([recorded])).save(RECORDING)
        recordings = Recordings.load(RECORDING)
        recording = recordings.existing(collected(xla))
        if gone := len(recordings.tests) - len(recording.tests):
            print(f"{gone} recorded tests are gone; --record records all anew, --record TESTS some")
        edits = draw(options.n, seed, options.files, options.only)
        if xla is None:
            print("without .venv-xla (make setup-xla) no test of XLA devices runs: edits of their code survive")
        print(f"{len(edits)} edits, seed {seed}, {len(recording.tests)} tests, {options.workers} at a time", flush=True)
        outcomes = run_edits(edits, recording, Path(folder), options.seconds, options.workers, xla)
    return report(edits, outcomes, seed)


# --- what is edited ---


def draw(count: int, seed: int, files: list[str], only: Sequence[str] = ()) -> list[SourceEdit]:
    """Random edits: each line of code that has one is as probable as another. `only`: those of them at these places."""
    places: list[list[SourceEdit]] = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not files or any(path.is_relative_to(Path(file).resolve()) for file in files):
            lines: dict[int, list[SourceEdit]] = defaultdict(list)
            for edit in edits_of(name, path.read_text()):
                lines[edit.position[0]].append(edit)
            places += lines.values()
    if not places:
        raise SystemExit(f"make mutate: no code of {PACKAGE} in {' '.join(files)}")
    generator = random.Random(seed)
    generator.shuffle(places)
    edits: list[SourceEdit] = []
    for of_line in places:
        edit = generator.choice(of_line)
        if len(edits) < count and edit.compiles:
            edits.append(edit)
    return [edit for edit in edits if not only or where(edit) in only]


# --- copies of the tree ---


def copy_tree(to: Path) -> Path:
    """A copy of all that git knows or would know."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def _environment(tree: Path, **more: str) -> dict[str, str]:
    environment = dict(os.environ, PYTHONPATH=str(tree), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", **more)
    environment |= {"PYTHONUTF8": "1", "COLUMNS": "1000"}  # names of tests as they are, on one line
    return environment | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})


def run_tests(tree: Path, tests: list[str], limit: float, xla: Path | None = None) -> Outcome:
    """Runs tests in a copy, up to the first that fails: first those of the CPU, then those that need `xla`'s Python.

    What takes longer than `limit` seconds is killed.
    """
    outcome = Outcome("survived", "", 0.0)
    for python, chosen in (
        (sys.executable, [test for test in tests if not test.startswith(_XLA)]),
        (xla, [test for test in tests if test.startswith(_XLA)]),
    ):
        if python is not None and chosen and outcome.word == "survived":
            outcome = _session(python, tree, chosen, limit)
    return outcome


def _session(python: str | Path, tree: Path, tests: list[str], limit: float) -> Outcome:
    arguments = tree / "mutate-tests.txt"
    arguments.write_text("\n".join(tests))
    command = [python, *_PYTEST, "-x", f"--timeout={max(60.0, limit / 2):.0f}", f"@{arguments.name}"]
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=_environment(tree), stdout=output, stderr=output, start_new_session=True
        )
        status: int | None = None
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(limit)
        _end(process)
        output.seek(0)
        text = output.read()
    seconds = time.monotonic() - begin
    if status == 0:
        return Outcome("survived", "", seconds)
    if status is None:
        return Outcome("timeout", "", seconds)
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+::.*?)(?: - |$)", text, re.MULTILINE)
    return Outcome("killed", failed[1] if failed else "", seconds)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it started: its group, and launched ranks, which have separate groups."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --- recording, running ---


def collected(xla: Path | None) -> set[str]:
    """The names of all tests that there are."""
    names: set[str] = set()
    for python, arguments in ((sys.executable, []), (xla, [_XLA])):
        if python is not None:
            command = [python, *_PYTEST, "--collect-only", *arguments]
            output = subprocess.run(command, cwd=ROOT, env=_environment(ROOT), capture_output=True, text=True)
            if output.returncode:
                raise SystemExit(f"make mutate: the tests cannot be collected\n{output.stdout[-4000:]}{output.stderr}")
            names.update(line for line in output.stdout.splitlines() if line.startswith("tests/"))
    return names


def record(tree: Path, workers: int, tests: list[str], xla: Path | None) -> Recording:
    """All tests once, or these, with probes in the package: what each executes."""
    print("recording what each test executes: as long as `make test` and `make test-xla`", flush=True)
    copy_tree(tree)
    probes = tree / ".mutate"
    probes.mkdir()
    bases = numbering(tree)
    (probes / "numbering.json").write_text(json.dumps(bases))
    environment = _environment(tree, MUTATE_PROBES=str(probes))
    environment["PYTHONPATH"] += os.pathsep + str(tree / "tests" / "mutate" / "site")
    for python, chosen in ((sys.executable, tests), (xla, tests or [_XLA])):
        if python is None or (python is xla and not all(test.startswith(_XLA) for test in chosen)):
            continue
        command = [python, *_PYTEST, "-p", "tests.mutate.recording", "-n", str(workers), "--dist", "worksteal", *chosen]
        with (tree / "recording.log").open("w") as log:
            subprocess.run(command, cwd=tree, env=environment, stdout=log, stderr=log, check=False)
        lines = (tree / "recording.log").read_text().rstrip().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        print("\n".join([*failed, lines[-1] if lines else "no output"]), flush=True)
    recorded = [test for part in sorted(probes.glob("tests-*.pickle")) for test in pickle.loads(part.read_bytes())]
    if not recorded:
        raise SystemExit(f"make mutate: no test passed\n{(tree / 'recording.log').read_text()[-4000:]}")
    return Recording(recorded, bases, {path: (tree / path).read_text() for path in bases if path})


def run_edits(
    edits: list[SourceEdit], recording: Recordings, folder: Path, seconds: float, workers: int, xla: Path | None
) -> list[Outcome]:
    trees: SimpleQueue[Path] = SimpleQueue()
    for worker in range(workers):
        trees.put(copy_tree(folder / f"tree-{worker}"))
    passing: dict[str, bool] = {}  # test -> whether it passes, alone, without an edit

    def run(edit: SourceEdit) -> Outcome:
        if edit.changed in EQUIVALENT:
            return Outcome("equivalent", "", 0.0)
        choice = recording.choose(edit, seconds)
        tests = {test.name: test.seconds for test in choice.tests if passing.get(test.name, True)}
        limit = 120 + 10 * sum(tests.values())
        tree = trees.get()
        while True:
            with edited(tree, edit):
                outcome = run_tests(tree, [*tests], limit, xla)
                again = run_tests(tree, [outcome.test], limit, xla) if outcome.test in tests else outcome
            if outcome.test in tests and outcome.test not in passing:
                passing[outcome.test] = run_tests(tree, [outcome.test], limit, xla).word == "survived"
            if outcome.test not in tests or (again.word != "survived" and passing[outcome.test]):
                break
            del tests[outcome.test]  # it fails now and then, or always
        trees.put(tree)
        text = f"{outcome.word:9} {outcome.seconds:4.0f} s  {where(edit)}  {edit.operator}  {outcome.test}"
        if outcome.word == "survived":
            text += f"{len(tests)} tests ran, {choice.executing} execute it\n{edit.diff}"
        print(text, flush=True)
        return outcome

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, edits))


@contextmanager
def edited(tree: Path, edit: SourceEdit) -> Iterator[None]:
    """The edit is in the file inside of the `with`, and never in a compiled one."""
    path = tree / edit.path

    def write(source: str) -> None:
        path.write_text(source)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    write(edit.edited)
    try:
        yield
    finally:
        write(edit.source)


# --- report ---


def where(edit: SourceEdit) -> str:
    return f"{edit.path}:{edit.position[0]}"


def report(edits: list[SourceEdit], outcomes: list[Outcome], seed: int) -> int:
    counts = Counter(outcome.word for outcome in outcomes)
    print("\nsurvived:", *(where(edit) for edit, outcome in zip(edits, outcomes) if outcome.word == "survived"))
    noticed, survived = counts["killed"] + counts["timeout"], counts["survived"]
    print(f"seed {seed}: {noticed} of {noticed + survived} edits noticed", end="")
    print(f" ({100 * noticed / max(1, noticed + survived):.0f} %)", end="")
    print(f": {counts['timeout']} by a time limit; {survived} survived, {counts['equivalent']} more change nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
