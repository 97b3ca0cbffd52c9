"""NxD's import path of activation checkpointing; a layer stays the same module here, without a wrapper around it."""

from ....parallel_layers.activation_checkpoint import apply_activation_checkpointing, checkpoint_wrapper

__all__ = ["apply_activation_checkpointing", "checkpoint_wrapper"]
