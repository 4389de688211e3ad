"""Writes a run as one HTML file that needs no network, and compares runs.

`read` reads run folders, `series` makes buckets of metrics, `charts` chooses what is drawn, `svg`
draws it, `samples` chooses completions, `settings` compares configurations, `page` and `sections`
write the HTML, and `command` is what the verbs `rl report` and `rl compare` call. Nothing here
imports jax.
"""
