"""Checks before a run: the machine, the data, and what the policy samples."""
