"""The table of a model of each family, beside what is computed now."""

from __future__ import annotations

import pytest

from bench.reproduce import family_checkpoints as table


def shown() -> dict[str, list[str]]:
    part = table.PAGE.read_text(encoding="utf-8").split(table.BEGIN)[1].split(table.END)[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()[2:]]
    return {cells[0].strip("`"): cells[1:] for cells in lines}


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gpt_oss"])
def test_a_row_is_what_the_installed_packages_say(family):
    from transformers import AutoConfig

    config = AutoConfig.for_model(family)
    assert shown()[family][:3] == [table.checkpoint(config), *table.sizes(config)]


def test_the_table_has_the_families_that_the_other_has():
    whole = table.PAGE.read_text(encoding="utf-8")
    families = {line.split("`")[1] for line in whole.split(table.BEGIN)[0].splitlines() if line.startswith("| `")}
    assert families - set(shown()) == {"musicgen", "musicgen_melody"}  # they have no default configuration
    assert {len(cells) for cells in shown().values()} == {5}
