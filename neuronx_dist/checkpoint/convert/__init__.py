"""Conversion of weights and optimizer state between formats, in one process: `neuronx-dist convert`.

weights.py             weights, a tensor in memory at a time
convert_optimizer.py   the optimizer's state
model_config.py        the model of a `config.json`
convert_command.py     the command line, and its progress bar
"""
