"""Whose line a message names: stacks of made-up files, of which only the names count."""

from __future__ import annotations

import _thread
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from queue import Queue
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import handle_torch_function

import neuronx_dist
from neuronx_dist import call_site as sites

FOLDER = os.path.dirname(neuronx_dist.__file__)
FILES = {
    "user": "/home/someone/train.py",
    "library": os.path.join(os.path.dirname(torch.__file__), "nn", "made_up.py"),
    "xla": "/usr/lib/torch_xla/made_up.py",
    "text": "<string>",
    "standard": os.path.join(os.path.dirname(os.__file__), "contextlib.py"),
    "installed": os.path.join(os.path.dirname(os.__file__), "site-packages", "trainer.py"),
    "package": f"{FOLDER}/made_up_layers/linear.py",
    "machinery": f"{FOLDER}/made_up_machine/play.py",
    "transport": f"{FOLDER}/made_up_machine/wire/send.py",
    "driver": f"{FOLDER}/made_up_driver.py",
    "beside": f"{FOLDER}_of_another/user.py",
}
_numbers = itertools.count(10)


@pytest.fixture(autouse=True)
def rooms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine, a transport inside of it, and a file that drives: whatever the package's own rooms are."""
    monkeypatch.setattr(sites, "_hidden", {})
    monkeypatch.setattr(sites, "_owners", {})
    for name, file, path in (
        ("made_up.machine", f"{FOLDER}/made_up_machine/__init__.py", []),
        ("made_up.wire", f"{FOLDER}/made_up_machine/wire/__init__.py", []),
        ("made_up.driver", f"{FOLDER}/made_up_driver.py", None),
    ):
        module = ModuleType(name)
        module.__file__ = file
        if path is not None:
            module.__path__ = path
        monkeypatch.setitem(sys.modules, name, module)
    sites.owner_of(FILES["transport"])  # which is forgotten by what follows
    sites.hide("made_up.machine")
    sites.hide("made_up.wire", sites.TRANSPORT)
    sites.hide("made_up.driver", sites.DRIVER)
    yield


def _frame(owner: str, inner: Callable[[], Any], tag: str = "") -> tuple[str, FunctionType]:
    """`file:line` of a call of `inner` in a file of this owner, and the function that makes it."""
    line = next(_numbers)
    names: dict[str, Any] = {"inner": inner}
    exec(compile("\n" * (line - 2) + "def call():\n    return inner()", FILES[owner], "exec"), names)
    return f"{FILES[owner]}:{line}", names["call"]


def _stack(owners: str, ask: Callable[[], Any]) -> tuple[list[str], Any]:
    """The lines of a stack, the outermost first, and what `ask` says inside of it; it is the test's own frame below."""
    lines: list[str] = []
    for owner in reversed(owners.split()):
        line, ask = _frame(owner, ask)
        lines.insert(0, line)
    return lines, _in_thread(ask)


def _in_thread(ask: Callable[[], Any]) -> Any:
    """With no line of the test around it, which would be a user's."""
    answers: Queue[Any] = Queue()
    names: dict[str, Any] = {"answers": answers, "ask": ask}
    exec(compile("def run():\n    answers.put(ask())", FILES["transport"], "exec"), names)
    _thread.start_new_thread(names["run"], ())  # threads of `threading` have lines of their own around it
    return answers.get(timeout=60)


def _asking(owner: str, function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """`function(*arguments)`, called from a file of this owner."""
    names: dict[str, Any] = {"function": function, "arguments": arguments}
    exec(compile("def ask():\n    return function(*arguments)", FILES[owner], "exec"), names)
    return names["ask"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name, owner",
    [
        ("user", "user"),
        ("beside", "user"),
        ("library", "library"),
        ("xla", "library"),
        ("text", "library"),
        ("standard", "library"),
        ("installed", "user"),
        ("package", "package"),
        ("machinery", "machinery"),
        ("transport", "transport"),
        ("driver", "driver"),
    ],
)
def test_owners(name: str, owner: str) -> None:
    for _ in range(2):  # the second answer is remembered
        assert sites.owner_of(FILES[name]) == owner
    remembered = FILES[name] in vars(sites)["_owners"]
    assert remembered == (name != "text")  # of which there may be any number


def test_a_room_that_says_what_it_is_later_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sites.owner_of(FILES["package"]) == sites.PACKAGE
    module = ModuleType("made_up.layers")
    module.__file__ = FILES["package"]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sites.hide(module.__name__)
    assert sites.owner_of(FILES["package"]) == sites.MACHINERY
    assert sites.owner_of(f"{FOLDER}/made_up_layers/other.py") == sites.PACKAGE  # a file speaks for itself alone


# A stack, the outermost first; the number of the frame that is the answer, or None.
CALL_SITES: list[tuple[str, int | None]] = [
    ("user", 0),
    ("user user", 1),
    ("user package", 0),
    ("user package machinery transport library", 0),
    ("user driver", 1),  # nobody asked for what a driver calls
    ("user driver package", 2),
    ("user driver user package", 2),
    ("user driver library", 1),
    ("package package", 1),
    ("library package", 1),
    ("package library", 0),
    ("library library", 1),
    ("text text", 1),
    ("library machinery", 0),
    ("user library", 0),
    ("user package standard package transport", 0),
    ("installed package", 0),
    ("machinery transport", None),
]


@pytest.mark.parametrize("owners, answer", CALL_SITES)
def test_who_asked(owners: str, answer: int | None) -> None:
    lines, line = _stack(owners, _asking("machinery", sites.call_site))
    assert line == ("an unknown line" if answer is None else lines[answer])


def test_who_asked_in_another_frame() -> None:
    """The frame of a thread that hangs, say: calls inside of that frame, and around this one, do not count."""
    frames: list[Any] = []
    lines, _ = _stack("user package package", lambda: frames.append(sys._getframe(2)))
    assert _asking("user", sites.call_site, frames[0])() == lines[0]
    lines, _ = _stack("package package", lambda: frames.append(sys._getframe(2)))
    assert _asking("user", sites.call_site, frames[1])() == lines[0]


# A stack, and whether the function that the user's code called is named.
NAMED: list[tuple[str, bool]] = [
    ("user package", True),
    ("user package user package", True),
    ("user package standard package transport", True),
    ("user machinery transport", True),
    ("user transport", False),
    ("user library package", False),
    ("driver package", False),
    ("package", False),
]


@pytest.mark.parametrize("owners, named", NAMED)
def test_which_function_was_called_there(owners: str, named: bool) -> None:
    _, words = _stack(owners, _asking("transport", sites.call_in_words))
    assert re.fullmatch(rf"\S+:\d+{re.escape(' (in call)') if named else ''}", words)


# A stack -> the frames of the user's line and of the innermost one that is neither transport nor torch.
BOTH: list[tuple[str, int, int]] = [
    ("user", 0, 0),
    ("user package", 0, 1),
    ("user user package package", 1, 3),
    ("user package transport", 0, 1),
    ("user package library", 0, 1),
    ("user package user", 2, 2),
    ("user machinery", 0, 1),
    ("user driver", 0, 1),
    ("text package", 0, 1),
    ("text text", 1, 1),
    ("user text", 0, 0),
]


@pytest.mark.parametrize("owners, user, inside", BOTH)
def test_both_lines(owners: str, user: int, inside: int) -> None:
    lines, both = _stack(owners, _asking("transport", sites.call_sites))
    assert both == (lines[user], lines[inside])


def test_a_call_that_is_made_again_from_further_inside_is_of_who_made_it_first() -> None:
    inner_line, inner = _frame("user", _asking("transport", sites.call_sites))
    _, function = _frame("package", inner)
    outer_line, outer = _frame("user", function)
    assert _in_thread(outer) == (inner_line, inner_line)
    assert sites.reissues(function) is function
    assert _in_thread(outer) == (outer_line, outer_line)


def test_a_call_that_a_mode_makes_again() -> None:
    """The mode's own line is not the user's; what it calls inside of the package stays the innermost line."""
    layer_line, layer = _frame("package", _asking("transport", sites.call_sites))
    _, mode = _frame("user", layer)

    class Tensor(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return mode()

    x = torch.ones(1).as_subclass(Tensor)
    line, outer = _frame("user", _asking("package", handle_torch_function, layer, (x,), x))
    assert _in_thread(outer) == (line, layer_line)


def test_the_nearest_line_of_some_owners() -> None:
    owners = "user driver user package library"
    for wanted, answer in (
        (["user"], 2), (["package", "user"], 3), (["driver"], 1), (["library"], 4), ([], None),
    ):  # fmt: skip
        lines, line = _stack(owners, _asking("machinery", sites.nearest_line, *wanted))
        assert line == ("" if answer is None else lines[answer]), wanted


def test_frames_from_the_inside_out() -> None:
    frames: list[tuple[str, Any]] = []
    lines, _ = _stack("user package transport", lambda: frames.extend(sites.frames(1)))
    assert [owner for owner, _ in frames] == ["transport", "package", "user", "transport"]
    assert [sites.line_of(frame) for _, frame in frames[:3]] == lines[::-1]
    innermost, caller = next(sites.frames()), next(sites.frames(1))
    assert innermost[1] is sys._getframe() and caller[1] is sys._getframe(1)


# --- modules


class Inner(nn.Module):
    def forward(self) -> str:
        return sites.calling_module()


class Outer(nn.Module):
    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(modules)
        self.hidden = [Inner()]

    def forward(self, module: nn.Module | None = None) -> Any:
        return (module or self.layers[-1])()


class Pipeline(nn.Module):
    """A pipeline whose stage is another module, whose names nobody knows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.original_module = model

    def forward(self) -> Any:
        return self.original_module(self.original_module.layers[0])


def test_the_module_that_is_running() -> None:
    outer = Outer([Inner(), Inner()])
    assert sites.calling_module() == ""
    assert Inner()() == "Inner"
    assert outer() == "Inner layers.1 of Outer"
    assert outer(outer.layers[0]) == "Inner layers.0 of Outer"
    assert outer(outer.hidden[0]) == "Inner"
    assert Outer([outer])() == "Inner layers.0.layers.1 of Outer"  # the outermost that holds it
    assert Pipeline(outer)() == "Inner layers.0 of Outer"
    other = Outer([outer.hidden[0], outer])
    assert other() == "Inner layers.1.layers.1 of Outer"
