"""How the shipped tiny bases are made: problems, careless demonstrators, tokenizers, pretraining.

Used by `bench/make_base.py`, `bench/make_games_base.py` and tests; nothing of it is needed to train a team.
"""
