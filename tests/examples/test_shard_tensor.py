"""The scripts of examples/shard_tensor on processes. They check themselves: here they run, and say what they found."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import handlers, report
from tests.support.paths import EXAMPLES, ROOT
from tests.support.pool import WorkerFailure, processes

pytestmark = pytest.mark.process
FOLDER = EXAMPLES / "shard_tensor"
ON_ALL_RANKS = {
    "vector_add_sharded": ["0 collectives, 0 bytes: nothing travels", "gradient of a: equal to one process"],
    "vector_dot_sharded": ["1 collective, 8 bytes", "gradient of x: equal to one process"],
    "knn_brute_force_sharded": ["distances: equal to one process", "neighbours: equal to one process"],
    "knn_brute_force_ring_sharded": ["distances: equal to one process", "neighbours: equal to one process"],
    "reshape_subtract": ["torch.Size([124, 2344, 3]), (Shard(dim=1),)", "displacements: equal to one process"],
    "conv": ["gradient of the bias: equal to one process"],
}
PAGE = (ROOT / "docs" / "shard-tensor.md").read_text()
BASELINES = ["vector_add_baseline", "vector_dot_baseline", "knn_brute_force_baseline"]


def run(name: str, *flags: str) -> str:
    """Returns the output of a script on this rank."""
    registered = dict(handlers.FUNCTIONS)
    before, path, modules = sys.argv, list(sys.path), set(sys.modules)
    sys.argv = [str(FOLDER / f"{name}.py"), *flags]
    sys.path.insert(0, str(FOLDER))
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before, path
        for new in set(sys.modules) - modules:
            if str(getattr(sys.modules[new], "__file__", "")).startswith(str(FOLDER)):
                del sys.modules[new]
        handlers.FUNCTIONS.clear()
        handlers.FUNCTIONS.update(registered)
    return output.getvalue()


def run_all(names: list[str], *flags: str) -> dict[str, str]:
    return {name: run(name, *flags) for name in names}


def refused(name: str, *flags: str) -> str:
    """With what a script ends on this rank: its last words, or argparse's exit code."""
    with contextlib.redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit) as end:
        run(name, *flags)
    return said.getvalue() + str(end.value.code)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--domain 3", "--domain 3 does not divide the number of ranks, which is 2: start the script by torchrun"),
        ("--steps 0", "argument --steps: '0' is not a positive integer"),
        ("--rows 3", "--rows 3: an even number is needed, at least 4"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_in_a_line(flags, words):
    for text in processes(2).run(refused, "train_unet", *flags.split(), initialize=False):
        assert words in text


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_the_tutorial_s_scripts(size):
    first, *others = processes(size).run(run_all, list(ON_ALL_RANKS), initialize=False)
    for name, lines in ON_ALL_RANKS.items():
        assert all(line in first[name] for line in lines), first[name]
    assert all(not text for other in others for text in other.values())


@pytest.mark.slow
@pytest.mark.parametrize(("size", "domain"), [(2, 2), (4, 2), (4, 4)])
def test_training_a_u_net(size, domain):
    """Every loss, gradient and weight is that of one process; rows that do not divide."""
    flags = ["--domain", str(domain), "--verify", "--steps", "2", "--rows", "26"]
    first, *_ = processes(size).run(run, "train_unet", *flags, initialize=False)
    assert first.count("every gradient: equal to one process") == 2
    assert "every weight: equal to one process" in first


@pytest.mark.slow
@pytest.mark.parametrize(("size", "domain"), [(2, 2), (4, 2)])
def test_training_a_vision_transformer_by_physicsnemo_s_names(size, domain):
    flags = ["--domain", str(domain), "--verify", "--steps", "2", "--rows", "20"]
    first, *_ = processes(size).run(run, "physicsnemo_vit", *flags, initialize=False)
    assert first.count("every gradient: equal to one process") == 2 and first.count("loss: equal to one process") == 2
    assert "every weight: equal to one process" in first


@pytest.mark.parametrize("name", BASELINES)
def test_what_they_are_compared_with(name):
    assert "ms a call" in run(name)


def test_the_rfc_s_blocks():
    first, *_ = processes(4).run(run, "rfc", initialize=False)
    assert first.count(": so it is\n") == 19


def test_the_rfc_s_meshes_are_of_4_ranks():
    with pytest.raises(WorkerFailure, match="needs 4 ranks, as the RFC's meshes have them, not 2"):
        processes(2).run(run, "rfc", initialize=False)


def test_a_wrong_result_stops_a_script():
    """A wrong result ends a script with an error: its check is no formality."""
    names = runpy.run_path(str(FOLDER / "tutorial.py"))
    names["expect_equal"]("x", torch.ones(2), torch.ones(2))
    with pytest.raises(SystemExit, match="x: differs from one process by 0.001, more than 1e-05"):
        names["expect_equal"]("x", torch.ones(2) + 1e-3, torch.ones(2))
    with pytest.raises(SystemExit):
        names["expect_equal"]("x", torch.ones(1), torch.ones(2))


def test_other_traffic_stops_a_script():
    names = runpy.run_path(str(FOLDER / "tutorial.py"))
    with comm.as_rank(Mesh(2), 0), report() as r:
        comm.all_reduce(torch.ones(3), "world")
    names["expect_traffic"](r, {"all_reduce": 1}, 12)
    for verbs, count in (({}, 12), ({"all_reduce": 2}, 12), ({"all_reduce": 1}, 8)):
        with pytest.raises(SystemExit, match="nothing gathered, but there was"):
            names["expect_traffic"](r, verbs, count)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 64, pytest.param(1024, marks=pytest.mark.full)])
def test_the_table_of_many_ranks(ranks):
    heading, _, row = run("scaling", "--ranks", str(ranks)).splitlines()
    assert f"\n{heading}\n" in PAGE and f"\n{row}\n" in PAGE
    assert not comm.is_initialized()


def test_a_field_that_the_ranks_do_not_divide_is_refused_in_a_line():
    assert "--ranks 3: twice the number must divide the field's first size, 4096" in refused("scaling", "--ranks", "3")
