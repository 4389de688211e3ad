"""What stages do with sampled completions: rows for the device, records, metrics, evaluations."""
