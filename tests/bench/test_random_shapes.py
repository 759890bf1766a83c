"""Bases with the widths of a published model and random weights."""

from __future__ import annotations

import pytest

from bench._shapes import SHAPES, write_random_base
from mafrt.models.shared_base import SharedBase


@pytest.mark.nightly
@pytest.mark.slow
def test_a_shape_is_a_base_with_the_layers_that_are_asked_for(tmp_path):
    base = SharedBase.load(write_random_base("random:qwen3.5-0.8b", 4, tmp_path), device="cpu", dtype="float32")
    config = base.model.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (1024, 3584, 4)
    assert base.tokenizer.chat_template
    assert "random:qwen3.5-0.8b" in SHAPES and write_random_base("smollm2", None, tmp_path) == "smollm2"
