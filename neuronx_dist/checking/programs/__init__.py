"""Playing a training step of every rank in one process, and comparing what the ranks did.

fakes.py            tensors with shapes and no values in the place of a model's
calls.py            the calls of a program
played.py           plays one rank on fake tensors, in phases that can be played again for another rank
explore.py          the choice of the ranks to play: those whose program can differ, since it read a coordinate;
                    random numbers of different seeds
gate.py             the refusal of optimizer steps on gradients that are not reduced
inputs.py           types of inputs; message_types.py: types of the messages between stages
compare.py          all ranks' collectives, group by group; messages between stages; the schedule
branches.py         differences between ranks in scalars, shapes and calls
numeric.py          the same step with real values at toy size, on threads and in one process
cells.py            ranks that no table distinguishes, as one cell; schedules.py: the stages of a pipeline, compared
optimizer_steps.py  an optimizer's step under the checker; kept_hooks.py: hooks that a step registers
returned.py         what a step returns
"""
