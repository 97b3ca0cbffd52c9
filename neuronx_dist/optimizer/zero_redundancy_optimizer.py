"""The names of NxD's module of this name."""

from .zero1 import NeuronZero1Optimizer

__all__ = ["NeuronEPZero1Optimizer", "NeuronZero1Optimizer"]

# Experts, and what is not one, are sharded by one optimizer, each parameter over its own ranks.
NeuronEPZero1Optimizer = NeuronZero1Optimizer
