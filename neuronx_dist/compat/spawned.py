"""The main module of processes that a script of `neuronx-dist compat` spawns: workers of a DataLoader, ranks.

Python runs the script anew in a spawned process, as `__mp_main__`, to find its classes and functions there. This file
stands in its place, and installs what the command installed before the script runs.
"""

from __future__ import annotations

import os
import runpy
from multiprocessing import spawn
from typing import Any

from neuronx_dist.compat import stand_ins

__all__ = ["serve_spawned_processes"]

_SCRIPT = "NEURONX_DIST_COMPAT_SCRIPT"
_PATH = "init_main_from_path"  # of the data that a process is started with


def serve_spawned_processes(script: str) -> None:
    """Makes processes that a script spawns, from now on, run it as this process does."""
    script = os.path.abspath(script)
    os.environ[_SCRIPT] = script
    before, path, place = spawn.get_preparation_data, _PATH, __file__  # a script's names may replace those of this file

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = before(name)
        if data.get(path) == script:
            data[path] = place
        return data

    spawn.get_preparation_data = get_preparation_data


if __name__ == "__mp_main__":
    stand_ins.install()
    serve_spawned_processes(os.environ[_SCRIPT])
    globals().update(runpy.run_path(os.environ[_SCRIPT], run_name="__mp_main__"))
