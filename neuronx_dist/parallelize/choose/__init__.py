"""The choice of a strategy for each call of a program: the strategies that typing rules allow, and the cheapest ones.

strategies.py    the strategies of a call; derivation.py: from the function's typing rule (integers of a rank's
                 local call: `rules/local_call.py`)
composite_strategies.py   strategies of functions that need a whole dim, on its shards
whole_tables.py  embedding tables that are each whole on one rank: their ranks, and the strategies of their calls
conversions.py   the operators between types of a value, and the bytes that they send
joined.py        the conversions that are one collective
exact.py         the choice of a strategy for each call, at the least cost: `StrategyChoice`, built by policy/graph.py;
                 cost_tables.py: the costs; plan_costs.py: those of a division, by call
job_costs.py     seconds and bytes of a whole job: units, stages, ZeRO, recomputation
cuts.py          where stages begin, by the slowest stage; step_cuts.py: by the simulated step of a job
stages.py        the pipeline stages of a division: their calls, and the values between them
local_program.py, later_axis.py   the program of a rank of an axis, and its strategies over the next one

Several axes: the program is divided over the first axis, then the program of one rank over the next, and so on
(`Division.levels`). A later program has local shapes, and conversions of the axes before are calls in it, with
strategies. Axes chosen at once would need tables over pairs of strategies, or an order of conversions for each value,
in choice, emitter and stages.

A stored weight is cut over adjacent axes, in the same way: `ShardSpec.axis`, by which ZeRO, `gather_full` and
checkpoints find a rank's piece, is one part of tp. Stages and units are two axes beside these.

Whole embedding tables have unequal pieces: no conversion, stage or later axis takes their rows. So they are offered on
one axis without a pipeline, and nothing may stand between look-up and join. Where the batch is whole on all ranks
behind the join, its rows are exchanged and then gathered: one gather of unequal pieces would send less.
"""
