"""Measures a machine and fits the curves of its platform file.

points.py            what is measured, and the file of finished points
plan.py              which points: quick or thorough, by device and network levels
machine.py           device, backend, ranks, their place in the network, versions
clock.py             warm-up, turns, medians over ranks
kernels.py           products, attention, memory-bound kernels, launches, copies
collectives.py       collectives and messages over one network level
dispatchers.py       dispatch and combine of a MoE layer with every dispatcher
least_squares.py     nonnegative, robust, of relative errors
accelerator_fit.py   points of kernels -> the curves of platform/accelerator.py
network_fit.py       points of collectives -> those of platform/transfer.py
profile.py           base platform and fits -> platform
run.py               all of it, resumable

Only machine, clock, kernels, collectives, dispatchers and run import torch.
"""
