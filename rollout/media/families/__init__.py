"""Processors of the families: contents to the inputs of their towers, one file a processor. Each
has the name of the class of transformers, `CLASS`, and `read`."""
