"""Emitted modules at run time: their base class, optimizers, and state dicts.

parallel_module.py   `ParallelModule`; stored.py: its parameters and buffers; loaded_class.py: an emitted file's class;
                     recorded_arguments.py: arguments compared with the recorded ones; pipelined.py: stages;
                     random_stream.py: random numbers of whole values; module_tensors.py: devices, dummy batches
optimizer.py         `build_optimizer`; gradient_sync.py, reducer.py: gradients summed over the units
state_dicts.py       state dicts, merged and deduplicated; layouts.py, optimizer_layout.py: their layout
broadcast.py         weights to other units
"""
