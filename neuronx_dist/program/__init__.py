"""A model's forward as data, recorded once on fake tensors: a graph of its calls, or a `Program` of calls on values.

Pipelines cut the graph (`Recording`); `parallelize` divides the program; the checker plays recorded forwards.

recorder.py       runs the forward and records its calls; graph_nodes.py: the graph as it is built;
                  recording.py: the finished graph, and the facts about each node
effects.py        the memory that a call changes; isolation.py: temporary changes around the recorded module;
                  checkpointed_spans.py: the activation checkpoints around each call
evaluation.py     the result of a call; fake_mode.py: fake tensors, at little cost for repeated calls;
                  on_values.py: layers and functions that need values; experts.py: experts without a loop over them
program.py        `Program`, `Call`, `Value`, `Division`: a forward as a line of calls, and its division over ranks;
                  names that emitted files reserve; a run of a program on plain tensors
record.py         a module's forward as a `Program`; translate.py: from graph to program, with builder.py, in_place.py,
                  aliasing.py; decompose.py: means as sums
python_state.py   state of Python that forward can reach, and of random generators, saved and restored;
                  repeated.py: two recordings of one forward compared

A recorded forward has two forms. In the `fx.Graph`, which pipelines cut, a leaf layer is one call, and views, writes
in place, containers, hooks and set attributes are as in the code. In a `Program`, which `parallelize` divides, every
call is of a function, every write is a new value, and operands are tensors. One form for both would need all that
pipelines need, and most of `translate`, which turns writes into values, would remain. `CallFacts` has the seven facts
that both forms have.
"""
