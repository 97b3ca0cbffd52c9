"""The files that NeuronX Distributed writes, read into any layout and written.

rank_files.py    names of files by rank, and the tensors in a file
parameter_layout.py  layout of a parameter: names, shards, repeated heads; fused projections (qkv,
                     gate_up), joined and split
nxd_reading.py   the files as pieces of whole tensors
nxd_writing.py   a file for each rank
"""
