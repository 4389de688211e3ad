"""What stages do with sampled completions: rows for the device, dynamic sampling, evaluations."""
