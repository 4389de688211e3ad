"""The weights that a stage leaves: their checks, and the directory that a run exports."""
