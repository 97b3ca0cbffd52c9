"""The planner: which layout for a model on a cluster, how long is a step, how wrong is the prediction?

cluster.py    `Cluster`: speeds and sizes of devices and links; presets by data sheets; measure.py: measured ones
validate.py   a layout's step, run and timed; errors of predictions; a cluster's speeds corrected by measured steps
"""

from .cluster import Cluster, ClusterError, Link

__all__ = ["Cluster", "ClusterError", "Link"]
