"""Training without rollouts: SFT and DPO on files or recorded episodes."""
