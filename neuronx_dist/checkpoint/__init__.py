"""Checkpoints that load into any layout: tensors as pieces of the whole, in torch.distributed.checkpoint's format.

api.py              the public calls; errors.py: their errors
pieces.py           where a rank's elements lie in the whole tensor
rank_tensors.py     what one rank saves or loads, as data
run_state.py        the tensors of a model and an optimizer, by names that no layout changes
parameters.py       names and pieces of a model's parameters; optimizer_state.py: the optimizer's state of them
random_state.py     generators as a part of a checkpoint
tags.py             the protocol on disk: complete checkpoints, rotation; storage.py: local files, fsspec
background.py       writing beside the run, and how ranks learn of its end; agreement.py: one rank's error on all ranks
dcp/                the files, in torch.distributed.checkpoint's format
nxd/                the files that NeuronX Distributed writes
convert/            from one format to another
"""
