"""What stages do with sampled completions: producers of groups (synchronous, recorded, dynamic, told
to a curriculum), rows for the device, evaluations."""
