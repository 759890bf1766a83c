"""The bench that switches parts of rules off: its world, its intervals, and that both sides really differ."""

from __future__ import annotations

import pytest

from bench import parts
from bench._parts import BOXES, WORDS, Both, Helpers, Lazy, Peers, Unpaid, Words
from bench._tables import seed_interval
from bench.parts import PARTS

pytestmark = pytest.mark.takes(slow=21)


def test_words_in_turn():
    world = Words(2, 1, offset=8.0)
    observations, _ = world.reset(options={"task": 1})
    assert observations == {"agent0": "Box 1."}
    first = world.step({"agent0": f" {WORDS[1]} "})
    assert first.rewards == {"agent0": 1.0} and set(first.observations) == {"agent1"} and not first.terminated
    last = world.step({"agent1": WORDS[0]})
    assert last.rewards == {"agent1": 0.0} and last.terminated
    assert last.info["outcome"] == 8.5 and last.info["measures"] == {"right": 0.5}


def test_words_at_once_and_given_boxes():
    world = Words(3, 1, together=True, fixed=2)
    observations, _ = world.reset(options={"task": 1})
    assert set(observations) == {"agent0", "agent1", "agent2"}
    assert world.step(dict.fromkeys(observations, "x")).info["outcome"] == 1.0  # every word is right there
    world.reset(options={"task": 2})
    assert world.step({"agent0": WORDS[2], "agent1": "x", "agent2": ""}).info["outcome"] == pytest.approx(1 / 3)
    assert world.num_tasks == BOXES


def test_the_last_one_is_paid_for_the_word_before():
    world = Words(2, 1, relay=True)
    world.reset(options={"task": 1})
    assert world.step({"agent0": WORDS[1]}).rewards == {}
    last = world.step({"agent1": "x"})
    assert last.rewards == {"agent1": 1.0} and last.info["outcome"] == 1.0


def test_the_last_one_is_paid_more_and_the_outcome_is_not_touched():
    world = Words(2, 1, scale=30.0)
    world.reset(options={"task": 1})
    assert world.step({"agent0": WORDS[1]}).rewards == {"agent0": 1.0}
    last = world.step({"agent1": WORDS[1]})
    assert last.rewards == {"agent1": 30.0} and last.info["outcome"] == 1.0


@pytest.mark.parametrize("own", [0.0, 1.0])
@pytest.mark.parametrize(("word", "helped"), [(WORDS[1], 1.0), ("x", 0.0)])
def test_a_helper_is_paid_alike_whatever_it_says(own, word, helped):
    world = Helpers(own)
    world.reset(options={"task": 1})
    first = world.step({"agent0": word, "agent1": WORDS[1]})
    assert first.rewards == {"agent0": own, "agent1": 0.0} and not first.terminated
    last = world.step({"agent0": "x", "agent1": "x"})
    assert last.rewards == {"agent0": own, "agent1": helped} and last.info["outcome"] == helped


def test_calculations_are_unpaid_in_training_and_count_where_held_out():
    for world, paid in ((Unpaid(), 0.0), (Unpaid().evaluated(), 1.0)):
        asked = world.reset(options={"task": BOXES + 2})[0]["agent0"]
        assert asked == ("Compute 7 * 7." if paid == 0.0 else "Compute 4 * 2.")
        assert world.step({"agent0": "Multiply"}).info == {"outcome": paid, "measures": {"skill": 1.0}}
        world.reset(options={"task": 1})
        assert world.step({"agent0": WORDS[1]}).info["outcome"] == 1.0


def test_lazy_work_pays_less():
    def played(second):
        world = Lazy()
        world.reset(options={"task": 0})
        result = world.step({"agent0": "Add"})
        for turn in range(1, 6):
            agent = f"agent{turn % 2}"
            assert result.observations == {agent: "Add. Box 0."}
            result = world.step({agent: second if turn == 1 else "Add"})
            if result.terminated:
                return turn + 1, result.info["outcome"]

    assert played("Add") == (6, 1.0)
    assert played("Divide") == (2, pytest.approx(1 / 6 + 0.1))


def test_lazy_work_that_is_paid_by_turn():
    world = Lazy(by_turn=True)
    world.reset(options={"task": 0})
    assert world.step({"agent0": "Add"}).rewards == {"agent0": pytest.approx(1 / 6)}
    last = world.step({"agent1": Lazy.stop})
    assert last.terminated and last.rewards == {"agent1": 0.1}


def test_an_echo_pays_for_the_word_before_and_letters_are_counted_in_all():
    world = Words(2, 1, echo=8.0, even=4.0)
    world.reset(options={"task": 0})
    assert world.step({"agent0": " Divide "}).rewards == {"agent0": 8.0}  # before it stands nothing: no letters
    last = world.step({"agent1": "Add"})
    assert last.rewards == {"agent1": 9.0} and last.info["outcome"] == 0.5  # of nine letters
    world.reset(options={"task": 0})
    world.step({"agent0": "Add"})
    last = world.step({"agent1": "Add"})
    assert last.rewards == {"agent1": 1.0} and last.info["outcome"] == 5.0  # of six
    plain = world.evaluated()
    plain.reset(options={"task": 0})
    assert plain.step({"agent0": "Divide"}).rewards == {"agent0": 0.0}
    assert plain.step({"agent1": "Add"}).info["outcome"] == 0.5


def test_a_peer_is_right_by_chance_whatever_it_says():
    world, seen = Peers(0.5), set()
    for seed in range(16):
        world.reset(seed=seed, options={"task": 1})
        first = world.step({"agent0": "x", "agent1": "x"})
        last = world.step({"agent0": WORDS[1], "agent1": "x"})
        assert first.rewards["agent0"] == 0.0 and last.rewards["agent0"] == 1.0 and last.info["outcome"] == 9.0
        assert first.rewards["agent1"] == last.rewards["agent1"]
        seen.add(first.rewards["agent1"])
    assert seen == {0.0, 1.0}


@pytest.mark.parametrize("words, outcome", [((WORDS[1], WORDS[1]), 1.0), ((WORDS[1], "x"), 0.0), (("x", "x"), 0.2)])
def test_to_be_right_alone_costs(words, outcome):
    world = Both()
    world.reset(options={"task": 1})
    assert world.step(dict(zip(world.agents, words, strict=True))).info["outcome"] == outcome


def test_an_interval_by_hand():
    # Mean .2, deviation .1, three seeds: 4.303 * .1 / sqrt(3) = .248.
    assert seed_interval([0.1, 0.2, 0.3]) == pytest.approx((0.2 - 0.2484, 0.2 + 0.2484), abs=1e-3)
    assert seed_interval([0.1]) is None  # a single seed has no interval


def test_values_that_hold_together():
    """By hand: .01 against .05 / 3, .02 against .05 / 2, .06 against .05."""
    assert parts.holm([0.06, 0.01, 0.02]) == [False, True, True]
    assert parts.holm([0.02, 0.02, 0.02]) == [False, False, False]  # the least has to be below .05 / 3
    assert parts.holm([]) == []


def test_numbered_turns_have_words_of_their_own_and_given_boxes_are_not_scored():
    world = Words(2, 1, numbered=True)
    assert world.reset(options={"task": 1})[0] == {"agent0": "Box 1, word 1."}
    second = world.step({"agent0": WORDS[1]})
    assert second.observations == {"agent1": "Box 1, word 2."}
    assert world.step({"agent1": WORDS[2]}).info["outcome"] == 1.0
    scored = Words(2, 1, boxes=32, fixed=30).evaluated().spawn()  # as the player takes it
    assert scored.num_tasks == 2
    assert scored.reset(options={"task": 1})[0] == {"agent0": "Box 31."}
    assert scored.step({"agent0": WORDS[3]}).rewards == {"agent0": 1.0}
    scored.reset(options={"task": 0})
    assert scored.step({"agent0": "x"}).rewards == {"agent0": 0.0}


@pytest.mark.nightly
@pytest.mark.slow  # all together
@pytest.mark.parametrize("name", sorted(PARTS))
def test_both_sides_differ_in_the_part_and_run(name, monkeypatch):
    part = PARTS[name]
    assert part.alive != part.dead and not set(part.settings) & (set(part.alive) | set(part.dead))
    monkeypatch.setattr(parts, "COMMON", {**parts.COMMON, "n_rollout_threads": 8})
    monkeypatch.setattr(parts, "evaluate", lambda *_, **__: type("Found", (), {"scores": {"0": [0.5, 0.7]}})())
    assert parts.score(part, {**part.settings, **part.alive}, 1, 1) == pytest.approx(0.6)
