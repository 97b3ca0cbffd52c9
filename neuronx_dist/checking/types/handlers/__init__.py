"""Handlers of the calls that a rule does not cover: each derives the types of one kind of call in its own way.

operators.py         the typed operators of `spmd`; verbs.py: plain verbs; lost_gradients.py: gradients they lose
autograd.py          types through backward; composition.py: fused functions against their operators
accumulation.py      gradients added to leaves; hooks.py: hooks on gradients; checked_losses.py: arguments of losses
inplace.py           writes in place; packing.py: flat buffers and lists of tensors
random_numbers.py    constants and random numbers; seeds.py: seeds of generators
axis_numbers.py      numbers that are powers of an axis' size; rank_arguments.py: numbers that differ by rank
lookups.py           lookups in a piece of a table; rank_ranges.py: the positions that a mask keeps; stacks.py: stacks
one_rank.py          values that one rank adds; own_rows.py: a rank's rows among all
captured.py          custom functions bound before a check; ways_back.py: what their permutes send back
local_scope.py       the inside of `spmd.local_map`; declared_functions.py: autograd functions with declared types
vmapped.py           `torch.vmap` and `torch.func`; scripted.py: functions that `torch.jit` compiled
"""
