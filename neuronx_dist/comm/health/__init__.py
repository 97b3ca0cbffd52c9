"""Ranks that fail, wait for others, or are lost.

failure.py      a rank that fails ends the job on all ranks, with its message
board.py        what ranks publish in the job's store, without a collective
waiting.py      waits of this rank's threads; places.py: where each rank is; slow_waits.py: a report, or a job's end
gloo_aborts.py  the name of the collective in which gloo aborts the process
"""
