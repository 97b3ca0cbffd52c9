"""Whole models proven right in one process, before a job starts: `neuronx_dist.spmd.check`.

types/      the type checker: SPMD types follow tensors through torch
programs/   a training step of every rank, played in one process and compared
report.py   the report of a check; api.py: `check`; command.py: `neuronx-dist check`
checker.py  `spmd.checker`: the check under the names and defaults of `spmd_types.checker`
"""

from ..call_site import hide
from ..lazy_names import lazy_names

__all__ = ["Problem", "Report", "check"]

hide(__name__)

__getattr__ = lazy_names(__name__, {"Problem": "checking.report", "Report": "checking.report", "check": "checking.api"})
