"""Lowered programs as texts: their collectives, whether these fit a mesh, where two programs part, what runs together.

No torch_xla is needed: the texts are written here. Real ones are lowered in `tests/xla`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from neuronx_dist import Mesh
from neuronx_dist.comm.backends.xla import Issued
from neuronx_dist.xla_replay import ProgramsDiffer, Replayed, ReplayedLoop, ReplicaGroupsWrong, __main__, replaying
from neuronx_dist.xla_replay.alignment import align
from neuronx_dist.xla_replay.programs import Collective, Program, check_groups, check_one_program, table
from neuronx_dist.xla_replay.replaying import ProgramRun, ran_together
from neuronx_dist.xla_replay.traces import DeviceValue, Launch, LoweredStep, RankTrace, from_array, to_array
from neuronx_dist.xla_replay.worker import WorkerError
from tests.support.reviewed import assert_reviewed

MESH = Mesh(4, tp=2)  # tp {0,1} {2,3}, dp {0,2} {1,3}
STAGES = Mesh(4, tp=2, pp=2)
HEAD = """\
HloModule IrToHlo.9, entry_computation_layout={(f32[4,2]{1,0})->(f32[4,2]{1,0})}

%AddComputation.3 (x.4: f32[], y.5: f32[]) -> f32[] {
  %x.4 = f32[] parameter(0)
  %y.5 = f32[] parameter(1)
  ROOT %add.6 = f32[] add(f32[] %x.4, f32[] %y.5)
}

%MaxComputation.3 (x.4: f32[], y.5: f32[]) -> f32[] {
  ROOT %maximum.6 = f32[] maximum(f32[] %x.4, f32[] %y.5)
}

ENTRY %IrToHlo.9 (p0.1: f32[4,2]) -> (f32[4,2]) {
  %p0.1 = f32[4,2]{1,0} parameter(0), metadata={op_type="xla__device_data" source_file="a.py" source_line=3}
"""
SUM = (
    "  %all-reduce.7 = (f32[4,2]{1,0}, f32[]) all-reduce(f32[4,2]{1,0} %p0.1, f32[] %token.2), replica_groups=GROUPS, "
    'constrain_layout=true, to_apply=%AddComputation.3, metadata={op_name="nxd-0-all_reduce" source_file="a.py" '
    "source_line=7}\n"
)
TAIL = "  ROOT %tuple.8 = (f32[4,2]{1,0}) tuple(f32[4,2]{1,0} %get-tuple-element.7)\n}\n"
TP, DP = ((0, 1), (2, 3)), ((0, 2), (1, 3))


def braces(groups: Any) -> str:
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


def issued(number: int = 0, verb: str = "all_reduce", axis: str = "tp", groups: Any = TP, sites: Any = None) -> Issued:
    sites = ("model.py:7 in forward", "train.py:1 in main") if sites is None else sites
    return Issued(number, verb, axis, groups, (4, 2), torch.float32, sites)


def program(*lines: str, calls: Any = None, groups: Any = TP) -> Program:
    body = "".join(lines or [SUM]).replace("GROUPS", braces(groups))
    calls = [issued(groups=groups)] if calls is None else calls
    return Program(HEAD + body + TAIL, body.encode(), calls)


LINES = {
    "a sum": SUM,
    "of two": "  %all-reduce.7 = (f32[4,2]{1,0}, bf16[3]{0}, f32[]) all-reduce(f32[4,2]{1,0} %a, bf16[3]{0} %b, "
    "f32[] %t), replica_groups={{0,1},{2,3}}, to_apply=%MaxComputation.3\n",
    "without a token": "  ROOT %all-reduce = pred[] all-reduce(pred[] %a), replica_groups={}, to_apply=%Unknown.1\n",
    "a gather": '  %ag.7 = s64[2,4]{1,0} all-gather(s64[1,4]{1,0} %a), replica_groups={{0,2},{1,3}}, dimensions={0}, '
    'metadata={op_name="nxd-1-all_gather"}\n',
    "a scatter": "  %rs.7 = f16[2]{0} reduce-scatter(f16[4]{0} %a), replica_groups={{0,1,2,3}}, dimensions={0}, "
    "to_apply=%AddComputation.3\n",
    "an exchange": "  %a2a.1 = u8[4]{0} all-to-all(u8[4]{0} %a), replica_groups={{0,1}}, dimensions={0}\n",
    "a permutation": "  %cp.1 = c64[2]{0} collective-permute(c64[2]{0} %a), source_target_pairs={{0,3},{3,1}}\n",
    "complex": "  %cp.1 = c128[2]{0} collective-permute(c128[2]{0} %a), source_target_pairs={{0,3}}\n",
    "four bits": "  %cp.1 = s4[6]{0} collective-permute(s4[6]{0} %a), source_target_pairs={{0,3}}\n",
    "eight bits": "  %cp.1 = f8e4m3[6]{0} collective-permute(f8e4m3[6]{0} %a), source_target_pairs={{0,3}}\n",
    "a label of a call that is not known": SUM.replace("nxd-0-", "nxd-7-"),
}  # fmt: skip


def test_collectives_of_a_program() -> None:
    calls = [issued(), issued(1, "all_gather", "dp", sites=())]
    texts = {}
    for name, line in LINES.items():
        (one,) = program(line, calls=calls).collectives
        shown = f"{one}; {one.operand}; {one.kind} {one.op} {one.groups} {one.dtype} {one.shape} {one.nbytes} bytes "
        texts[name] = f"{shown}{one.axis} {one.number} {one.operands} {one.sites}"
    many = program(*LINES.values(), calls=calls)
    texts["a table"] = table(many)
    texts["a table of none"] = table(program("  %x = f32[] constant(0)\n"))
    texts["described"] = "\n".join(__main__._described(text) for text in (many, program("  %x = f32[] constant(0)\n")))
    assert_reviewed(Path(__file__).with_name("expected_collectives.txt"), texts)
    assert many.counts() == Counter(
        {("all-reduce", "tp"): 1, ("all-reduce", None): 3, ("all-gather", "dp"): 1, ("reduce-scatter", None): 1,
         ("all-to-all", None): 1, ("collective-permute", None): 4}
    )  # fmt: skip


def test_what_makes_two_programs_the_same() -> None:
    """All but where they come from."""
    one, other = program(), program(SUM.replace("source_line=7", "source_line=8"))
    assert one.lines == other.lines and one.fingerprint == other.fingerprint and one.text != other.text
    assert program(SUM.replace("4,2", "4,3")).fingerprint != one.fingerprint
    check_one_program([one, other, one], [0, 1, 2])


CONSTANT = '  %c.{n} = f32[] constant({value}), metadata={{op_type="prim" source_file="b.py" source_line={value}}}\n'


def test_where_two_programs_part() -> None:
    def message_of(one: Program, other: Program, context: str = "") -> str:
        with pytest.raises(ProgramsDiffer) as error:
            check_one_program([one, one, other], [4, 5, 7], context)
        return str(error.value)

    first, second = (CONSTANT.format(n=n, value=n) for n in (2, 3))
    dp = issued(1, "all_gather", "dp", DP, ("model.py:9 in forward",))
    texts = {
        "a number": message_of(program(first, SUM), program(second, SUM), " in step 0"),
        "an instruction more": message_of(program(first), program(first, SUM)),
        "an instruction less": message_of(program(SUM, first, calls=[]), program(SUM, calls=[])),
        "other groups": message_of(program(), program(groups=DP)),
        "a call more": message_of(program(), program(SUM, SUM.replace("nxd-0-", "nxd-1-"), calls=[issued(), dp])),
        "another call": message_of(program(), program(SUM.replace("4,2", "2,4"), calls=[dp])),
        "calls that nobody can place": message_of(
            program(SUM, calls=[issued(sites=())]), program(SUM.replace("4,2", "2,4"), calls=[issued(sites=())])
        ),
        "without metadata": message_of(
            program("  %c.2 = f32[] constant(1)\n"), program("  %c.2 = f32[] constant(2)\n", calls=[])
        ),
        "a long line": message_of(program("  %c = " + "x" * 400 + "\n", calls=[]), program(first, calls=[])),
    }
    assert_reviewed(Path(__file__).with_name("expected_partings.txt"), texts)
    # Numbers in names say nothing: what differs is the constant behind them.
    other = message_of(program(SUM, first), program(SUM.replace("all-reduce.7", "all-reduce.17"), second))
    assert "b.py:3" in other and "a.py:7" not in other


GROUPS = {
    "of tp": (SUM, TP, None), "of dp": (SUM, DP, None), "of the world": (SUM, ((0, 1, 2, 3),), None),
    "of one": (SUM, ((0,), (1,), (2,), (3,)), None), "all": (SUM, (), None),
    "of a call": (SUM, ((0, 3), (1, 2)), [issued(groups=((0, 3), (1, 2)))]),
    "permuted": (LINES["a permutation"], (), None),
}  # fmt: skip
WRONG = {
    "of no axis": (SUM, ((0, 3), (1, 2)), [issued(groups=TP)]),
    "not all": (SUM, ((0, 1),), []),
    "too many": (SUM, ((0, 1), (2, 5)), []),
    "from one twice": (
        "  %cp.1 = s8[2]{0} collective-permute(s8[2]{0} %a), source_target_pairs={{0,3},{0,1}}\n", (), []
    ),
    "to one twice": ("  %cp.1 = s8[2]{0} collective-permute(s8[2]{0} %a), source_target_pairs={{0,3},{2,3}}\n", (), []),
    "to nobody": ("  %cp.1 = s8[2]{0} collective-permute(s8[2]{0} %a), source_target_pairs={{0,4}}\n", (), []),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_groups_that_fit(name: str) -> None:
    line, groups, calls = GROUPS[name]
    check_groups(program(line, groups=groups, calls=[] if calls is None else calls), MESH, range(4))


def test_groups_that_do_not_fit() -> None:
    texts = {}
    for name, (line, groups, calls) in WRONG.items():
        with pytest.raises(ReplicaGroupsWrong) as error:
            check_groups(program(line, groups=groups, calls=calls), MESH, range(4))
        texts[name] = str(error.value)
    one_stage = program(SUM, groups=((0, 1),), calls=[issued(groups=((0, 1),))])
    check_groups(one_stage, STAGES, (0, 1))
    with pytest.raises(ReplicaGroupsWrong) as error:
        check_groups(one_stage, STAGES, (2, 3))
    texts["of another stage"] = str(error.value)
    assert_reviewed(Path(__file__).with_name("expected_groups.txt"), texts)


# --- which ranks run a program together

WITHIN = program()  # groups of tp, of both stages
BETWEEN = program(LINES["a permutation"].replace("{{0,3},{3,1}}", "{{0,2},{1,3}}"), calls=[])
ALONE = program("  %c.2 = f32[] constant(1)\n", calls=[])
NUMBERED = program(
    LINES["a permutation"].replace("{{0,3},{3,1}}", '{{0,2}}, metadata={op_name="nxd-0-permute"}'),
    calls=[issued(0, "permute", "pp", ((0, 2), (1, 3)))],
)


def launches(*programs: Program) -> list[Launch]:
    return [Launch(program, [], []) for program in programs]


def test_programs_of_stages_and_between_them() -> None:
    first, second = launches(ALONE, NUMBERED, WITHIN), launches(NUMBERED, ALONE)
    joints = align([first, first, second, second], STAGES, "step 0")
    assert [(joint.program, joint.ranks) for joint in joints] == [
        (ALONE, (0, 1)), (NUMBERED, (0, 1, 2, 3)), (ALONE, (2, 3)), (WITHIN, (0, 1)),
    ]  # fmt: skip
    assert joints[1].launches == (first[1], first[1], second[0], second[0])
    assert [joint.ranks for joint in align([launches(WITHIN)] * 4, MESH, "")] == [(0, 1, 2, 3)]
    everywhere = program(SUM, groups=(), calls=[])
    assert [joint.ranks for joint in align([launches(everywhere)] * 4, STAGES, "")] == [(0, 1, 2, 3)]
    assert align([[]] * 4, STAGES, "") == []
    crossing = [joint.ranks for joint in align([launches(BETWEEN)] * 4, STAGES, "")]
    assert crossing == [(0, 1, 2, 3)]


def test_ranks_that_wait_for_each_other() -> None:
    texts = {}
    for name, of_ranks in {
        "one transfer too many": [launches(NUMBERED), *[launches(NUMBERED, NUMBERED)] * 3],
        "one has ended": [launches(ALONE), launches(ALONE), launches(NUMBERED), launches(NUMBERED)],
        "no collective": [launches(ALONE), [], [], []],
    }.items():
        with pytest.raises(ProgramsDiffer) as error:
            align(of_ranks, STAGES, "step 3")
        texts[name] = str(error.value)
    assert_reviewed(Path(__file__).with_name("expected_waits.txt"), texts)
    with pytest.raises(ProgramsDiffer, match="^rank 1 and rank 0 would run different programs in step 3\n"):
        align([launches(ALONE), launches(WITHIN), [], []], STAGES, "step 3")
    with pytest.raises(ReplicaGroupsWrong):
        align([launches(program(SUM, groups=((0, 3), (1, 2)), calls=[]))] * 4, MESH, "")


# --- what comes of a replay


def trace(*programs: Program) -> RankTrace:
    return RankTrace({}, LoweredStep([]), [LoweredStep(launches(*programs))])


def test_programs_and_their_runs() -> None:
    programs, runs = ran_together([trace(ALONE, WITHIN, ALONE)] * 4, MESH)
    assert programs == [ALONE, WITHIN]
    assert runs == [ProgramRun(0, (0, 1, 2, 3)), ProgramRun(1, (0, 1, 2, 3)), ProgramRun(0, (0, 1, 2, 3))]
    replayed = Replayed([], programs, runs)
    assert replayed.table() == f"{table(ALONE)}\n\n{table(WITHIN)}" and Replayed([], [ALONE], []).program is ALONE
    with pytest.raises(RuntimeError) as error:
        _ = replayed.program
    assert str(error.value) == "there are 2 programs, not one: read `replay(...).programs`"
    loop = ReplayedLoop([], [], programs, [[runs[0]], [runs[0], runs[1]], [runs[1], runs[0]]], [], [])
    assert loop.compiled == [1, 1, 0]


def test_values_go_over_as_arrays() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        x = torch.tensor([[0, 1], [2, 3]]).to(dtype).t().requires_grad_(dtype.is_floating_point)
        name, array = to_array(x)
        again = from_array((name, array))
        assert name == str(dtype).removeprefix("torch.") and again.dtype == dtype and torch.equal(again, x.detach())
        array[...] = 0
        assert torch.equal(again, x.detach())  # memory of its own
    assert (
        RankTrace({}, (setup := LoweredStep([])), []).last is setup and trace(ALONE).last.launches[0].program is ALONE
    )


def test_values_are_kept_until_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs; the second takes what the first gives. What lowering has computed is not run."""
    asked: list[Any] = []

    class Executing:
        def ask(self, request: Any) -> Any:
            asked.append(request)
            return [[to_array(torch.tensor(10.0 * len(asked) + rank))] for rank in request.ranks]

    monkeypatch.setitem(replaying._workers, "execution", Executing())
    one, two = Launch(ALONE, [1], [2]), Launch(WITHIN, [2, 1], [3])
    step = LoweredStep([one, two], {"loss": DeviceValue(3), "text": "x"}, {"w": 2})
    traces = [RankTrace({1: to_array(torch.tensor(float(rank)))}, LoweredStep([]), [step]) for rank in range(4)]
    played = replaying._Execution(traces)
    joints = align([step.launches] * 4, MESH, "")
    played.run(joints)
    assert [request.ranks for request in asked] == [(0, 1, 2, 3)] * 2
    assert [[float(v) for _, v in given] for given in asked[1][3]] == [[10.0 + r, float(r)] for r in range(4)]
    assert played.output(2, step) == {"loss": torch.tensor(22.0), "text": "x"}
    assert played.state(3, step) == {"w": torch.tensor(13.0)} and played._values[3].keys() == {3}
    known = RankTrace(
        {1: traces[0].known[1], 2: traces[0].known[1]}, LoweredStep([]), [LoweredStep([one], DeviceValue(2))]
    )
    asked.clear()
    again = replaying._Execution([known] * 4)
    again.run(align([[one]] * 4, MESH, ""))
    assert asked == [] and again.output(0, known.last) == torch.tensor(0.0)


REQUESTS = {
    "1 lists of arguments for 4 ranks; pass one list for each rank": dict(arguments=[()]),
    "arguments of rank 1: must be a tuple of the function's arguments; got 3": dict(arguments=[(), 3, (), ()]),
    "batches: got lists for 1 ranks, of [1] steps; pass one list for each of the 4 ranks, all of equal length": dict(
        batches=[[()]]
    ),
    "batches: got lists for 4 ranks, of [1, 1, 0, 1] steps; pass one list for each of the 4 ranks, all of equal "
    "length": dict(batches=[[()], [()], [], [()]]),
    "batch 1 of rank 2: must be a tuple of the step's arguments; got 'x'": dict(
        batches=[[(), ()], [(), ()], [(), "x"], [(), ()]]
    ),
}


@pytest.mark.parametrize("message", REQUESTS)
def test_requests_that_do_not_fit(message: str) -> None:
    given = {"arguments": [()] * 4, "batches": None, **REQUESTS[message]}
    with pytest.raises((ValueError, TypeError)) as error:
        replaying._lower(replaying.LoweringRequest(MESH, torch.sum, given["arguments"], given["batches"]))
    assert str(error.value) == message

    def of_a_script() -> None: ...

    of_a_script.__module__ = "__main__"
    with pytest.raises(ValueError, match="is defined in the running script, which the lowering process cannot"):
        replaying.lower(of_a_script, MESH, [()] * 4)


# --- the command


def command(capsys: Any, monkeypatch: Any, traces: Any, *more: str) -> tuple[int, str, str]:
    def lowered(function: Any, mesh: Mesh, arguments: Any) -> Any:
        seen.append((function, mesh, arguments))
        if isinstance(traces, Exception):
            raise traces
        return traces

    monkeypatch.setattr(__main__, "traces_of", lowered)
    code = __main__.main(["os.path:join", "--world-size", "4", "--tp", "2", *more])
    out = capsys.readouterr()
    return code, out.out, out.err


seen: list[Any] = []


def test_the_command_in_full(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    texts = {}

    def run(name: str, traces: Any, *more: str) -> None:
        code, out, err = command(capsys, monkeypatch, traces, *more)
        texts[name] = f"exit {code}\n{out}--\n{err}".replace(str(tmp_path), "FOLDER")

    run("one program", [trace(WITHIN)] * 4)
    run("two", [trace(ALONE, WITHIN, ALONE)] * 4, "--dump", str(tmp_path / "a" / "b"))
    stage = [trace(ALONE)] * 2 + [trace(WITHIN)] * 2
    run("stages", stage, "--pp", "2", "--topology", "linear")
    run("different", [trace(ALONE, WITHIN)] * 3 + [trace(WITHIN, ALONE)])
    run("nothing", [trace()] * 4)
    run("an error", ValueError("no"))
    failed = RuntimeError("in the worker")
    failed.__cause__ = WorkerError("its traceback")
    run("a worker's error", failed)
    run("a mesh that cannot be", [trace(WITHIN)] * 4, "--pp", "3")
    run("a function of no file", [trace(WITHIN)] * 4, "--arguments", "nothing")
    run("no such file", [trace(WITHIN)] * 4, "--arguments", "nothing.py:f")
    outputs = {"small": torch.ones(2), "large": torch.ones(17), "plain": 3}
    monkeypatch.setattr(__main__, "replay", lambda *given: Replayed([outputs], [], []))
    run("executed", [trace(WITHIN)] * 4, "--execute")
    (tmp_path / "mine.py").write_text("def inputs(rank):\n    return [rank, 2]\n")
    run("with arguments", [trace(WITHIN)] * 4, "--arguments", f"{tmp_path / 'mine.py'}:inputs")
    assert seen[0][0] is __import__("os").path.join and seen[0][1:] == (MESH, [()] * 4)
    assert seen[-1][2] == [(rank, 2) for rank in range(4)] and seen[2][1] == STAGES
    files = sorted(path.relative_to(tmp_path / "a" / "b") for path in (tmp_path / "a" / "b").iterdir())
    assert [*map(str, files)] == [f"rank-{rank}-{number}.hlo" for rank in range(4) for number in range(3)]
    assert (tmp_path / "a" / "b" / "rank-3-1.hlo").read_text() == WITHIN.text
    assert_reviewed(Path(__file__).with_name("expected_command.txt"), texts)


def test_a_collective_in_words() -> None:
    one = Collective("all-gather", ((0, 1),), "f32", (2,), None, 8, None, (), ("f32[2]", "f32[3]", "s4[]"), None)
    assert str(one) == "all-gather f32[2] and 2 more over ? {{0,1}}" and one.operand == "f32[2] and 2 more"
