"""`neuronx-dist run`: what is seen of a job that fails, and its exit code."""

import logging
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from neuronx_dist import __main__ as command
from neuronx_dist.comm import run_command
from tests.support.paths import ROOT


@pytest.fixture
def run(tmp_path):
    """Runs a script on two processes; (exit code, stdout, stderr)."""

    def start(script, *options, **environment):
        path = tmp_path / "script.py"
        path.write_text(script)
        words = [sys.executable, "-m", "neuronx_dist", "run", "--standalone", "--local-addr", "127.0.0.1"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
        done = subprocess.run(
            [*words, "--nproc-per-node", "2", *options, str(path), "--flag"],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout, done.stderr

    return start


@pytest.mark.process
def test_a_job_that_ends_well(run):
    code, out, err = run("import os, sys; os.write(1, f'{os.environ[\"RANK\"]} of 2 {sys.argv[1:]}\\n'.encode())")
    assert code == 0 and sorted(out.splitlines()) == ["0 of 2 ['--flag']", "1 of 2 ['--flag']"] and err == ""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "options",
    [
        ["--standalone"],
        pytest.param(["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"], marks=pytest.mark.full),
    ],
)
def test_stores_of_one_host_listen_on_loopback(options):
    """torch's stores listen on every interface; here the launcher's and rank 0's do not. gloo has two sockets."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("the addresses of a process's sockets are read from /proc")
    words = [sys.executable, "-m", "neuronx_dist", "run", *options, "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*words, "-m", "tests.comm.listening_job"], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "listening: 4 elsewhere: []\n", done.stderr


@pytest.mark.process
def test_the_first_failure_and_its_rank_are_all_that_is_seen(run):
    script = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no such layout')\ntime.sleep(60)"
    assert run(script) == (1, "", "no such layout\nneuronx-dist run: rank 1 failed with exit code 1\n")


@pytest.mark.full
@pytest.mark.process
def test_a_rank_that_a_signal_ended_is_named(run):
    script = (
        "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    )
    assert run(script) == (128 + 9, "", "neuronx-dist run: rank 1 was ended by SIGKILL\n")


@pytest.mark.process
def test_who_has_ended_is_named_before_ranks_are_started_again(run):
    script = """
import os, signal, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
raise SystemExit(3)
"""
    again = "neuronx-dist run: rank 1 was ended by SIGKILL; restarting all ranks (restart 1 of 2)"
    third = r"neuronx-dist run: rank [01] failed with exit code 3; restarting all ranks \(restart 2 of 2\)"
    code, out, err = run(script, "--max-restarts", "2")
    assert code == 3 and out == "" and err.splitlines()[0] == again
    assert re.fullmatch(third, err.splitlines()[1]) and len(err.splitlines()) == 3


@pytest.mark.process
def test_a_rank_that_exits_by_itself_is_named_with_its_line(run):
    """The launcher ends the other rank before it notices."""
    script = """
import sys, time, neuronx_dist
neuronx_dist.init_distributed("cpu", timeout=60)
neuronx_dist.initialize_model_parallel(tensor_model_parallel_size=2)
if neuronx_dist.comm.rank("tp") == 1:
    sys.exit(3)
neuronx_dist.comm.barrier()
"""
    code, out, err = run(script)
    assert code == 3 and out == ""
    said = r"neuronx-dist run: rank 1 failed with exit code 3: sys.exit\(3\) at .*script.py:6"
    assert re.fullmatch(said, err.splitlines()[-1]), err


@pytest.mark.process
def test_a_wrong_flag_is_not_tried_again(run):
    script = "import argparse, os\nif os.environ['RANK'] == '1': argparse.ArgumentParser('train').parse_args()"
    code, _, err = run(script + "\nimport time; time.sleep(30)", "--max-restarts", "3")
    assert code == 2 and err.splitlines()[1:] == ["train: error: unrecognized arguments: --flag"]


@pytest.mark.full
@pytest.mark.process
def test_loglevel_shows_what_torchrun_says(run):
    code, _, err = run("import sys; sys.exit(3)", LOGLEVEL="WARNING")
    assert code == 3 and "failed (exitcode: 3)" in err


def test_a_scripts_options_are_no_abbreviations_of_the_launchers():
    options = run_command.arguments().parse_args(
        ["--nproc-per-node", "2", "train.py", "--nproc", "4", "--max-restarts", "3"]
    )
    assert (options.nproc_per_node, options.max_restarts) == ("2", 0)
    assert options.training_script_args == ["--nproc", "4", "--max-restarts", "3"]


def test_help_lists_the_commands_and_the_options_of_torchrun(capsys):
    assert command.main(["--help"]) == 0
    assert "run a script on several processes" in capsys.readouterr().out
    assert command.main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    examples, _, options = text.partition("The options are torchrun's:")
    assert text.startswith("usage: neuronx-dist run [options] script.py") and "--nproc-per-node" in options
    assert "$ neuronx-dist run --nproc-per-node 4 train.py" in examples and len(examples.splitlines()) < 20
    assert command.main(["run", "--nproc-per-node"]) == 2
    assert "neuronx-dist run: error: " in capsys.readouterr().err


@pytest.fixture
def torchrun(monkeypatch):
    """Errors that `torchrun.run` raises here instead of starting a job; and the levels of its loggers then."""
    loggers = {
        name: logging.getLogger(name) for name in (*run_command._LOGGERS, "torch.distributed.elastic.agent", "torch")
    }
    before = {name: logger.level for name, logger in loggers.items()}
    monkeypatch.delenv("LOGLEVEL", raising=False)
    levels = {}

    def raising(error):
        def run(args):
            levels.update({name: logger.level for name, logger in loggers.items()})
            if error is not None:
                raise error

        monkeypatch.setattr(run_command.torchrun, "run", run)
        monkeypatch.setattr(run_command.run_network, "complete", lambda args: None)
        return levels

    yield raising
    for name, logger in loggers.items():
        logger.setLevel(before[name])


def failed(exitcode, rank=3, message="", **others):
    """`message`: in the rank's error file; `others`: exit codes of more ranks, `rank0=1`, in the same second."""

    def failure(exitcode, message=""):
        file = __file__ if message else "<N/A>"  # a file that exists
        return SimpleNamespace(exitcode=exitcode, timestamp=7, message=message, error_file=file)

    error = ChildFailedError.__new__(ChildFailedError)
    error.failures = {int(name.removeprefix("rank")): failure(code) for name, code in others.items()}
    error.failures[rank] = failure(exitcode, message)
    return error


@pytest.mark.parametrize(
    "error, code, words",
    [
        (None, 0, ""),
        (failed(1), 1, "neuronx-dist run: rank 3 failed with exit code 1\n"),
        (failed(77), 77, "neuronx-dist run: rank 3 failed with exit code 77\n"),
        (failed(3, message="said"), 3, "neuronx-dist run: rank 3 failed with exit code 3: said\n"),
        (failed(3, message="said", rank0=1), 3, "neuronx-dist run: rank 3 failed with exit code 3: said\n"),
        (failed(9, rank0=-15), 9, "neuronx-dist run: rank 3 failed with exit code 9\n"),
        (failed(9, message={"message": "a dict"}), 9, "neuronx-dist run: rank 3 failed with exit code 9\n"),
        (failed(-15), 128 + 15, "neuronx-dist run: rank 3 was ended by SIGTERM\n"),
        (failed(-9, 0), 128 + 9, "neuronx-dist run: rank 0 was ended by SIGKILL\n"),
        (SignalException("", signal.SIGINT), 130, ""),
        (SignalException("", signal.SIGTERM), 128 + 15, ""),
        (KeyboardInterrupt(), 130, ""),
        (RendezvousError("late"), 1, "neuronx-dist run: the hosts could not connect: late\n"),
    ],
)
def test_exit_codes(torchrun, capsys, error, code, words):
    torchrun(error)
    assert run_command.run(None) == code
    assert capsys.readouterr() == ("", words)


@pytest.mark.parametrize("loglevel", [None, "INFO"])
def test_torchruns_own_lines_are_left_out_unless_they_are_asked_for(torchrun, monkeypatch, loglevel):
    levels = torchrun(None)
    if loglevel is not None:
        monkeypatch.setenv("LOGLEVEL", loglevel)
    run_command.run(None)
    silent = {name for name, level in levels.items() if level == logging.CRITICAL}
    assert silent == (set() if loglevel else {*levels} - {"torch"})
