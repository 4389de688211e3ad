"""Names the share of groups with equal rewards that the run and `rl explain` speak about."""

EQUAL_SHARE = 0.8
"""Share of the groups of a step whose completions all have one reward, from which little is
learned."""
