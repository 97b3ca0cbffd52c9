"""NxD's import path of `set_random_seed`."""

from ....parallel_layers.random import set_random_seed

__all__ = ["set_random_seed"]
