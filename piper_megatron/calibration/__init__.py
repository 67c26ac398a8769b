"""A platform's constants, corrected by training logs of Megatron.

log.py        what a log says: iterations, memory, parameters, Megatron's list of its arguments
timing.py     the time of a step, from iterations behind the warm-up
printed.py    Megatron's arguments as a job prints them
match.py      a log beside the arguments of its run: one job, or why they are not of one run
constants.py  what can be corrected, and the platform that follows
fit.py        which of it the runs tell, and by least squares how much
calibrate.py  all of it together
"""
