"""A model's forward, run once on fake tensors, as a graph of what it calls.

recorder.py    runs the forward and writes down its calls; recording.py: the graph, and what is known of each value
effects.py     what a call changes in place; surroundings.py: what a recording changes around the module, for a while
evaluation.py  what a call returns; fake_mode.py: fake tensors, at little cost for calls that were made before;
               on_values.py: layers and functions that need more
"""
