"""`neuronx-dist run`: what is seen of a job that fails, and its exit code."""

import os
import subprocess
import sys

import pytest

from neuronx_dist import __main__ as command
from tests.support.paths import ROOT

pytestmark = pytest.mark.process


@pytest.fixture
def run(tmp_path):
    """Runs a script on two processes; (exit code, stdout, stderr)."""

    def start(script, **environment):
        path = tmp_path / "script.py"
        path.write_text(script)
        words = [sys.executable, "-m", "neuronx_dist", "run", "--standalone", "--local-addr", "127.0.0.1"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
        done = subprocess.run(
            [*words, "--nproc-per-node", "2", str(path), "--flag"], env=env, capture_output=True, text=True, timeout=120
        )
        return done.returncode, done.stdout, done.stderr

    return start


def test_a_job_that_ends_well(run):
    code, out, err = run("import os, sys; os.write(1, f'{os.environ[\"RANK\"]} of 2 {sys.argv[1:]}\\n'.encode())")
    assert code == 0 and sorted(out.splitlines()) == ["0 of 2 ['--flag']", "1 of 2 ['--flag']"] and err == ""


def test_the_first_failure_is_all_that_is_seen(run):
    script = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no such layout')\ntime.sleep(60)"
    assert run(script) == (1, "", "no such layout\n")


def test_a_rank_that_a_signal_ended_is_named(run):
    script = (
        "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    )
    assert run(script) == (128 + 9, "", "neuronx-dist run: rank 1 was ended by SIGKILL\n")


def test_loglevel_shows_what_torchrun_says(run):
    code, _, err = run("import sys; sys.exit(3)", LOGLEVEL="WARNING")
    assert code == 3 and "failed (exitcode: 3)" in err


def test_help_lists_the_commands_and_the_options_of_torchrun(capsys):
    assert command.main(["--help"]) == 0
    assert "run a script on several processes" in capsys.readouterr().out
    assert command.main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: neuronx-dist run ") and "--nproc-per-node" in text
    assert command.main(["run", "--nproc-per-node"]) == 2
    assert "neuronx-dist run: error: " in capsys.readouterr().err
    assert command.main(["walk"]) == 2 and command.main([]) == 2
