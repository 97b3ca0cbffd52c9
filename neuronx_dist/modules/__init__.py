"""Modules of several parallel layers, by NeuronX Distributed's names.

qkv_linear.py        query, key and value projections in one layer; key/value heads on several ranks
qkv_linear_utils.py  two questions about its weights
lora/                adapters on plain and on parallel layers
moe/                 mixture of experts
rms_norm.py          NxD's import path of the norm
"""
