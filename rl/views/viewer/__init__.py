"""Shows every sample of a run: a filter language, an index of numbers, a listing for terminals, and
a page."""
