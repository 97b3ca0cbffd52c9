"""The verbs: collectives, independent of the backend.

collectives.py   the verbs: dims, dtypes, `out=`, recording, errors; exchange.py: `comm.exchange`, of uneven sizes
operands.py      shapes and dtypes before and after a collective; dispatch.py: running it, lists of tensors
compiled.py      the verbs in compiled code; transformed_tensors.py: tensors of `torch.func`, which the verbs refuse
"""
