"""Before a job starts: is a layout possible, and how much memory will each rank need?

layout.py    sizes that divide, repairs, a picture of the ranks; pure Python
memory.py    the predicted memory of every rank; meter.py: measuring it
costs.py     seconds of a call and of a collective
choice.py    the exact minimum of a sum of tables: which strategy everything gets
stages.py    where a line of calls is cut into pipeline stages
plan.py      `Plan`: how a model is divided, as one JSON file
"""
