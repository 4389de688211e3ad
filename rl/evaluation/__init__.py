"""`rl eval`: tasks, completions of their problems, and the results of models."""
