"""Replacements for all threads: by the first that comes, until the last has gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from neuronx_dist.shared_context import Replacement, SharedContext
from tests.support.locks import SeeingLock


def original() -> str:
    return "original"


def ours() -> str:
    return "ours"


def others() -> str:
    return "others"


def test_the_first_enters_and_the_last_leaves() -> None:
    seen: list[str] = []

    @contextmanager
    def context() -> Iterator[None]:
        seen.append("entered")
        yield
        seen.append("left")

    shared = SharedContext(context)
    with pytest.raises(ValueError, match="inside"), shared:
        with shared:
            thread = threading.Thread(target=lambda: shared.__enter__())  # which leaves later than this one
            thread.start()
            thread.join()
        raise ValueError("inside")
    assert seen == ["entered"]
    shared.__exit__()
    assert seen == ["entered", "left"]
    with shared:
        assert seen == ["entered", "left", "entered"]


def test_a_context_that_cannot_be_entered_is_tried_again() -> None:
    tries: list[bool] = []

    @contextmanager
    def context() -> Iterator[None]:
        tries.append(len(tries) > 0)
        if not tries[-1]:
            raise OSError("not yet")
        yield

    shared = SharedContext(context)
    with pytest.raises(OSError, match="not yet"), shared:
        pass
    with shared:
        assert tries == [False, True]


def test_attributes_are_replaced_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = SimpleNamespace(first=original, second=original)
    replacement = Replacement(owner, first=ours, second=ours)
    lock = SeeingLock(lambda: (owner.first, owner.second))
    monkeypatch.setattr(replacement, "_lock", lock)
    with replacement:
        assert replacement.before == {"first": original, "second": original}
    assert lock.seen == [(original, original), (ours, ours), (ours, ours), (original, original)]


def test_class_methods_are_what_they_were() -> None:
    class Owner:
        @classmethod
        def name(cls) -> str:
            return cls.__name__

    attribute: Any = Owner.__dict__["name"]
    replacement = Replacement(Owner, name=classmethod(lambda cls: "ours"))
    with replacement:
        assert Owner.name() == "ours" and replacement.before["name"] is attribute
    assert Owner.name() == "Owner" and Owner.__dict__["name"] is attribute


def test_what_others_put_in_place_is_used_and_restored() -> None:
    owner = SimpleNamespace(function=original)
    replacement = Replacement(owner, function=ours)
    owner.function = others
    with replacement:
        assert replacement.before["function"] is others
    assert owner.function is others


def test_ours_that_others_restored_is_not_taken_for_what_was_there_before() -> None:
    owner = SimpleNamespace(function=original)
    replacement = Replacement(owner, function=ours)
    owner.function = ours  # by someone who saw it while we were inside
    with replacement:
        assert replacement.before["function"] is original
    assert owner.function is original
