"""Running a schedule on one rank: executor.py, with messages; lockstep.py, without; microbatches.py: the inputs."""
