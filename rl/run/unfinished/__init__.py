"""Uses of a run that has not ended: its weights at a checkpoint, and the request to stop it."""
