"""What a report shows of the folder of `rl eval`."""
