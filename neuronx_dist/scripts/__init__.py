"""Conversion of checkpoints by the names of NeuronX Distributed's scripts.

checkpoint_converter.py         `CheckpointConverterBase`: Hugging Face's state dicts and NxD's files
naming.py                       names, and which dim of a parameter is divided
convert_zero_checkpoints.py     the command `nxd_convert_zero_checkpoints`: ZeRO-1's state at another dp
"""
