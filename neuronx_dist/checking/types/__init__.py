"""The type checker: SPMD types follow tensors through torch functions, autograd and collectives.

mode.py          `SpmdTypeMode`: its fast path, its slow path, the notes on tensors
session.py       the state of a mode while it is entered, as handlers see it
judging.py       from a call to its operands and its spec
judge.py         from types of operands to types of results; shard_positions.py: the place of a shard in a dim
partial_kinds.py parts of a value that are no summands: maxima and norms of shards
piece_order.py   pieces in another order than that of the ranks, as those of zigzag sequences
read_numbers.py  numbers that a program reads from tensors, and the decisions that it takes by them
memo.py          the cache of judgements
declared.py      the first types of parameters and inputs
handlers/        functions without a rule: operators, verbs, autograd, random numbers, writes in place
messages/        the texts of errors: origins, names, repairs
surroundings.py  changes of torch while a mode is entered; raw_collectives.py: the refusal of torch.distributed
axis_powers.py   numbers that are powers of axis sizes; scales.py: the scale of results

Words, in names as in text:

    spmd_type   one of R, I, V, P, S(i): the type of a tensor on one axis
    type_       a `TensorType`: the spmd types of a tensor by axis
    note        the record on a tensor: its type, the origins of it, the mode that wrote it, the version it is for
    origin      the line where the type on an axis began, for messages
    atom        an axis that types are written on, of which every axis of a mesh is a product (spmd/axes.py)
    label       a factor of a dim in the spec of a call: equal labels are positions that belong together (rules/spec.py)
    judgement   the types of a call's results, from those of its operands; cached by the key of the call
    violation   the reason that a call has no judgement, of which an error is made
"""

from ...lazy_names import lazy_names

__all__ = ["SpmdTypeMode", "typecheck"]

__getattr__ = lazy_names(__name__, {"SpmdTypeMode": "checking.types.mode", "typecheck": "checking.types.mode"})
