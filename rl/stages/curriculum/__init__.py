"""Curricula: which rows of the data the steps of a stage take."""
