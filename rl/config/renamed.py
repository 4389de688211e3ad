"""Lists the keys of earlier versions, so that a message can say their present names."""

RENAMED = {
    "internal_metrics": "diagnostics",
    "if_given": "if_present",
    "rings": "sliding_window_cache",
    "learnt": "train_on",
}
"""Key of an earlier version -> its name now."""
