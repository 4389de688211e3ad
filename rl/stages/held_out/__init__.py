"""The loss on rows that a stage does not train on."""
