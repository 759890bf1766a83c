"""Code that runs inside the sandbox: standard library only; no other part of mafrt is available there.

The trainer starts `zygote` and talks to it in `frames`; on its own side it imports only `frames`, `limits` and `names`.
"""
