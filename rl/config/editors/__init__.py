"""What editors and shells know of a configuration: JSON Schemas made from its models, and the
completion of keys."""
