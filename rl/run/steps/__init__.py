"""What the loop of a run does around the steps of a stage: the start, rates of a step, notes for
the console, evaluation and held-out loss, and the question whether the stage is over."""
