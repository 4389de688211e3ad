"""Rewards that published benchmarks need."""
