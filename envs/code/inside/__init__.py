"""Grading code that runs inside the sandbox. Sent there as text; standard library only, nothing of mafrt."""
