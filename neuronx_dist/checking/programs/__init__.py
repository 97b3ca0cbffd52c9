"""Playing a training step of every rank in one process, and comparing what the ranks did.

fakes.py            tensors with shapes and no values in the place of a model's
calls.py            what a program calls
played.py           plays one rank on fake tensors, in phases that can be played again for another rank
explore.py          which ranks to play: those whose program can differ, because it looked at a coordinate
gate.py             no gradient may be a part of a sum when the optimizer uses it
inputs.py           types of inputs; wire.py: of what stages send one another
compare.py          all ranks' collectives, group by group; messages between stages; the schedule
branches.py         what ranks do differently beside communicating
numeric.py          the same step with real values at toy size, on threads and in one process
"""
