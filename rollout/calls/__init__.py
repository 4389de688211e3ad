"""Calls of tools in what a model writes: the formats of families, and the parser of a reply."""
