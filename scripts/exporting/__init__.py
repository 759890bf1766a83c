"""Parts of an export: scores with intervals, model cards, merged models."""
