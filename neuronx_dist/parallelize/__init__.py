"""Any module becomes a parallel program: recorded, divided by the typing rules, chosen exactly, emitted, checked.

program.py   the program and its division: what every step works on
"""
