"""NxD's import path of `create_partitions`, which lives in `neuronx_dist.pipeline.cut`."""

from .cut.cuts import create_partitions

__all__ = ["create_partitions"]
