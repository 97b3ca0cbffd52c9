"""A process that answers requests: answers, errors with their traceback, silence, death."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from neuronx_dist.xla_replay import replaying, training_state, worker
from neuronx_dist.xla_replay.worker import Worker, WorkerError

pytestmark = [pytest.mark.process, pytest.mark.slow]

ANSWERING = """
import os, sys, time
from neuronx_dist.xla_replay.worker import serve

class Odd(Exception):
    def __init__(self, one, other):
        super().__init__(one)

def handle(request):
    print("this goes to the log")
    if request == "raise":
        raise ValueError("no")
    if request == "odd":
        raise Odd(1, 2)
    if request == "unpicklable":
        return lambda: None
    if request == "sleep":
        time.sleep(60)
    if request == "die":
        os._exit(7)
    return request, os.environ["GIVEN"]

def main():
    serve(handle)
"""


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    (tmp_path / "answering.py").write_text(ANSWERING)
    monkeypatch.syspath_prepend(str(tmp_path))
    process = Worker("answering", {"GIVEN": "words"})
    yield process
    process.close()


def test_answers_and_errors(answering: Worker) -> None:
    assert answering.alive and answering.ask([1, "x"]) == ([1, "x"], "words")
    with pytest.raises(ValueError, match="^no$") as raised:
        answering.ask("raise")
    assert isinstance(raised.value.__cause__, WorkerError) and 'raise ValueError("no")' in str(raised.value.__cause__)
    for request, words in (("odd", "answering.Odd: 1"), ("unpicklable", "pickle")):
        with pytest.raises((WorkerError, AttributeError, TypeError)) as error:
            answering.ask(request)
        assert words in f"{error.value} {error.value.__cause__}"
    with pytest.raises(TypeError, match="the replay runs in another process, so functions must be defined in"):
        answering.ask(lambda: None)
    assert answering.ask("again")[0] == "again"  # it goes on
    with pytest.raises(WorkerError) as died:
        answering.ask("die")
    assert str(died.value).startswith("answering ended with exit code 7; its log ends:\n")
    assert "this goes to the log" in str(died.value) and not answering.alive
    with pytest.raises(WorkerError, match="ended with exit code 7"):
        answering.ask("again")


def test_one_that_gives_no_answer_is_ended(answering: Worker) -> None:
    answering.ask(1)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"^answering: no answer within 0.2 s; its log ends:\nthis goes to the log"):
        answering.ask("sleep", timeout=0.2)
    assert not answering.alive and time.monotonic() - begin < 30


def test_one_that_is_closed_ends(answering: Worker) -> None:
    answering.ask(1)
    answering.close()
    assert not answering.alive and answering._process.returncode == 0
    assert answering._process.stdout.closed and answering._log.closed  # else the collector warns in another test


def test_messages_have_their_length_in_front() -> None:
    stream = io.BytesIO()
    worker._write(stream, b"abc")
    assert stream.getvalue() == b"\x03" + bytes(7) + b"abc"
    stream.seek(0)
    assert worker._read(stream) == b"abc" and worker._read(stream) is None
    assert worker._read(io.BytesIO(b"\x03")) is None


def test_what_a_step_leaves_to_the_next_one() -> None:
    model = torch.nn.BatchNorm1d(2)
    inner = torch.optim.Adam(model.parameters(), lr=0.5)
    found: Any = training_state(model, inner)
    assert [*found] == ["model", "optimizer"] and found["model"].keys() == {**model.state_dict()}.keys()
    assert found["optimizer"]["params"] == [model.weight, model.bias] and found["optimizer"]["state"] == [{}, {}]
    assert found["optimizer"]["options"][0]["lr"] == 0.5 and "params" not in found["optimizer"]["options"][0]
    model(torch.ones(3, 2)).sum().backward()
    inner.step()
    inner.base_optimizer = torch.optim.SGD([model.weight], lr=0.1)  # type: ignore[attr-defined]
    found = replaying.training_state(model, inner)
    assert [*found] == ["model", "optimizer", "base"] and found["base"]["params"] == [model.weight]
    assert all({*state} == {"step", "exp_avg", "exp_avg_sq"} for state in found["optimizer"]["state"])
    assert training_state(model) == {"model": training_state(model)["model"]} and os.getpid()
