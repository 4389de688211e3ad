"""What the loop of a run does between the steps of a stage: rates of the step, notes for the
console, evaluation and held-out loss, and the question whether the stage is over."""
