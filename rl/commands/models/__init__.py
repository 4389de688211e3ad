"""Verbs that take a model out of a run or a directory."""
