"""The server of `mafrt serve_tinker`: an adapter per training client of the Tinker API, all on one frozen base."""
