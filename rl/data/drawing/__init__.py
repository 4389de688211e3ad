"""Which rows of the data a stage takes next."""
