"""Processors of the families: contents to the inputs of their towers, one file a processor."""
