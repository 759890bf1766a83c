"""Programs that run in the sandbox and nowhere else: the agents' helper, and what looks at the files they leave."""
