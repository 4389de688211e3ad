"""The verbs that read the folder of a run."""
