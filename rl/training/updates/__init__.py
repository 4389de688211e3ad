"""The parts of an update (rl/training/updater.py)."""
