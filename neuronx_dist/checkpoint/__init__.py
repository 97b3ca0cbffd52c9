"""Checkpoints that load into any layout: tensors as pieces of the whole, in torch.distributed.checkpoint's format.

pieces.py     where a rank's elements lie in the whole tensor
state.py      what a checkpoint holds of a model and an optimizer, by names that no layout changes
files.py      its files: which rank writes what, reading slices of them
checksums.py  checksums of blocks, verified as they are read
errors.py     what is raised
"""
