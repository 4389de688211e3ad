"""A run that goes on: what may differ from its saved configuration, and from which step on it
holds; and the policy of remat, which a run keeps from its start."""
