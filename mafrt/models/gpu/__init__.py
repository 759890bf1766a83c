"""How a GPU computes where it has a form of its own: attention of packed rows, decoding, sampling.

`compute` registers itself when the first base is made for a GPU. Every form is tested against the reference in
`mafrt.models`.
"""
