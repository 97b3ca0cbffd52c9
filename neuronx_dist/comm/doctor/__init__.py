"""`neuronx-dist doctor`: can this machine run a job, and what does it lack?

command.py   options, output as text or JSON, exit code
findings.py  one line of the report
machine.py   versions, packages, devices, backends, shared memory, threads
network.py   loopback, ports, the name of this host
pair.py      two local processes that probe a backend; probe.py: the program of each
"""
