"""`neuronx-dist check`: its exit codes, its JSON, and what it says of a wrong command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from neuronx_dist import __main__ as command
from tests.checking.programs import checked_models
from tests.support import forked
from tests.support.paths import ROOT, file_name

MODELS = checked_models.__file__


def run(capsys, *args: str) -> tuple[int, str, str]:
    code = command.main(["check", *args])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_exit_code_is_0_and_the_report_a_line(capsys):
    code, out, _ = run(capsys, f"{MODELS}:model_fn", "--mesh", "dp=2,tp=4")
    assert code == 0 and out.startswith("check ok: 8 ranks, level G: ") and len(out.splitlines()) == 1


@pytest.mark.slow
def test_details_are_given_on_request_and_name_no_path_of_this_machine(capsys):
    for flag in ("--details", "--verbose"):
        code, out, _ = run(capsys, f"{MODELS}:model_fn", "--mesh", "dp=2,tp=4", flag)
        assert code == 0 and "8 ranks with one program" in out and "axes of size 1" in out
        assert "trusted declarations:\n    neuronx_dist/" in out and str(ROOT) not in out


def test_the_exit_code_is_1_with_a_problem(capsys):
    code, out, _ = run(capsys, f"{MODELS}:model_fn", "--mesh", "dp=2,tp=4", "--option", "defect=twice")
    assert code == 1 and "1 problem found" in out and file_name(checked_models) in out
    code, out, _ = run(
        capsys, f"{MODELS}:model_fn", "--mesh", "dp=2,tp=4", "--option", "defect=order", "--level", "none"
    )
    assert code == 1 and "in different orders" in out
    code, out, _ = run(capsys, f"{MODELS}:model_fn", "--mesh", "dp=2,tp=4", "--time-limit", "0")
    assert code == 1 and "no verdict" in out


def test_json(capsys):
    code, out, _ = run(capsys, f"{MODELS}:model_fn", "--mesh", "tp=4", "--json")
    found = json.loads(out)
    assert code == 0 and found["ok"] and found["mesh"]["tp"] == 4


@pytest.mark.slow
def test_inputs_step_optimizer_and_options_are_names_of_the_file(capsys):
    code, out, _ = run(
        capsys, f"{MODELS}:pipeline", "--mesh", "pp=2,tp=2", "--inputs", "pipeline_inputs", "--option", "zero1=True"
    )
    assert code == 0, out
    code, out, _ = run(capsys, f"{MODELS}:model_fn", "--mesh", "dp=2,tp=4", "--step", f"{MODELS}:step")
    assert code == 1 and "the gradient of up.weight" in out
    code, out, _ = run(capsys, f"{MODELS}:model_fn", "--mesh", "tp=4", "--optimizer", "torch.optim:SGD", "--numeric")
    assert code == 0 and "equal those of one process" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["model_fn", "--mesh", "tp=4"], "names no file"),
        (["/no/such.py:model_fn", "--mesh", "tp=4"], "there is no file /no/such.py"),
        (["no.such.module:model_fn", "--mesh", "tp=4"], "cannot import no.such.module"),
        ([f"{MODELS}:no_such", "--mesh", "tp=4"], "has no 'no_such'; it has MLP, model_fn, example_inputs"),
        ([f"{MODELS}:model_fn", "--mesh", "tp4"], "'tp4' is not axis=size, such as tp=4"),
        ([f"{MODELS}:model_fn", "--mesh", "tq=4"], "unknown axes tq"),
        ([f"{MODELS}:model_fn", "--mesh", "tp=4", "--option", "x"], "--option x: write name=value"),
        ([f"{MODELS}:model_fn"], "--mesh"),
        ([f"{MODELS}:model_fn", "--mesh", "tp=4", "--level", "X"], "invalid choice"),
    ],
)
def test_a_command_that_cannot_be_understood_is_2(capsys, args, message):
    code, out, err = run(capsys, *args)
    assert code == 2 and message in err and out == ""


def test_a_file_without_example_inputs_is_told_of_the_option(capsys, tmp_path):
    (tmp_path / "bare.py").write_text("def build(): pass\n")
    code, _, err = run(capsys, f"{tmp_path / 'bare.py'}:build", "--mesh", "tp=2")
    assert code == 2 and "has no 'example_inputs'; it has build; add it, or give --inputs" in err


def test_a_module_of_the_current_folder_is_imported_by_the_console_script_too(tmp_path):
    example = Path(MODELS).read_text()
    (tmp_path / "a_module.py").write_text(example)
    script = (
        "import sys; sys.path = [p for p in sys.path if p]; from neuronx_dist.__main__ import main; sys.exit(main())"
    )
    words = ["check", "a_module:model_fn", "--inputs", "a_module:example_inputs", "--mesh", "tp=2"]
    done = forked.run(["-c", script, *words], cwd=tmp_path)
    assert done.codes == [0], done.outputs + done.errors


def test_the_help_has_an_example_that_works(capsys, tmp_path):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and "model.py" in out
    example = out.split("# model.py\n")[1].split("$ ")[0]
    (tmp_path / "model.py").write_text("\n".join(line[2:] for line in example.splitlines()))
    asked = re.search(r"\$ neuronx-dist (.*)", out)
    assert asked
    done = forked.run(["-m", "neuronx_dist", *asked[1].split()], cwd=tmp_path)
    assert done.codes == [0], done.outputs + done.errors
    expected = re.search(r"check ok: .*", out)
    assert expected and done.outputs == [f"{expected[0]}\n"], done.outputs
