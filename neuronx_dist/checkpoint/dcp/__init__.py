"""The files of a checkpoint in torch.distributed.checkpoint's format.

writing.py            division of the writing among ranks, and the files; staging.py: copies for asynchronous saves
reading.py            the slices that a rank needs, through a memory map; checkpoint_source.py: its interface
catalog.py            `.metadata`; archive.py: a tensor as `torch.save` writes it; plain_data.py: bytes without code
flattened_groups.py   parameter groups, an item for each option
checksums.py          checksums of blocks of files, and which rank verifies which block
"""
