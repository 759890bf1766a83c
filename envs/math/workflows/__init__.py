"""Who speaks next and what it sees, for math problems."""
