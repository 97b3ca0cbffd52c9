"""The type checker: SPMD types follow tensors through torch functions, autograd and collectives.

mode.py          `SpmdTypeMode`: its fast path, its slow path, what it writes on tensors
session.py       what a mode knows while it is entered; handlers are written against it
judge.py         from operands to results; shard_positions.py: where in a dim a shard lies
memo.py          judgements that are remembered
declared.py      the types that parameters and inputs start with
rules/           what each torch function does to dims, and in what it is linear
handlers/        functions that are not judged by a rule: operators, verbs, autograd, random numbers, writes in place
messages/        what an error says: origins, names, repairs
surroundings.py  what is changed in torch while a mode is entered; raw_collectives.py
"""

from .handlers import operators, verbs
from .mode import SpmdTypeMode, typecheck

__all__ = ["SpmdTypeMode", "operators", "typecheck", "verbs"]
