"""What chat templates say of thoughts, and what is said of settings that do nothing with them."""

from __future__ import annotations

import logging

import pytest
from helpers_models import tiny_tokenizer
from toy import make

from mafrt.environment.thought_forms import BY_OPENING, template_thoughts
from mafrt.rollout.thought_notes import note_thoughts

ASKS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]"
GIVEN = "{% if m.reasoning_content %}OPEN{{ m.reasoning_content }}{% endif %}{{ m.content }}"
TEMPLATES = {
    "none": (ASKS + "{% endif %}", None, ""),
    "strips": (ASKS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}") + "{% endif %}", "<think>", ""),
    "opens": (ASKS + "<think>\n{% endif %}", "<think>", "opened"),
    "over": (ASKS + "<think>\n\n</think>{% endif %}", "<think>", "closed"),
    "end alone": (ASKS + "</think>{% endif %}", "<think>", "closed"),
    "gemma4": (ASKS + "<|channel>thought\n<channel|>{% endif %}", "<|channel>thought", "closed"),
    "hunyuan": (ASKS + "<think{% set a = ':opensource>' %}{{ a }}{% endif %}", "<think:opensource>", "opened"),
    "kimi": (ASKS + "<|open|>{{ 'think' }}<|sep|>{% endif %}", "<|open|>think<|sep|>", "opened"),
    "mistral": (ASKS + "{# [THINK] #}{% endif %}", "[THINK]", ""),
    "cohere": (ASKS + "<|START_THINKING|>{% endif %}", "<|START_THINKING|>", "opened"),
    "apertus": (ASKS + "{# <|inner_prefix|> #}{% endif %}", "<|inner_prefix|>", ""),
    "apriel": (ASKS + "Here are my reasoning steps:\n{% endif %}", "Here are my reasoning steps:", "opened"),
    "apriel, over": (ASKS + "Here are my reasoning steps:\n\n[BEGIN FINAL RESPONSE]\n{% endif %}",
                     "Here are my reasoning steps:", "closed"),
    "apriel 1.5": (ASKS + "{# <thinking> [BEGIN FINAL RESPONSE] #}{% endif %}", "Here are my reasoning steps:", ""),
    "thinking": (ASKS + "<thinking>{% endif %}", "<thinking>", "opened"),
    "solar": (ASKS.replace("{{ m.content }}", GIVEN.replace("OPEN", "<|think|>")) + "<|end|>{% endif %}", "<|think|>",
              "shown"),
    "solar, over": (ASKS + "<|end|><|think|><|end|>{% endif %}", "<|think|>", "closed"),
    "muse": (ASKS.replace("{{ m.content }}", GIVEN.replace("OPEN", "to=self<|message|>")) + "<|eom|>{% endif %}",
             "to=self<|message|>", "shown"),
    "seed": (ASKS.replace("{{ m.content }}", GIVEN.replace("OPEN", "<seed:think>")) + "{% endif %}", "<seed:think>",
             "shown"),
    "minimax": (ASKS.replace("{{ m.content }}", GIVEN.replace("OPEN", "<mm:think>")) + "{% endif %}", "<mm:think>",
                "shown"),
    "gpt-oss": (ASKS.replace("{{ m.content }}", GIVEN.replace("OPEN", "<|channel|>analysis<|message|>")) + "<|end|>"
                "{% endif %}", "<|channel|>analysis<|message|>", "shown"),
    "other": (ASKS.replace("{{ m.content }}", GIVEN) + "{% endif %}", None, "shown"),
    "raises": ("{{ raise_exception('no') }}", None, ""),
}  # fmt: skip


def speaking(name):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES[name][0]
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_how_thoughts_are_written(name):
    _, opening, kind = TEMPLATES[name]
    found = template_thoughts(tokenizer := speaking(name))
    assert found.form is (BY_OPENING[opening] if opening else None)
    assert [what for what in ("opened", "closed", "shown") if getattr(found, what)] == ([kind] if kind else [])
    assert template_thoughts(tokenizer).opened == (kind == "opened")


@pytest.mark.parametrize(("name", "reasoning", "budget", "said"), [
    ("none", "auto", 0, ""),
    ("none", "auto", 9, "has no thoughts, so thinking_budget 9"),
    ("none", "on", 9, ""),
    ("strips", "auto", 9, "more than 9 tokens is ended by </think>"),
    ("gpt-oss", "auto", 9, "ended by <|end|>"),
    ("opens", "auto", 0, ""),
    ("over", "auto", 0, ""),
    ("over", "auto", 9, "thinking_budget is 9, but its chat template ends the prompt with a thought that is over"),
    ("gemma4", "on", 0, "reasoning is on, but"),
    ("other", "auto", 0, "form that is not known here; others see them."),
    ("other", "auto", 9, "thinking_budget 9 does not end them"),
])  # fmt: skip
def test_settings_that_do_not_do_what_they_say_are_told(name, reasoning, budget, said, caplog):
    tokenizer = speaking(name)
    with caplog.at_level(logging.INFO, "mafrt"):
        note_thoughts([tokenizer, tokenizer], reasoning, budget)
    assert [said in line for line in caplog.messages] == ([True] if said else [])


def test_a_run_says_it_once_before_it_trains(caplog):
    make(thinking_budget=5)
    assert sum("thinking_budget 5" in line for line in caplog.messages) == 1
