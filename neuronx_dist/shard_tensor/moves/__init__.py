"""Shards on their way: from the ranks that have positions of a dim to the ranks that need them, in both passes.

intervals.py     the positions that each rank needs, and their senders: plans of all ranks, from sizes alone
shard_pieces.py  parts of a shard: views to send, gradients to add
exchange.py      the exchange of a plan, differentiable
one_program.py   the same exchange as one program for all ranks (XLA)
one_dim.py       gather, split, exchange and sum along one mesh dim
tangents.py      moves of dual numbers (forward-mode AD)
extremes.py      maximum and minimum over dims and ranks
other_mesh.py    from a layout on one mesh to a layout on another
redistribute.py  from any layout to any other: the files above, one mesh dim after the other
fetch.py         rows by their positions, requested from their owners
"""
