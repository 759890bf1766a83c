"""The policy loss of plain tensors: one turn without words unless a test says otherwise."""

import torch

from mafrt.algorithms.losses import PolicyTerms, policy_loss
from mafrt.config.algorithm_groups import PolicyLossSettings


def clipped_loss(new, old, advantages, *, denominator, turn=None, words=None, weights=None, **settings):
    one_turn = torch.zeros(len(new), dtype=torch.long)
    terms = PolicyTerms(
        new,
        old,
        advantages,
        denominator,
        turn=one_turn if turn is None else turn,
        words=one_turn if words is None else words,
        weights=weights,
    )
    return policy_loss(terms, PolicyLossSettings(**settings))
