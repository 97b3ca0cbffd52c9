"""The type checker: SPMD types follow tensors through torch functions, autograd and collectives.

mode.py          `SpmdTypeMode`: its fast path, its slow path, what it writes on tensors
session.py       what a mode knows while it is entered; handlers are written against it
judging.py       from a call to its operands and its spec
judge.py         from operands to results; shard_positions.py: where in a dim a shard lies
memo.py          judgements that are remembered
declared.py      the types that parameters and inputs start with
rules/           what each torch function does to dims, and in what it is linear
handlers/        functions that are not judged by a rule: operators, verbs, autograd, random numbers, writes in place
messages/        what an error says: origins, names, repairs
surroundings.py  what is changed in torch while a mode is entered; raw_collectives.py

Words, in names as in text:

    spmd_type   one of R, I, V, P, S(i): what a tensor is along one axis
    type_       a `TensorType`: the spmd types of a tensor by axis
    note        all that is known of a tensor: its type, where that began, which mode wrote it, and for which version
    origin      the line where the type on an axis began, for messages
    atom        an axis that types are written on, of which every axis of a mesh is a product (spmd/axes.py)
    label       a factor of a dim in the spec of a call: equal labels are positions that belong together (rules/spec.py)
    judgement   the types of a call's results, from those of its operands; cached by the key of the call
    violation   why a call has no judgement: what an error is made of
"""

from ...lazy_names import lazy_names

__all__ = ["SpmdTypeMode", "typecheck"]

__getattr__ = lazy_names(__name__, {"SpmdTypeMode": "checking.types.mode", "typecheck": "checking.types.mode"})
