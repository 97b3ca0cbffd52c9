"""The print of a report: one line if all is well, details on request, everything as JSON."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

import neuronx_dist
from neuronx_dist.checking.report import Problem, Report

PACKAGE = str(Path(neuronx_dist.__file__).parent)
HERE = os.path.join(os.getcwd(), "scripts", "model.py")


def report(**more) -> Report:
    known = dict(operators=27, collectives=2, programs=1, runs=2, seconds=1.5)
    return Report({"pp": 1, "dp": 2, "cp": 1, "tp": 4}, **{**known, **more})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_ok_is_one_line_that_says_what_was_proven():
    assert str(report()) == "check ok: 8 ranks, level G: gradients and collectives agree"
    assert str(report(level=None)) == "check ok: 8 ranks, types not checked: collectives agree"
    many = Report({"pp": 4, "dp": 8, "cp": 1, "tp": 8}, trusted=["a.py:1: x", "a.py:2: y"], programs=8)
    assert str(many) == (
        "check ok: 256 ranks, level G: gradients, collectives and pipeline messages agree; 2 trusted declarations "
        "(report.details() lists them)"
    )
    assert many.summary("--details").endswith("2 trusted declarations (--details lists them)")


def test_where_something_was_assumed_running_it_with_values_is_recommended_by_name():
    assumed = report(assumed=[f"{HERE}:3: x is V"])
    assert "1 assumption (numeric=True tests with values)" in str(assumed)
    assert "assumed, not proven; numeric=True runs it with values" in assumed.details()
    wrong = report(assumed=[f"{HERE}:3: x is V"], problems=[Problem("types", "no")])
    assert "1 assumption: numeric=True tests with values" in str(wrong)
    run = report(assumed=[f"{HERE}:3: x is V"], numeric=True)
    assert "numeric=True" not in str(run) + run.details() and "1 assumption" in str(run)


def test_details_have_lines_with_paths_as_seen_from_here():
    text = report(
        assumed=[f"{HERE}:3: x is V"],
        trusted=[f"{PACKAGE}/parallel_layers/embedding.py:7: trusted"],
        differences=["ranks 0 and 1 differ"],
        unchecked=["pp"],
        notes=["loss and 4 gradients equal those of one process"],
    ).details()
    assert "\n    scripts/model.py:3: x is V" in text and "\n    neuronx_dist/parallel_layers/embedding.py:7" in text
    assert os.getcwd() not in text and "ranks 0 and 1 differ" in text and ": pp" in text and "4 gradients" in text


def test_json_keeps_whole_paths_and_all_fields():
    found = json.loads(report(assumed=[f"{HERE}:3: x is V"]).to_json())
    assert found["assumed"] == [f"{HERE}:3: x is V"] and found["numeric"] is False
    assert {"operators", "collectives", "world_size", "programs", "runs", "differences", "unchecked_axes"} <= {*found}


def test_a_problem_is_told_with_paths_as_seen_from_here():
    text = str(report(problems=[Problem("types", f"add at {HERE}:3 is wrong", (0,), (f"{HERE}:3",))]))
    assert text.startswith("1 problem found:") and "add at scripts/model.py:3 is wrong" in text
    assert "checked: 27 operators, 2 collectives, 8 ranks with one program, level G" in text


@pytest.mark.parametrize(("no_color", "terminal", "green"), [("", True, True), ("1", True, False), ("", False, False)])
def test_ok_is_green_on_a_terminal_only_and_not_under_no_color(monkeypatch, no_color, terminal, green):
    monkeypatch.setenv("NO_COLOR", no_color)
    file = Terminal() if terminal else io.StringIO()
    report().show(file)
    expected = str(report())
    assert file.getvalue() == (f"\033[32m{expected}\033[0m\n" if green else f"{expected}\n")


def test_problems_are_not_green(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = Terminal()
    report(problems=[Problem("types", "no")]).show(file)
    assert "\033" not in file.getvalue()


def test_details_of_what_failed_say_once_what_was_covered():
    failed = report(problems=[Problem("types", "no")], assumed=["a.py:1: x is V"])
    assert failed.details().count("27 operators") == 1 and "played in 2 runs" in failed.details()
    assert report().details().count("27 operators") == 1


def test_the_command_line_names_its_own_option():
    for problems in ([], [Problem("types", "no")]):
        for details in (False, True):
            file = io.StringIO()
            assumed = report(problems=problems, assumed=["a.py:1: x is V"])
            assumed.show(file, details=details, hint="--details", numeric="--numeric")
            assert "--numeric" in file.getvalue() and "numeric=True" not in file.getvalue()


def test_json_in_full():
    error = ValueError("no")
    problems = [Problem("types", "no", (0, 2), ("a.py:1",), error), Problem("program", "nor")]
    found = report(
        problems=problems, trusted=["t"], assumed=["a"], unchecked=["cp"], differences=["d"], notes=["n"], level="L",
        numeric=True, finished=False, seconds=1.23456,
    )  # fmt: skip
    assert found.to_dict() == {
        "ok": False, "finished": False, "level": "L", "mesh": {"pp": 1, "dp": 2, "cp": 1, "tp": 4},
        "problems": [
            {"kind": "types", "message": "no", "ranks": [0, 2], "lines": ["a.py:1"], "error": "ValueError"},
            {"kind": "program", "message": "nor", "ranks": [], "lines": []},
        ],
        "operators": 27, "collectives": 2, "world_size": 8, "programs": 1, "runs": 2, "trusted": ["t"],
        "assumed": ["a"],
        "unchecked_axes": ["cp"], "differences": ["d"], "notes": ["n"], "numeric": True, "seconds": 1.235,
    }  # fmt: skip
    assert found.to_json(indent=1) == json.dumps(found.to_dict(), indent=1)
    assert Report({}).to_dict()["level"] == "G" and Report({"tp": 2, "pp": 3}).world_size == 6


def test_a_problem_is_told_once_and_is_the_same_whatever_its_exception():
    found = report()
    for problem in (
        Problem("types", "no"),
        Problem("types", "no", (3,)),
        Problem("values", "no"),
        Problem("types", "o"),
    ):
        found.add(problem)
    assert found.problems == [Problem("types", "no"), Problem("values", "no"), Problem("types", "o")]
    assert Problem("types", "no", error=ValueError()) == Problem("types", "no") and not report(finished=False).ok
    assert "error" not in repr(Problem("types", "no", error=ValueError()))


DETAILS = """\
check ok: 1 rank, level L: gradients, collectives and pipeline messages agree; n1; n2; 1 assumption \
(V tests with values), 2 trusted declarations
  1 operator, 1 collective, 3 programs on 1 rank; played in 1 run, 2.0 s
  n1
  n2
  axes of size 1, along which there is nothing to check: cp, tp
  assumed, not proven; V runs it with values at toy size, and compares with one process:
    a
  trusted declarations:
    t
    u
  what ranks do differently, and may:
    d
    e"""
PROBLEMS = """\
2 problems found:

1. no

2. nor

stopped after 2 s, before everything was checked: no verdict on the rest
checked: 0 operators, 2 collectives, 4 ranks with one program, types not checked
1 assumption: V tests with values"""


def test_texts_in_full():
    lists = dict(assumed=["a"], trusted=["t", "u"], unchecked=["cp", "tp"], differences=["d", "e"], notes=["n1", "n2"])
    ok = Report({}, "L", operators=1, collectives=1, programs=3, runs=1, seconds=1.96, **lists)
    ok.mesh = {"pp": 2, "tp": 1}
    text = ok.details("V")
    assert text == DETAILS.replace("1 rank", "2 ranks", 1).replace("3 programs on 1 rank", "3 programs on 2 ranks")
    assert ok.summary("D", "V") == DETAILS.splitlines()[0].replace("1 rank", "2 ranks", 1) + " (D lists them)"
    wrong = Report(
        {"tp": 4}, None, [Problem("types", "no"), Problem("types", "nor")], collectives=2, seconds=2.4, finished=False,
        assumed=["a"],
    )  # fmt: skip
    assert wrong.summary(numeric="V") == PROBLEMS
    file = io.StringIO()
    wrong.show(file, numeric="V")
    assert file.getvalue() == PROBLEMS + "\n"


def test_paths_below_a_folder_alone_are_shortened(monkeypatch):
    short = report(problems=[Problem("types", f"{HERE} a{HERE} -{HERE} {os.getcwd()}2/x {PACKAGE}/a.py")]).summary()
    assert f"1. scripts/model.py a{HERE} -{HERE} {os.getcwd()}2/x neuronx_dist/a.py\n" in short
    monkeypatch.chdir("/")
    assert "/usr/a.py" in report(problems=[Problem("types", "/usr/a.py")]).summary()
