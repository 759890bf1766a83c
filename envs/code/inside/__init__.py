"""What runs inside the sandbox to grade a program. Sent there as text; standard library only, nothing of mafrt."""
