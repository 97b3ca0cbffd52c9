"""The planner: which layout for a model on a cluster, how long is a step, how wrong is the prediction?

cluster.py       `Cluster`: speeds and sizes of devices and links; presets.py: by data sheets; measure.py: measured
workload.py      models by name, and `workload_of`: the sizes of any model
model_sizes.py   `Workload`: weights by layer, and how tp divides each; counted.py: from a module
candidate.py     `Candidate`: a layout and the options of its step
traffic.py       the collectives of a step, counted
seconds.py       seconds of parts of a model, of a pipeline, of a reduction
simulation.py    seconds of a pipeline, by a pass over its tasks
stage_memory.py  bytes of a rank, by stage, in closed form; played_layers.py: of layers that are not Llama's, played
predictor.py     `Predictor`: seconds and bytes of a candidate; computed once what candidates share
search.py        the fastest candidates that fit, exact, by bounds
layout_plan.py   `LayoutPlan`: a layout with its predictions, as text, flags and file
plan_check.py    a plan's program, type-checked before it is shown
plans.py         `nxd.plan`, `Plans`: tables, explanations, what does not work and what would
report.py        the plans as one HTML file
command.py       `neuronx-dist plan`; job_commands.py: `plan measure` and `plan validate`
validation.py    a plan's step, run and timed, beside its prediction
calibration.py   errors of predictions; a cluster corrected by measured steps
"""

from .calibration import calibrated
from .candidate import Candidate
from .cluster import Cluster, ClusterError, Link
from .layout_plan import LayoutPlan
from .plans import Plans, plan
from .predictor import Predictor
from .validation import Validation, validate
from .workload import Workload, workload_of

__all__ = [
    "Candidate",
    "Cluster",
    "ClusterError",
    "LayoutPlan",
    "Link",
    "Plans",
    "Predictor",
    "Validation",
    "Workload",
    "calibrated",
    "plan",
    "validate",
    "workload_of",
]
