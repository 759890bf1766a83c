"""Programs that run in the sandbox and nowhere else: the agents' helper module, and inspection of their files."""
