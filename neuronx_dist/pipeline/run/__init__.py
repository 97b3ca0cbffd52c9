"""Running a schedule on one rank.

executor.py    computes forwards and backwards, and keeps what is between them
transport.py   what it needs of a transport: messages.py, or lockstep.py where ranks have no messages (XLA)
wire.py        which tensors a message carries, and how they lie in memory
program.py     what a recording became on this rank; microbatches.py: the inputs
running.py     a pass of a schedule over a batch: executor and transport put together
trace.py       what happens in a pass, for Perfetto; trace_file.py: the file
loss.py        which output is the loss; report.py: what a step returns of it, and where
"""
