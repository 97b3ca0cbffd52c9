"""Planning before a job starts: is a layout possible, how much memory does each rank need, which division is fastest?

layout.py    checks that sizes divide, repairs, a picture of the ranks; nearest_layout.py: the nearest one that works
memory.py    the predicted memory of every rank; meter.py: the measured memory; fake_rank.py: a rank without processes
recompute.py `nxd.recompute`: activations that backward computes again, chosen by a memory budget
costs.py     seconds of a call and of a collective
choice.py    the exact minimum of a sum of tables, which chooses strategies
plan.py      `Plan`: the division of a model, as one JSON file
"""
