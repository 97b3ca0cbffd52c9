"""The folder of a run of `neuronx-dist train`, chosen by rank 0 for all hosts."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from neuronx_dist import comm
from neuronx_dist.planning.layout import Layout
from neuronx_dist.train.run_folder import choose_folder, make_folder

LAYOUT = Layout(1)
ONE, OTHER = ["job", "host-a", "12"], ["job", "host-b", "34"]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`choose_folder` on rank 0 of ranks of whom each says (launch, whether it was started again)."""
    monkeypatch.chdir(tmp_path)

    def chosen(out: str | None, *said: Any, resume: str | None = None) -> tuple[str, str | None]:
        monkeypatch.setattr(comm, "gather_objects", lambda obj: [*said])
        monkeypatch.setattr(comm, "broadcast_object", lambda obj: obj)
        args = Namespace(out=out, resume=resume)
        assert choose_folder(args, LAYOUT) == [launch for launch, _ in said]
        return args.out, args.resume

    return chosen


def record(out: str, *launches: Any, resumed: Any = ()) -> None:
    Path(out).mkdir(parents=True)
    text = {"launches": [*launches], "resumed": [{"launches": [resumption]} for resumption in resumed]}
    (Path(out) / "run.json").write_text(json.dumps(text))


def test_a_new_run(ranks: Any) -> None:
    assert ranks("mine", (ONE, False)) == ("mine", None)
    assert ranks(None, (ONE, False)) == ("runs/llama", None)
    record("runs/llama", OTHER)
    assert ranks(None, (ONE, False)) == ("runs/llama-2", None)
    Path("empty").mkdir()
    assert ranks("empty", (ONE, False)) == ("empty", None)


@pytest.mark.parametrize("again", [False, True])
def test_ranks_of_a_launch_go_on_with_its_run(ranks: Any, again: bool) -> None:
    """A launcher does not count the restarts that another host's ranks have caused."""
    record("mine", ONE, OTHER)
    record("runs/llama", ONE)
    record("runs/llama-2", ["another", "host-a", "12"])
    assert ranks("mine", (ONE, again), (OTHER, True)) == ("mine", "auto")
    assert ranks(None, (ONE, again)) == ("runs/llama", "auto")
    record("resumed", ["before", "host-a", "1"], resumed=[ONE])
    assert ranks("resumed", (ONE, again), resume="step_4") == ("resumed", "auto")


def test_a_host_that_was_started_anew_joins_the_run_of_the_others(ranks: Any) -> None:
    record("mine", ONE, OTHER)
    assert ranks("mine", (["job", "host-a", "99"], False), (OTHER, False)) == ("mine", "auto")


def test_a_run_of_another_launch_is_not_touched(ranks: Any) -> None:
    """Also by ranks that were started again: a launcher without an id of its own calls itself `none`."""
    record("mine", ["none", "host-a", "7"])
    for again in (False, True):
        with pytest.raises(ValueError, match="mine exists, and a run does not write over another"):
            ranks("mine", (["none", "host-a", "8"], again))
    record("wrapped", ["job", "host-a", "7"])
    assert ranks("wrapped", (["job", "host-a", "8"], True)) == ("wrapped", "auto")
    with pytest.raises(ValueError, match="wrapped exists"):
        ranks("wrapped", (["job", "host-a", "8"], False))


def test_a_host_that_does_not_see_the_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "gather_objects", lambda obj: [True, True, False, False])
    monkeypatch.setattr(comm, "broadcast_object", lambda obj: obj)
    with pytest.raises(ValueError, match=r"has made .*/mine, and on the host of rank 2 it is not there: give an --out"):
        make_folder(Namespace(out=str(tmp_path / "mine")))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--out .*file cannot be written: File exists"):
        make_folder(Namespace(out=str(tmp_path / "file")))
