"""The choice of a strategy for each call of a program: the strategies that typing rules allow, and the cheapest ones.

strategies.py    the strategies of a call; derivation.py: from the function's typing rule (integers of a rank's
                 local call: `rules/local_call.py`)
composite_strategies.py   strategies of functions that need a whole dim, on its shards
conversions.py   the operators between types of a value, and the bytes that they send
exact.py         the choice of a strategy for each call, at the least cost: `StrategyChoice`, built by policy/graph.py;
                 cost_tables.py: the costs; plan_costs.py: those of a division, by call
job_costs.py     seconds and bytes of a whole job: units, stages, ZeRO, recomputation
cuts.py          where stages begin, by the slowest stage; step_cuts.py: by the simulated step of a job
stages.py        the pipeline stages of a division: their calls, and the values between them
local_program.py, second_axis.py   the program of a rank of the first axis, and its strategies over a second one

Two axes: the program is divided over the first axis, and then the program of one rank is divided again
(`Division.outer`). The second program has local shapes, and conversions of the first axis are calls in it, with
strategies. Axes chosen at once would need tables over pairs of strategies, or an order of conversions for each value,
in choice, emitter and stages.

A third axis, by one more division of the second program, would need more than a loop:
- names: `mesh.part_of` reads one sign, "tp/2" or "tp%2"; the middle one of three axes is "tp/2%2", which meshes,
  groups, types, rank numbers and random streams (12 files that call `part_of`) take for an unknown axis;
- types: `Mesh.tp_replicas`, a public field, splits tp into two atoms; three need two numbers;
- stored weights: one that the first and the third axis cut, and not the second, is sharded over no part of tp:
  `ShardSpec.axis` is one name, by which ZeRO, `gather_full` and checkpoints find a rank's piece, and a mesh refuses
  to merge two parts of one axis;
- types on earlier axes: `Value.outer` and `Call.outer` hold those of one axis, by which `derivation.results_of` judges,
  and `second_axis.py` finds the one label that is cut already;
- plans: `Plan.second` and `second_calls` are fields of its file, which older versions read.
Stages and units are two axes beside: a job has pp x dp x two axes inside of a stage.
"""
