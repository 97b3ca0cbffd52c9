"""Before a job starts: is a layout possible, and how much memory will each rank need?

layout.py    sizes that divide, repairs, a picture of the ranks; pure Python
memory.py    the predicted memory of every rank; meter.py: measuring it
"""
