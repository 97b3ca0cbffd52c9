"""The planner: which layout for a model on a cluster, how long is a step, how wrong is the prediction?

cluster.py    `Cluster`: speeds and sizes of devices and links; presets by data sheets
"""

from .cluster import Cluster, ClusterError, Link

__all__ = ["Cluster", "ClusterError", "Link"]
