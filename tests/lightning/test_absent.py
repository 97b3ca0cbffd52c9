"""`neuronx_dist.lightning` without the package lightning: the error says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.support import forked

MESSAGE = "neuronx_dist.lightning needs the package lightning, 2.6 or later: pip install"


def test_without_lightning_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("lightning", "neuronx_dist.lightning"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(ModuleNotFoundError, match=MESSAGE):
        importlib.import_module("neuronx_dist.lightning")


COMPAT = """
import sys
import neuronx_dist.compat
for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
    del sys.modules[name]
sys.modules["lightning"] = None
try:
    from neuronx_distributed.lightning.strategy import NeuronXLAStrategy
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.process
def test_so_does_the_error_under_the_name_of_nxd() -> None:
    result = forked.run(["-c", COMPAT])
    assert result.codes == [0], result.errors[0][-2000:]
    assert result.outputs[0].startswith(MESSAGE)
