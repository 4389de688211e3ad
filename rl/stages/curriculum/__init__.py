"""Which rows of the data the steps of a stage take: their order, and curricula."""
