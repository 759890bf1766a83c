"""Preferences from recorded episodes: play with several samples a task, then DPO on good against bad answers.

    python examples/dpo_from_episodes.py 4      # iterations of play

The same as two commands: `mafrt train_math --n_samples 4`, and `mafrt train_dpo --episodes_path runs/NAME`.
"""

import sys
import tempfile
from pathlib import Path

from mafrt.scripts import train_dpo, train_math


def main(iterations=4, episodes=64):
    folder = Path(tempfile.mkdtemp())
    play = ["--profile_path", "profiles/quickstart_math.json", "--n_samples", "8", "--freeze", "all", "--log_tokens"]
    play += ["--n_rollout_threads", str(episodes), "--iterations", str(iterations), "--max_new_tokens", "48"]
    if code := train_math.main([*play, "--eval_episodes", "0", "--run_dir", str(folder / "played")]):
        return code
    learn = ["--episodes_path", str(folder / "played"), "--profile_path", "profiles/quickstart_math.json"]
    learn += ["--lr", "1e-3", "--batch_size", "16", "--run_dir", str(folder / "dpo")]
    code = train_dpo.main(learn)
    print(f"adapters in {folder / 'dpo' / 'adapters'}; mafrt evaluate --load_path {folder / 'dpo'} evaluates them")
    return code


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
