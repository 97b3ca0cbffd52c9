"""What torch functions do to dims, and in which operands they are linear: the data that the type checker reads.

`spec.py` has the words and the registry; the other modules fill it, one family of functions each.
"""

from . import (  # noqa: F401 - importing them fills the registry
    bodies,
    factories,
    indexing,
    losses,
    matmul,
    meta,
    moves,
    nn,
    others,
    pieces,
    pointwise,
    recurrent,
    reduce,
    views,
)
from .spec import RULES, Dims, Rule, Spec, operands, rule

__all__ = ["RULES", "Dims", "Rule", "Spec", "operands", "rule"]
