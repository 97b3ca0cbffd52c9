"""Files are generated once in a job: what is reused, who gets what, and what a failure of rank 0 is to the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuronx_dist import comm, spmd
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallelize.api import parallelize
from neuronx_dist.parallelize.config import ComputeConfig
from neuronx_dist.parallelize.example import Example
from neuronx_dist.parallelize.generated.generated_files import GeneratedFilesError, GeneratedFolder
from neuronx_dist.parallelize.generated.generation import Emitted, generate
from neuronx_dist.parallelize.generated.keys import key_of
from neuronx_dist.parallelize.train.state_dicts import load_merged_state_dict
from tests.support.pool import processes

WEIGHTS = {"weight": torch.arange(4.0)}


class Net(nn.Linear):
    pass


def make_key(width=4, policy="tp"):
    return key_of(Example(Net(width, 4), {"input": torch.zeros(2, width)}), policy, ComputeConfig(2, 4))


def emitted(number):
    return lambda: Emitted({"gencode0.py": f"x = {number}", "plan.json": "{}"}, WEIGHTS)


def refused():
    raise AssertionError("this was to be reused")


def number_in(folder):
    return folder.read().module("gencode0.py").x


# What is in the folder, and what each ReuseType does then: its number stays (0), or becomes that of the call (1).
SAME, CHOICE, PROGRAM = {}, {"policy": "dp"}, {"width": 8}
REUSE = [
    ("match", SAME, 0),
    ("match", CHOICE, "policy: 'tp' -> 'dp'"),
    ("match", PROGRAM, "argument input"),
    ("override", SAME, 1),
    ("override", CHOICE, 1),
    ("override", PROGRAM, 1),
    ("moo", SAME, 0),
    ("moo", CHOICE, 1),
    ("moo", PROGRAM, 1),
    ("graph", SAME, 1),
    ("graph", CHOICE, 1),
    ("graph", PROGRAM, 1),
]


@pytest.mark.parametrize("reuse, now, result", REUSE)
def test_the_table_of_reuse(tmp_path, reuse, now, result):
    folder = GeneratedFolder(tmp_path, Net)
    generate(folder, make_key, emitted(0), reuse=reuse)
    assert number_in(folder) == 0  # an empty folder is filled by all
    other = {"weight": torch.zeros(4)}
    call = lambda: generate(  # noqa: E731
        folder,
        lambda: make_key(**now),
        lambda: refused() if result == 0 else Emitted({"gencode0.py": "x = 1"}, other),
        reuse=reuse,
    )
    if isinstance(result, str):
        with pytest.raises(GeneratedFilesError, match=f"(?s)was generated from other inputs.*{result}"):
            call()
        assert number_in(folder) == 0
        return
    assert call().module("gencode0.py").x == result
    is_reused = result == 0 or (reuse == "graph" and now is not PROGRAM)  # the graph keeps its weights
    assert torch.equal(folder.read().weights()["weight"], WEIGHTS["weight"] if is_reused else other["weight"])


@pytest.mark.parametrize("reuse", ["match", "override", "moo", "graph"])
def test_a_failed_generation_leaves_what_was_there(tmp_path, reuse):
    folder = GeneratedFolder(tmp_path, Net)
    generate(folder, make_key, emitted(0))
    with pytest.raises((ZeroDivisionError, GeneratedFilesError)):
        generate(folder, lambda: make_key(policy="dp"), lambda: 1 / 0, reuse=reuse)
    assert number_in(folder) == 0 and folder.state(make_key()) == "same"


@pytest.mark.parametrize("reuse, replaced", [("match", False), ("override", True), ("moo", True), ("graph", True)])
def test_a_damaged_folder(tmp_path, reuse, replaced):
    folder = GeneratedFolder(tmp_path, Net)
    generate(folder, make_key, emitted(0))
    (folder.path / "gencode0.py").write_text("x = 5")
    if replaced:
        assert generate(folder, make_key, emitted(1), reuse=reuse).module("gencode0.py").x == 1
    else:
        with pytest.raises(GeneratedFilesError, match="is damaged"):
            generate(folder, make_key, emitted(1), reuse=reuse)


def test_parallelize_is_called_before_a_check(tmp_path):
    """Checks a class that was made before; a call inside of the check is refused with that way out."""
    config = ComputeConfig(2, 2)

    class Loss(nn.Linear):
        def forward(self, input):
            return super().forward(input).square().sum()

    def generated():
        arguments = {"input": torch.zeros(2, 4)}
        return parallelize(Loss, arguments, "tp", config, gen_savedir=tmp_path, module_fn=lambda: Loss(4, 4))

    def build():
        return generated()()

    report = spmd.check(generated(), torch.zeros(2, 4), mesh={"tp": 2})
    assert report.ok, str(report)
    report = spmd.check(build, torch.zeros(2, 4), mesh={"tp": 2})
    assert "call it before, with the class of the module, and pass the class" in str(report)


def test_no_process_group_and_files_to_send(tmp_path):
    with pytest.raises(RuntimeError, match="broadcast_strategy='all'.*no process group"):
        generate(GeneratedFolder(tmp_path, Net), make_key, emitted(0), strategy="all")
    assert generate(GeneratedFolder(tmp_path, Net), make_key, emitted(0), load=False) is None


@pytest.mark.parametrize("strategy", ["none", "all", "no_weights", "code"])
def test_who_gets_what(tmp_path, strategy):
    """Ranks 0 and 1 share a folder, 2 and 3 another one."""

    def program():
        rank = comm.current().rank
        folder = GeneratedFolder(tmp_path / f"host{rank // 2}", Net)
        calls = []
        generated = generate(
            folder,
            lambda: calls.append("key") or make_key(),
            lambda: calls.append("emit") or emitted(rank)(),
            strategy=strategy,
            load=strategy != "none",
        )
        return calls, None if generated is None else (set(generated.files), generated.has_weights)

    results = comm.threads.run(Mesh(4), program)
    assert [calls for calls, _ in results] == [["key", "emit"], [], [], []]
    there = GeneratedFolder(tmp_path / "host1", Net).path
    names = sorted(path.name for path in there.iterdir()) if there.exists() else []
    assert (
        names
        == {
            "none": [],
            "all": ["gencode0.py", "manifest.json", "plan.json", "weights"],
            "no_weights": ["gencode0.py", "manifest.json", "plan.json"],
            "code": ["gencode0.py", "manifest.json", "plan.json"],
        }[strategy]
    )
    if strategy != "none":
        assert [result for _, result in results] == [
            ({"gencode0.py", "plan.json"}, strategy == "all" or rank < 2) for rank in range(4)
        ]
    if strategy == "all":
        generated = GeneratedFolder(tmp_path / "host1", Net).read(make_key())
        assert torch.equal(generated.weights()["weight"], WEIGHTS["weight"])
    assert not [*tmp_path.rglob("*.new")]


@pytest.mark.parametrize("strategy", ["all", "no_weights", "code"])
def test_what_is_sent_loads(tmp_path, strategy):
    scale = torch.arange(4.0)

    class Scaled(nn.Linear):
        def forward(self, input):
            return super().forward(input) * scale

    whole, x = Scaled(4, 4), torch.ones(2, 4)

    def program():
        folder = tmp_path / f"host{comm.current().rank}"
        options = {"gen_savedir": folder, "broadcast_strategy": strategy, "init_module_params": strategy == "all"}
        parallel = parallelize(whole, {"input": x}, "tp", ComputeConfig(2, 2), **options)
        load_merged_state_dict(parallel, whole.state_dict())
        return parallel(x).detach(), parallel.PROOF

    for result, proof in comm.threads.run(Mesh(2, tp=2), program):
        torch.testing.assert_close(result, whole(x).detach())
        assert proof


def test_reused_files_are_not_sent(tmp_path):
    generate(GeneratedFolder(tmp_path / "host0", Net), make_key, emitted(0))

    def program(load):
        folder = GeneratedFolder(tmp_path / f"host{comm.current().rank}", Net)
        with comm.record() as calls:
            generate(folder, make_key, refused, strategy="all", load=load)
        return [call.verb for call in calls]

    assert not [verb for verbs in comm.threads.run(Mesh(2), program, False) for verb in verbs]
    assert not (tmp_path / "host1").exists()
    with pytest.raises(GeneratedFilesError, match="has no generated files.*broadcast_strategy='all'"):
        comm.threads.run(Mesh(2), program, True)


def given(value):
    return lambda: {"weight": torch.full((4,), value), "tied": torch.full((4,), value)}


@pytest.mark.parametrize("reuse", ["match", "moo"])
def test_values_that_are_given_take_the_place_of_those_of_an_earlier_run(tmp_path, reuse):
    folder = GeneratedFolder(tmp_path, Net)
    generate(folder, make_key, emitted(3))
    generated = generate(folder, make_key, refused, reuse=reuse, values=given(5.0))
    assert torch.equal(generated.weights()["weight"], torch.full((4,), 5.0))
    assert generated.module("gencode0.py").x == 3
    assert list(generated.weights()) == ["weight"]
    before = (folder.path / "manifest.json").stat().st_ino
    generate(folder, make_key, refused, reuse=reuse, values=given(5.0))
    assert (folder.path / "manifest.json").stat().st_ino == before  # equal values are not written again
    second = generate(folder, make_key, refused, reuse=reuse)
    assert torch.equal(second.weights()["weight"], torch.full((4,), 5.0))


def test_weights_stay_as_they_were_when_another_run_replaces_them(tmp_path):
    """Rank 0 may generate the next object's files before another rank has read the weights of this one."""
    folder = GeneratedFolder(tmp_path, Net)
    first = generate(folder, make_key, emitted(3))
    generate(folder, make_key, refused, values=given(5.0))
    assert torch.equal(first.weights()["weight"], WEIGHTS["weight"])


def test_files_of_a_module_on_meta_are_generated_anew_where_values_are_given(tmp_path):
    folder = GeneratedFolder(tmp_path, Net)
    generate(folder, make_key, lambda: Emitted({"gencode0.py": "x = 0"}, None))
    assert generate(folder, make_key, emitted(1), values=given(1.0)).has_weights


@pytest.mark.parametrize("strategy", ["none", "all"])
def test_values_reach_the_other_hosts_or_are_refused(tmp_path, strategy):
    for host in ("host0", "host1"):
        generate(GeneratedFolder(tmp_path / host, Net), make_key, emitted(3))

    def program():
        folder = GeneratedFolder(tmp_path / f"host{comm.current().rank}", Net)
        generated = generate(folder, make_key, refused, strategy=strategy, values=given(7.0))
        return generated.weights()["weight"]

    if strategy == "all":
        assert all(torch.equal(x, torch.full((4,), 7.0)) for x in comm.threads.run(Mesh(2), program))
        return
    with pytest.raises(GeneratedFilesError, match="host1.*has other initial weights than on rank 0"):
        comm.threads.run(Mesh(2), program)


def test_a_shared_folder_sends_nothing(tmp_path):
    def program():
        with comm.record() as calls:
            generated = generate(GeneratedFolder(tmp_path, Net), make_key, emitted(7), strategy="all")
        return generated.module("gencode0.py").x, [call.verb for call in calls]

    assert comm.threads.run(Mesh(2), program) == [(7, []), (7, [])]


def test_files_of_another_key_on_another_host_are_refused(tmp_path):
    generate(GeneratedFolder(tmp_path / "host1", Net), lambda: make_key(policy="dp"), emitted(3))

    def program():
        generate(GeneratedFolder(tmp_path / f"host{comm.current().rank}", Net), make_key, emitted(0))

    with pytest.raises(GeneratedFilesError, match="files generated from other inputs than on rank 0"):
        comm.threads.run(Mesh(2), program)


def test_weights_that_a_host_has_stay_when_code_is_sent(tmp_path):
    for host in ("host0", "host1"):
        of_another_plan = emitted(0)()
        of_another_plan.files["gencode1.py"] = "x = 0"
        generate(GeneratedFolder(tmp_path / host, Net), make_key, lambda files=of_another_plan: files)

    def program():
        folder = GeneratedFolder(tmp_path / f"host{comm.current().rank}", Net)
        new = lambda: make_key(policy="dp")  # noqa: E731
        return generate(folder, new, emitted(1), reuse="graph", strategy="no_weights")

    for generated in comm.threads.run(Mesh(2), program):
        assert generated.module("gencode0.py").x == 1
        assert torch.equal(generated.weights()["weight"], WEIGHTS["weight"])
    for host in ("host0", "host1"):
        there = GeneratedFolder(tmp_path / host, Net).path
        assert sorted(path.name for path in there.iterdir()) == ["gencode0.py", "manifest.json", "plan.json", "weights"]


def failing(tmp_path):
    folder = GeneratedFolder(tmp_path, Net)

    def emit():
        raise ZeroDivisionError("no strategy for linear")

    try:
        generate(folder, make_key, emit, strategy="all")
    except Exception as error:
        return type(error).__name__, str(error)


def check_failure(results):
    assert results[0] == ("ZeroDivisionError", "no strategy for linear")
    assert results[1:] == [
        ("RuntimeError", "parallelize failed on rank 0: ZeroDivisionError: no strategy for linear")
    ] * (len(results) - 1)


def test_a_failure_of_rank_0_is_raised_on_all(tmp_path):
    check_failure(comm.threads.run(Mesh(4), failing, tmp_path))
    assert not GeneratedFolder(tmp_path, Net).path.exists()


@pytest.mark.slow
@pytest.mark.process
def test_a_failure_of_rank_0_is_raised_in_all_processes(tmp_path):
    check_failure(processes(2).run(failing, tmp_path, mesh={}))


def sharing(tmp_path):
    folder = GeneratedFolder(tmp_path / f"host{comm.current().rank}", Net)
    generated = generate(folder, make_key, emitted(5), strategy="all")
    return generated.module("gencode0.py").x, generated.weights()["weight"].tolist()


@pytest.mark.slow
@pytest.mark.process
def test_files_are_sent_between_processes(tmp_path):
    assert processes(2).run(sharing, tmp_path, mesh={}) == [(5, [0.0, 1.0, 2.0, 3.0])] * 2
