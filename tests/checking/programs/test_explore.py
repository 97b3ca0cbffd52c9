"""Equal programs, the ranks that run them, repeated plays; tensors that are made fake."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import neuronx_dist as nxd
from neuronx_dist import Mesh, comm, spmd
from neuronx_dist.checking.programs import fakes, played
from neuronx_dist.checking.programs.calls import Deadline, Draw, Op
from neuronx_dist.checking.programs.explore import ProgramsByRank, RankProgram, explore, peer_index
from neuronx_dist.checking.programs.kept_hooks import kept_hooks
from neuronx_dist.checking.programs.played import Played, Subject
from neuronx_dist.comm.backends.observed import CheckBackend, Event
from tests.checking.programs import checked_models as models


def event(**more: Any) -> Event:
    fields: dict[str, Any] = dict(
        number=1, verb="broadcast", axis="tp", op=None, shape=(2,), dtype=torch.float32, ranks=(4, 6), rank=4,
        where="a.py:1", inside="b.py:2", phase="train", peer=6, tag=0, pairs=(),
    )  # fmt: skip
    return Event(**{**fields, **more})


def op(**more: Any) -> Op:
    fields: dict[str, Any] = dict(name="add", scalars=(1,), site=("a.py", 1), inside=False)
    return Op(**{**fields, **more})


def program(events: list[Event], ops: list[Op], rank: int = 0) -> RankProgram:
    return RankProgram(rank, {"train": SimpleNamespace(events=events, ops=ops, claims=[])})  # type: ignore[dict-item]


DRAW, OTHER = (Draw("a.py:1", seed, None) for seed in (1, 2))  # type: ignore[arg-type]
EVENTS = dict(
    verb="all_reduce", axis="dp", op="max", shape=(3,), dtype=torch.bfloat16, peer=4, tag=1, pairs=((0, 1),),
    where="c.py:1",
    inside="c.py:1",
)  # fmt: skip
OPS = dict(name="mul", scalars=(2,), draw=DRAW, site=("a.py", 2))
LINES_ALONE, NOT_LINES = {"where", "inside", "site"}, {"peer", "tag", "pairs", "draw"}


@pytest.mark.parametrize("field", [*EVENTS, *OPS])
def test_what_makes_two_programs_the_same(field: str) -> None:
    of_event = field in EVENTS
    one = program([event()], [op()])
    other = program(
        [event(**({field: EVENTS[field]} if of_event else {}))], [op(**({} if of_event else {field: OPS[field]}))]
    )
    assert (one.signature() != other.signature()) == (field not in LINES_ALONE)
    assert (one.lines() != other.lines()) == (field not in NOT_LINES)
    same = program([event(number=7, ranks=(6, 1), phase="", rank=1)], [op(inside=True)], 3)
    assert one.signature() != same.signature()  # the source is at another index
    same = program([event(number=7, ranks=(1, 6), phase="", rank=1)], [op(inside=True)], 3)
    assert one.signature() == same.signature() and one.lines() == same.lines()
    assert program([], [op(draw=DRAW)]).signature() != program([], [op(draw=OTHER)]).signature()
    assert one.signature() != program([event(), event()], [op()]).signature() != program([event()], []).signature()


def test_the_other_end_as_an_index() -> None:
    assert peer_index(event()) == 1 and peer_index(event(peer=4)) == 0 and peer_index(event(peer=None)) is None


def test_programs_by_rank() -> None:
    mesh = Mesh(8, tp=2, pp=2)
    programs, first, alone = ProgramsByRank(mesh), program([], [], 0), program([], [], 3)
    assert len(programs) == 0 and [*programs] == [] and programs.missing(0) == 0 and programs.missing(1) == 4
    with comm.as_rank(mesh, 0, backend := CheckBackend()):
        assert comm.rank("tp") == 0
    programs.add(first, [read.answers for read in backend.reads])
    assert [*programs] == [0, 2] and len(programs) == 2 and programs.missing(0) == 1 and programs.missing(1) == 4
    assert programs[2] is first and 1 not in programs and programs.distinct() == [first]
    with pytest.raises(KeyError, match="^5$"):
        programs[5]
    programs.add_alone(alone)
    assert programs[3] is alone and programs[0] is first and [*programs] == [0, 2, 3] and len(programs) == 3
    assert programs.distinct() == [first, alone] and [*programs.backwards(first)] == [2, 0]
    last = program([], [], 4)
    programs.add(last, [])
    assert programs[7] is last and programs.missing(1) is None and programs.missing(0) == 1


def test_a_pipelines_forward_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the step, of which it is no part; ranks that were told the same share it."""
    recorded: list[Any] = []
    record = played.record
    monkeypatch.setattr(played, "record", lambda *given: recorded.append(comm.current().rank) or record(*given))
    report = spmd.check(models.pipeline, models.pipeline_inputs(), {"pp": 2, "tp": 2}, level=None)
    assert report.ok and recorded == [0]


def test_a_play_ahead_ends_with_the_last_message_of_its_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    train, ahead = Played.train, []

    def watched(self: Played, rank: int) -> Any:
        halt = self._message_types.halt_after if self._message_types is not None else None
        result = train(self, rank)  # Halted goes through here
        assert halt is None, "it went on"
        return result

    def until(self: Played, rank: int, chunk: int | None = None) -> bool:
        done = original(self, rank, chunk)
        if chunk is not None:
            ahead.append((self.mesh.coordinate("pp", rank), chunk))
            assert not done and "train" not in self.phases
            assert self._message_types is not None and self._message_types.halt_after is None
        return done

    original = Played.train_until_halted
    monkeypatch.setattr(Played, "train", watched)
    monkeypatch.setattr(Played, "train_until_halted", until)

    def model_fn() -> Any:
        return nxd.NxDPPModel(
            models.Stack(), transformer_layer_cls=models.Block, num_microbatches=2, output_loss_value_spec=True,
            input_names=["x", "target"], auto_partition=True, schedule="zb_v",
        )  # fmt: skip

    report = spmd.check(model_fn, models.pipeline_inputs(), {"pp": 2})
    assert report.ok and ahead == [(0, 0)], (str(report), ahead)


def test_no_time_is_no_program() -> None:
    explored = explore(Subject(models.model_fn, models.example_inputs()), Mesh(2, tp=2), Deadline(0.0))
    assert not explored.finished and explored.distinct == [] and explored.plays == 0


def test_time_runs_out_while_a_model_is_built() -> None:
    """The time is looked at every 64 operators."""
    built: list[int] = []

    def model_fn() -> Any:
        for number in range(200):
            torch.ones(1) + 1
            built.append(number)
        return models.model_fn()

    explored = explore(Subject(model_fn, models.example_inputs()), Mesh(2, tp=2), Deadline(0.0))
    assert not explored.finished and len(built) < 100


def test_a_model_and_its_optimizer_may_be_compared_with_values() -> None:
    def both() -> Any:
        model = models.model_fn()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    report = spmd.check(both, models.example_inputs(), {"tp": 2}, numeric=True)
    assert report.ok and report.numeric and "4 gradients equal" in str(report)


def test_what_hooks_call_is_of_the_program() -> None:
    def model_fn() -> Any:
        model = models.model_fn()
        model.up.weight.register_hook(lambda grad: torch.neg(grad))
        return model

    for level in ("G", "L"):
        explored = explore(Subject(model_fn, models.example_inputs(), level=level), Mesh(2, tp=2), Deadline(None))
        (only,) = explored.distinct
        assert only.failure is None and [op.name for op in only.ops].count("neg") == 1


def test_a_rank_does_the_same_if_it_is_told_the_same_in_every_phase() -> None:
    model = Played(Subject(models.model_fn, ()), Mesh(2, tp=2), 0, Deadline(None))
    phases = {name: SimpleNamespace(backend=SimpleNamespace(same_program=same)) for name, same in (
        ("build", lambda rank: True), ("train", lambda rank: rank == 0),
    )}  # fmt: skip
    model.phases = phases  # type: ignore[assignment]
    assert model.same_program(0) and not model.same_program(1) and model.same_program(1, ("build", "step"))


# --- fake tensors


class Holding(torch.optim.SGD):
    """Holds tensors of its own, in lists, dicts and objects."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.norm, self.nested = torch.ones(3), {"a": [torch.ones(1), {"b": torch.ones(2)}], "text": "x"}
        self.holder = SimpleHolder()


class SimpleHolder:
    def __init__(self) -> None:
        self.buffer = torch.ones(4)


def test_tensors_of_models_and_optimizers_become_fake() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].bias  # tied
    model.alias, model.plain = model[0].weight, torch.ones(5)
    model[0].weight.mark = "kept"
    frozen = model[1].bias
    frozen.requires_grad_(False)
    calls: list[Any] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda param: calls.append("after"))
    model[0].weight.register_hook(lambda grad: calls.append("hook"))
    optimizer = Holding(model.parameters())
    optimizer.state[model[0].weight] = {"m": torch.zeros(3, 2), "step": 1}
    optimizer.state["other"] = {"x": torch.ones(1)}
    strided = torch.ones(4, 6).t()
    model.register_buffer("strided", strided)
    old = {id(x) for x in (*model.parameters(), *model.buffers())}
    mode, device = FakeTensorMode(), torch.device("cpu")
    fake = fakes.make_fake(model, optimizer, mode, device)
    assert {id(before) for before, _ in fake.values()} >= old
    for x in (*model.parameters(), *model.buffers(), model.plain):
        assert isinstance(x, FakeTensor) and x.fake_mode is mode and x.device == device
    weight = model[0].weight
    assert model[1].weight is model[0].bias and model.alias is weight and weight.mark == "kept"
    assert isinstance(weight, nn.Parameter) and weight.requires_grad and not model[1].bias.requires_grad
    assert model.strided.stride() == strided.stride() and model[1].num_batches_tracked.dtype == torch.int64
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], [*dict.fromkeys(model.parameters())]))
    held = [optimizer.norm, optimizer.nested["a"][0], optimizer.nested["a"][1]["b"], optimizer.holder.buffer]
    held += [optimizer.state[weight]["m"], optimizer.state["other"]["x"]]
    assert all(isinstance(x, FakeTensor) for x in held) and optimizer.state[weight]["step"] == 1
    assert len(optimizer.state) == 2 and optimizer.nested["text"] == "x"
    with mode:
        model[0](torch.ones(1, 2)).sum().backward()
    assert calls == ["hook", "after"]


def test_what_is_a_part_of_a_parameter_is_that_part_of_its_fake() -> None:
    """Masters of ZeRO-1 are rows of their parameter; another dtype, or other memory, is a tensor of its own."""
    model = nn.Linear(2, 6, bias=False)
    weight = model.weight.detach()
    parts = [weight[2:4], weight[4:], weight.view(torch.int32)[2:4], weight[:, :1], weight[2:4].clone()]
    optimizer = torch.optim.SGD(parts, lr=0.1)
    mode = FakeTensorMode()
    fakes.make_fake(model, optimizer, mode, torch.device("cpu"))
    params = optimizer.param_groups[0]["params"]
    assert [torch._C._is_alias_of(part, model.weight) for part in params] == [True, True, False, False, False]
    assert [(tuple(part.shape), part.storage_offset(), part.dtype) for part in params] == [
        ((2, 2), 4, torch.float32), ((2, 2), 8, torch.float32), ((2, 2), 0, torch.int32),
        ((6, 1), 0, torch.float32), ((2, 2), 0, torch.float32),
    ]  # fmt: skip
    assert all(isinstance(part, FakeTensor) and part.fake_mode is mode for part in params)


def test_inputs_become_fake_once() -> None:
    mode, device, x = FakeTensorMode(), torch.device("cpu"), torch.ones(2, requires_grad=True)
    first = fakes.fake_inputs({"x": x, "y": [x, 3, "a"]}, mode, device)
    assert first["x"] is first["y"][0] and first["x"].requires_grad and first["y"][1:] == [3, "a"]
    assert fakes.fake_inputs(first, mode, device)["x"] is first["x"]


def test_optimizers_and_those_that_they_wrap() -> None:
    inner, other = (torch.optim.SGD([torch.ones(1)], lr=0.1) for _ in range(2))
    outer = SimpleNamespace(any_name=inner, again=inner, other=3)
    inner.back = outer  # type: ignore[attr-defined]
    found = [*fakes.optimizers_of(None, outer, other, outer)]
    assert len(found) == 3 and {id(x) for x in found} == {id(outer), id(inner), id(other)}


def test_a_plain_attribute_of_a_partial_model_may_be_another_ranks() -> None:
    small, large = torch.ones(2**16 - 1, device="meta"), torch.ones(2**16, device="meta")
    assert fakes._is_alone(small, True) and not fakes._is_alone(large, True) and fakes._is_alone(large, False)
    assert fakes._is_alone(torch.ones(2**16), True)


def test_torch_logs_nothing_meanwhile() -> None:
    import logging

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    with pytest.raises(KeyError), fakes.no_messages():
        assert logger.disabled
        raise KeyError
    assert logger.disabled == before


def test_hooks_of_a_step_are_gone_after_it() -> None:
    model, calls = nn.Linear(2, 2), []
    handle = model.register_forward_hook(lambda *args: calls.append("kept"))
    model.weight.register_hook(lambda grad: calls.append("kept gradient"))
    with pytest.raises(KeyError), kept_hooks(model):
        model.register_forward_hook(lambda *args: calls.append("new"))
        model.register_forward_pre_hook(lambda *args: calls.append("before"))
        model.register_full_backward_hook(lambda *args: calls.append("backward"))
        model.weight.register_hook(lambda grad: calls.append("new gradient"))
        model.bias.register_post_accumulate_grad_hook(lambda param: calls.append("after"))
        handle.remove()
        raise KeyError
    model(torch.ones(1, 2)).sum().backward()
    assert calls == ["kept", "kept gradient"] and gc.isenabled()
