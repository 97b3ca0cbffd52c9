"""`neuronx_dist.lightning` without the package lightning: the error says what to install."""

from __future__ import annotations

import pytest

from tests.support import forked

ABSENT = """
import sys
{imports}
for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
    del sys.modules[name]
sys.modules["lightning"] = None
try:
    from {package} import NeuronXLAStrategy
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("imports", "package"),
    [
        ("import neuronx_dist", "neuronx_dist.lightning"),
        ("import neuronx_dist.compat", "neuronx_distributed.lightning.strategy"),
    ],
)
def test_without_lightning_the_error_says_what_to_install(imports: str, package: str) -> None:
    result = forked.run(["-c", ABSENT.format(imports=imports, package=package)])
    assert result.codes == [0], result.errors[0][-2000:]
    assert result.outputs[0].startswith("neuronx_dist.lightning needs the package lightning, 2.6 or later: pip install")
