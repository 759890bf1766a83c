"""What runs on the other side of the sandbox: standard library only, and nothing of mafrt but this folder is there.

The trainer starts `zygote` and talks to it in `frames`; it imports `frames`, `limits` and `names` itself, nothing else.
"""
