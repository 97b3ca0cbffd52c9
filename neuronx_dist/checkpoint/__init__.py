"""Checkpoints that load into any layout: tensors as pieces of the whole, in torch.distributed.checkpoint's format.

pieces.py           where a rank's elements lie in the whole tensor
tensors.py          what one rank saves or loads, as data
state.py            what that is of a model and an optimizer, by names that no layout changes
parameters.py       names and pieces of a model's parameters; optimizer_state.py: what an optimizer keeps of them
files.py            which rank writes what, and writing it
source.py           what is read from; reading.py: the slices that a rank needs
sharing.py          which rank verifies which block
flattened_groups.py parameter groups as torch.distributed.checkpoint has them
archive.py          a tensor as `torch.save` writes it; catalog.py: `.metadata`; checksums.py: of blocks of files
nxd_files.py        folders that NeuronX Distributed wrote; nxd_source.py: as pieces of whole tensors
nxd_names.py        fused projections of its models as separate ones; nxd_fusing.py: the inverse
nxd_heads.py        their order over ranks; nxd_writing.py: files as NeuronX Distributed writes them
convert_optimizer.py the optimizer's state from one format to another
convert.py          weights from one format to another; convert_command.py: `neuronx-dist convert`; progress.py: its bar
whole_weights.py    those of a checkpoint as whole tensors
agreement.py        errors of one rank as errors of all; errors.py: what is raised
api.py              the public calls; random_state.py: generators as a part of a checkpoint
tags.py             the protocol on disk: what counts as a checkpoint, rotation; storage.py: local files, fsspec
staging.py          copying what is written, beside the run
background.py       writing beside the run, and how ranks learn of its end
"""
