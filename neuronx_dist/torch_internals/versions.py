"""Versions of torch that the tests ran on, and a warning for newer ones.

A private name of torch may go, which is an error, or change its behaviour, which no error shows. The type checker, the
recorder and backward passes in two halves read the state of torch's autograd by such names: they warn.
"""

from __future__ import annotations

import re
import warnings

import torch

__all__ = ["TESTED", "warn_if_untested"]

TESTED = ("2.9", "2.13", "2.14", "2.15")  # in order; `.ci/run` tests the last one

_warned = False


def warn_if_untested(feature: str) -> None:
    """Warns, once in a process, if torch is newer than all of `TESTED`.

    Args:
        feature: what depends on private names of torch, as the subject of a sentence: "the type checker".
    """
    global _warned
    if _warned:
        return
    _warned = True
    if release(torch.__version__) > max(map(release, TESTED)):
        warnings.warn(
            f"torch {torch.__version__} is newer than all versions that neuronx_dist was tested with "
            f"({', '.join(TESTED)}), and {feature} depends on private names of torch, which may have changed. "
            "The type checker, parallelize, the recorder that cuts models into pipeline stages, and backward passes in "
            "two halves depend on them; layers, gradients, optimizers and checkpoints use few, and raise an error "
            "where one is missing",
            stacklevel=3,
        )


def release(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version: (2, 15) of "2.15.0+cu132"."""
    numbers = re.findall(r"\d+", version)[:2]
    return tuple(map(int, numbers))
