"""Functions over windows of sharded dims, on a rank's local tensor: each rank receives its windows, and computes them.

index_maps.py     the inputs that each output needs, and the halos of all ranks, planned (`plan_windows`)
chains.py         consecutive windows after one exchange
local_windows.py  exchange and computation of a rank's windows; large interiors while halos travel
convolution.py    convolutions, transposed ones, padding
pooling.py        max, average, power and adaptive pooling
resample.py       interpolation
"""
