"""A trained team that answers: in the terminal, and behind the chat API."""
