"""Sizes of a job, where its ranks are, and which device plays which rank."""
