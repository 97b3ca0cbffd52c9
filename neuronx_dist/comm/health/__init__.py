"""Ranks that fail, wait for others, or are lost.

failure.py      a rank that fails ends the job on all ranks, with its message
board.py        what ranks publish in the job's store, without a collective
waiting.py      where the threads of this rank wait for other ranks
places.py       where each rank is, in the job's store, and which rank is missing
slow_waits.py   a line on stderr about a long wait, and the end of a job that hangs
gloo_aborts.py  the name of the collective in which gloo aborts the process
"""
