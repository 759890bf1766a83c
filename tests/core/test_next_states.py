"""A world model from recorded episodes: the next observation follows from what was seen and said."""

from __future__ import annotations

import json
from pathlib import Path

import toy
from helpers_models import tiny_tokenizer

from mafrt.config.team import Team
from mafrt.rollout.prompts import encode_answer, encode_prompt
from mafrt.runners.offline.next_states import QUESTION, next_states
from mafrt.runners.offline.replay import read_episodes


def test_the_records_are_the_transitions_of_a_run(tmp_path):
    toy.train(tmp_path, iterations=1, eval_episodes=0, n_rollout_threads=6)
    team, tokenizer, env = Team.of(toy.Digits.agents), tiny_tokenizer(), toy.make().env
    episodes = read_episodes(tmp_path, team)
    records, counts = next_states(episodes, team, tokenizer, env, 1)
    assert counts == {"episodes": 6} and records
    lines = [json.loads(line) for line in Path(tmp_path, "episodes.jsonl").read_text().splitlines()]
    wanted = set()
    for episode in lines:
        word, said = episode["info"]["task"], episode["turns"][0]["text"]
        # `first` sees the word; `second` then sees the word and the answer. The last step is followed by nothing.
        chat = [("user", word), ("assistant", said), ("user", QUESTION)]
        prompt = encode_prompt(tokenizer, "", [{"role": role, "content": text} for role, text in chat])
        # Special tokens that were sampled are characters of the observation.
        target = [*encode_answer(tokenizer, f"{word} {said}"), tokenizer.eos_token_id]
        wanted.add(("first", tuple(prompt), tuple(target)))
    assert {(r.agent, tuple(r.turns[0].prompt_ids), tuple(r.turns[0].action_ids)) for r in records} == wanted


def test_an_episode_that_comes_out_otherwise_is_left_out(tmp_path):
    toy.train(tmp_path, iterations=1, eval_episodes=0, n_rollout_threads=4)
    team, env = Team.of(toy.Digits.agents), toy.make().env
    episodes = read_episodes(tmp_path, team)
    episodes[0][1]["outcome"] += 0.5
    _, counts = next_states(episodes, team, tiny_tokenizer(), env, 1)
    assert counts == {"episodes": 4, "not_reproduced": 1}
