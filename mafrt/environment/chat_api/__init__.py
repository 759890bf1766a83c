"""The OpenAI-compatible chat API, as a server on loopback: requests as typed calls, answers as JSON or as a stream."""
