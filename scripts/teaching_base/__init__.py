"""How the shipped teaching base is made: problems, careless demonstrators, tokenizer, pretraining.

Used by `scripts/make_base.py` and by tests; nothing of it is needed to train a team.
"""
