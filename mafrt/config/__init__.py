"""Settings of a run, their schema, and the team."""
