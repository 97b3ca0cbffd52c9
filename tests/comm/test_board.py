"""Reports of ranks in the job's store: exchanged, answered for a silent rank, deleted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from neuronx_dist import comm
from neuronx_dist.comm.health import board as board_module
from neuronx_dist.comm.health.board import StoreBoard
from neuronx_dist.comm.health.failure import FailureMonitor


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "_PATIENCE", 0.1)


def on_threads(*functions: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        results[index] = functions[index]()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def boards(count: int, timeout: float = 20.0) -> tuple[Any, list[StoreBoard]]:
    store = dist.HashStore()
    return store, [StoreBoard(store, rank, 1, timeout=timeout) for rank in range(count)]


def keys(store: Any) -> set[str]:
    return {key.rpartition("board/1/")[2] for key in map(str, store.list_keys())}


def test_texts_are_exchanged_in_the_order_of_ranks_and_forgotten_later() -> None:
    store, ranks = boards(3)

    def program(board: StoreBoard) -> Callable[[], Any]:
        return lambda: [
            board.exchange("topic", number, f"{number} of {board.rank}", [2, 1, 0], "what") for number in (4, 9)
        ]

    for first, second in on_threads(*map(program, ranks)):
        assert list(first.items()) == [(rank, f"4 of {rank}") for rank in range(3)]
        assert second == {rank: f"9 of {rank}" for rank in range(3)}
    assert keys(store) == {f"topic/9/{rank}" for rank in range(3)}


def test_another_number_or_topic_is_not_read() -> None:
    _, ranks = boards(2, timeout=0.2)
    ranks[1]._post("topic", 2, "of another number")
    ranks[1]._post("another topic", 1, "of another topic")
    with pytest.raises(comm.CommTimeout, match=r"what: ranks \[1\] did not reach it within 0.2 s"):
        ranks[0].exchange("topic", 1, "text", [0, 1], "what")


def test_a_rank_that_says_nothing_is_asked_and_another_thread_answers() -> None:
    """The answer is sent as soon as there is one; other topics get none."""
    store, ranks = boards(2)
    said: list[str] = []
    ranks[1].answers["topic"] = lambda number: said[0] if said else None
    ranks[1].answers["another topic"] = lambda number: "nobody asked"
    done = threading.Event()

    def answer() -> None:
        begin = time.monotonic()
        while not done.wait(0.02):
            ranks[1].answer()
            if time.monotonic() - begin > 0.4 and not said:
                assert "topic/3/1" not in keys(store)
                said.append("busy")

    def ask() -> Any:
        try:
            return ranks[0].exchange("topic", 3, "mine", [0, 1], "what")
        finally:
            done.set()

    assert on_threads(ask, answer)[0] == {0: "mine", 1: "busy"}
    assert "another topic/3/1" not in keys(store)
    ranks[1]._forget("topic", 3)
    ranks[1].answer()
    assert "topic/3/1" not in keys(store), "a question is answered once"


def test_one_that_failed_ends_the_wait() -> None:
    store = dist.HashStore()
    monitor = FailureMonitor(store, 0, 2)
    board = StoreBoard(store, 0, 1, timeout=20.0, monitor=monitor)
    assert monitor.duties == [board.answer]
    threading.Timer(0.2, FailureMonitor(store, 1, 1).report, [ValueError("the parrot is dead")]).start()
    with pytest.raises(comm.RemoteRankError, match=r"rank 1 failed first: ValueError: the parrot.*met in what"):
        board.exchange("topic", 1, "text", [0, 1], "what")


def test_without_topics_the_store_is_not_asked() -> None:
    store, (board,) = boards(1)
    board.answer()
    assert keys(store) == set()
