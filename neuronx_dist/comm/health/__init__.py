"""Ranks that fail, wait for others, or are lost.

failure.py      a rank that fails ends the job on all ranks, with its message
board.py        what ranks publish in the job's store, without a collective
waiting.py      where the threads of this rank wait for other ranks; slow_waits.py: a line on stderr about a long wait
gloo_aborts.py  the name of the collective in which gloo aborts the process
"""
