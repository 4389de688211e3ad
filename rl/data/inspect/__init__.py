"""Checks tokenizer, chat template and rows of a run before anything is trained: 18 checks
(docs/diagnose.md).

`inspect(config)` reads the data itself and reads no weights. `check_stages` checks rows that a run
has read already. Imports no jax.
"""

from rl.data.inspect.checks import check_stages, end_of_turn_problem
from rl.data.inspect.listing import Refused
from rl.data.inspect.source import Inspection, check_first_rows, inspect
from rl.data.inspect.stage_rows import Encoded, StageRows

__all__ = [
    "Encoded",
    "Inspection",
    "Refused",
    "StageRows",
    "check_first_rows",
    "check_stages",
    "end_of_turn_problem",
    "inspect",
]
