"""Names of call sites survive a move of their file, and mean one place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.call_sites import sites_of

SOURCE = """
from neuronx_dist import comm

class Layer:
    def forward(self, x):
        return comm.all_reduce(x, "tp") + comm.all_reduce(x, "dp")
"""
NAMES = {"Layer.forward:comm.all_reduce#1", "Layer.forward:comm.all_reduce#2"}


def write(path: Path) -> Path:
    path.parent.mkdir()
    path.write_text(SOURCE)
    return path


def test_a_name_does_not_say_the_file(tmp_path: Path) -> None:
    before, after = write(tmp_path / "one" / "layers.py"), write(tmp_path / "other" / "linear.py")
    assert sites_of([before]).keys() == sites_of([after]).keys() == NAMES


def test_a_name_of_two_places_is_an_error_that_says_both(tmp_path: Path) -> None:
    paths = [write(tmp_path / "one" / "layers.py"), write(tmp_path / "other" / "linear.py")]
    with pytest.raises(ValueError, match=r"'Layer.forward:comm.all_reduce#1': .*one/layers.py:6 and .*linear.py:6"):
        sites_of(paths)
