"""Fixtures of the checks of programs."""

from __future__ import annotations

import os

import pytest

from neuronx_dist.checking.programs import explore


@pytest.fixture
def one_rank_of_a_kind_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` plays one more rank for each kind of program, and with NXD_FULL=1 all ranks of a small one."""
    if os.environ.get("NXD_FULL") != "1":
        monkeypatch.setattr(explore, "CONFIRMED_OPS", 0)
