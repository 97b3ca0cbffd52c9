"""The choice of a strategy for each call of a program: the strategies that typing rules allow, and the cheapest ones.

strategies.py    the strategies of a call; derivation.py: from the function's typing rule (integers of a rank's
                 local call: `rules/local_call.py`)
composite_strategies.py   strategies of functions that need a whole dim, on its shards
conversions.py   the operators between types of a value, and the bytes that they send
exact.py         the choice of a strategy for each call, at the least cost: `StrategyChoice`, built by policy/graph.py;
                 cost_tables.py: the costs; plan_costs.py: those of a division, by call
stages.py        the pipeline stages of a division: their calls, and the values between them
local_program.py, second_axis.py   the program of a rank of the first axis, and its strategies over a second one

Two axes: the program is divided over the first axis, and then the program of one rank is divided again
(`Division.outer`). The second program has local shapes, and conversions of the first axis are calls in it, with
strategies. A list of axes would need tables over pairs of strategies, or an order of conversions for each value, in
choice, emitter and stages.
"""
