"""Process rewards teach: a Data Engineer that imitates good and careless programs is sound more often afterwards."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import fmean

import pytest
import torch
from helpers_dsbench import tasks_folder
from helpers_extras import need
from helpers_sandbox import ensure_bubblewrap

from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.types import StepResult
from mafrt.envs.dsbench import DSBenchEnv
from mafrt.envs.dsbench.builtin import builtin_tasks
from mafrt.envs.dsbench.demonstrations import says
from mafrt.envs.dsbench.roles import ENGINEER
from mafrt.models.shared_base import SharedBase
from mafrt.runners.identity import Provenance
from mafrt.runners.loop import Progress
from mafrt.runners.on_policy import OnPolicy
from mafrt.scripts import train_sft
from mafrt.storage import load_path

need("pandas", "sklearn")

pytestmark = pytest.mark.takes(slow=40)

PROFILE = Path(__file__).parents[2] / "profiles" / "dsbench_brief.json"


class EngineerOnly(DSBenchEnv):
    """The first stage alone, so that few programs are run. The outcome is 0, and tells nothing."""

    agents = (ENGINEER,)
    bounded = True  # as DSBenchEnv: in one process all episodes know the programs that were run

    def step(self, actions):
        found = super().step(actions)
        if self.stage.role == ENGINEER:
            return found
        return StepResult({}, {}, True, False, {**found.info, "outcome": 0.0})


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_the_rules_teach_the_data_engineer(tmp_path, monkeypatch):
    ensure_bubblewrap()
    torch.set_num_threads(1)
    monkeypatch.setenv("MAFRT_CACHE", str(tasks_folder()))
    env = EngineerOnly(tasks=builtin_tasks("train")[:4], style="brief", turns=1)
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps([one for one in json.loads(PROFILE.read_text()) if one["role"] == ENGINEER]))

    records = tmp_path / "records.jsonl"
    with records.open("w") as file:
        for episode in range(80):
            [(role, chat)] = env.reset(seed=episode, options={"task": episode % 4})[0].items()
            said = says(random.Random(episode), env.task, role, chat)
            file.write(json.dumps({"agent": role, "messages": chat, "response": said}) + "\n")
    words = ["--records_path", str(records), "--profile_path", str(profile), "--run_dir", str(tmp_path / "start")]
    rates = ["--epochs", "6", "--batch_size", "8", "--lr", "0.003", "--lora_rank", "16", "--lora_alpha", "32"]
    assert train_sft.main([*words, *rates]) == 0

    config = TrainConfig.of(
        algorithm="dr_mas",
        coach="rules",
        iterations=3,
        n_rollout_threads=32,
        n_samples=8,
        max_new_tokens=40,
        lora_rank=16,
        lora_alpha=32,
        lr=0.002,
        ppo_epoch=1,
        eval_episodes=0,
        save_interval=0,
    )
    start = load_path.resolve(tmp_path / "start" / "adapters")
    runner = OnPolicy(env, Team.load(profile), SharedBase.load("teaching-base"), config, provenance=Provenance(start))
    scores = []

    def follow(progress: Progress) -> None:
        scores.append(progress.metrics[f"coach_score/{ENGINEER}"])

    runner.run(follow)
    print(scores)
    # Half of the programs are careless at first: about 5 of 10. Chance moves a mean of 32 by .7 (one standard error).
    assert 2 < scores[0] < 8
    assert fmean(scores[-2:]) > scores[0] + 1.5
