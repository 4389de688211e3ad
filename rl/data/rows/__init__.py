"""Rows of data: read from files, folders, the hub and tasks, and turned into examples."""
