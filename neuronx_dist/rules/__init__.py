"""Rules of torch functions, read by checker, ShardTensor and `parallelize`: effects on dims, linear operands.

spec.py            the words (`Spec`, `Rule`), the registry, and builders of specs; `register_operator`
names.py           the function objects behind a name; containers.py: the arguments of a call
local_call.py      the call that a rank makes on its shards; the normal form in which label specs are compared
index.py           the spec of `x[index]`; bodies.py: functions that are typed by their bodies

The others fill the registry, one family of functions each:

pointwise.py, reduce.py, matmul.py (products; conv2d and other convolutions), views.py, splits.py, moves.py,
indexing.py, losses.py, nn.py, recurrent.py, factories.py, linalg.py, others.py; meta.py: functions with nothing to type
"""

from ..call_site import hide
from . import (  # noqa: F401 - importing them fills the registry
    bodies,
    factories,
    indexing,
    linalg,
    losses,
    matmul,
    meta,
    moves,
    nn,
    others,
    pointwise,
    recurrent,
    reduce,
    splits,
    views,
)
from .spec import RULES, Dims, Rule, Spec, operands, rule

__all__ = ["RULES", "Dims", "Rule", "Spec", "operands", "rule"]

hide(__name__)
