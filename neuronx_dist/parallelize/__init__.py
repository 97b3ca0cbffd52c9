"""Any module becomes a parallel program: recorded, divided by the typing rules, chosen exactly, emitted, checked.

program.py   the program and its division: what every step works on
record.py    a module's forward as a program: translate.py, of a recording's graph; builder.py, calls added in order
in_place.py  functions that write nothing, of the value that one in place has; memory.py: what a write makes of views
interpret.py runs a program on plain tensors, in one process
"""
