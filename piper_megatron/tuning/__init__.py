"""The autotuner: the search over parallel layouts and settings, and the plans that come of it."""
