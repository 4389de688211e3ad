"""The copy of a run in a remote folder (`run.remote`): uploads in the background, and the fetch at
the start. The remote folder has the names of the local one, and an object LOCK. Imports no jax."""
