"""Diagnoses a run from its folder: `verdict` returns at most eight lines. Imports no jax.

record.py reads the folder, series.py measures trends, and each rule is a function that knows one
illness. docs/diagnose.md lists the rules with the source of each threshold.
"""

from rl.views.explain.rules import to_json
from rl.views.explain.verdict import findings, verdict

__all__ = ["findings", "to_json", "verdict"]
