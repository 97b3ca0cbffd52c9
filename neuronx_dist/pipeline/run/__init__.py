"""Running a schedule on one rank.

executor.py            computes forwards and backwards, and keeps what is between them
halves.py, line.py, recomputation.py
                       a backward in two halves, by autograd
transport.py           the interface of a transport; which tensors a message carries, and how they lie in memory
message_transport.py   receives posted ahead, sends awaited late; lockstep_transport.py: ranks without messages (XLA)
stage_program.py       what a recording became on this rank; microbatches.py: the inputs
run_batch.py           a pass of a schedule over a batch: executor and transport put together
comparison.py          comparison of the ranks of a pipeline: the cuts of a model, and what they run
step_loss.py           the loss: which output it is, whether it is finite, what a step returns of it, and where
trace.py               what happens in a pass, for Perfetto; trace_file.py: the file
"""
