"""How close the resource model comes to published measurements.

The layer between `report`, which shows the result, and `resources`, which it judges:

    runs.py           measured runs, read from `measured_runs.jsonl` or a file like it
    replay.py         every run estimated as it ran
    comparison.py     a measured figure beside the prediction that it corresponds to
    statistics.py     errors, summarised
    stack_factors.py  factors of software stacks, and their error on families left out of the fit
    order.py          whether the predicted best layout is the measured best
    limits.py         what is demanded, with the reasons for what is not reached
    gate.py           figures against their limits
"""
