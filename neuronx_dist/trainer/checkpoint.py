"""NxD's import path of checkpoints, which live in `neuronx_dist.checkpoint`."""

from ..checkpoint.api import CheckpointIOState, finalize_checkpoint, has_checkpoint, load_checkpoint, save_checkpoint

__all__ = ["CheckpointIOState", "finalize_checkpoint", "has_checkpoint", "load_checkpoint", "save_checkpoint"]
