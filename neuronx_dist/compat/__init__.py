"""Other packages' import names, so that programs written for them run on this one.

    import neuronx_dist.compat      # first line of a script for NxD: it then imports `neuronx_distributed`

nxd_names.py   installs the import name `neuronx_distributed`; neuronx_distributed/: its modules that have no module of
               this package in their place
stand_ins.py   installs it, and stand-ins for torch_xla and torch_neuronx where they are absent; torch_xla/: functions
command.py     `neuronx-dist compat`: runs a script as it is; spawned.py: and in processes that it spawns
spmd_types.py, nnscaler.py   install the import names `spmd_types` and `nnscaler`
"""

from __future__ import annotations

import importlib
import sys


def _is_imported_for_a_submodule() -> bool:
    """Returns whether this import is a step of `import neuronx_dist.compat.spmd_types`, which installs its own name."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        name = frame.f_locals.get("name") if frame.f_code.co_name == "_find_and_load_unlocked" else None
        if isinstance(name, str) and name.startswith(f"{__name__}."):
            return True
    return False


importlib.import_module(f"{__name__}.nxd_names").install_names()
if not _is_imported_for_a_submodule():
    importlib.import_module(f"{__name__}.stand_ins").install()
