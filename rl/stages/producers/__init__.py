"""Producers of the groups that a stage trains on: synchronous, recorded, and filters over them."""
