"""`mafrt bench all`: measurements are kept and not repeated, and the page's tables are those of the results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench import _chart, _page, _plan, _tables
from bench import all as bench_all
from bench._measure import Disagreement
from bench._plan import Planned
from mafrt.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {
    "cpu": "A CPU",
    "cores": 2,
    "instructions": ["avx2"],
    "gpu": None,
    "python": "3.11.7",
    "torch": "2.13.0",
    "versions": {"peft": "0.21.2"},
}
PAGE = """# Page
Before.

<!-- measured: machine -->
<!-- end -->

<!-- measured: update update_smollm2 -->
old
<!-- end -->

After, <!-- a comment -->.
"""


def update(bars=None, **row):
    ratio = {"median": 2.0512, "q1": 2.04, "q3": 2.06}
    own = {"K": 4, "rows": 7, "tokens": 1262, "update_s": 0.0525, "update/forward": ratio, "update/no_grad": ratio}
    result = {"bench": "update", "machine": MACHINE, "shape": {}, "rows": [own | row], "bars": bars or {}}
    return {"command": "mafrt bench update", "date": "2026-11-25", "seconds": 3, "result": result}


def test_tables_stand_between_marks_and_the_text_stays():
    filled = _page.fill(PAGE, {"update": update({"at most 2.1": True, "at most 2": False})})
    assert filled.startswith("# Page\nBefore.\n") and filled.endswith("\n\nAfter, <!-- a comment -->.\n")
    assert "2 cores of A CPU (avx2); no GPU; Python 3.11.7, torch 2.13.0, peft 0.21.2." in filled
    assert "`mafrt bench update` (25 November 2026)" in filled and "old" not in filled
    assert "| 4 | 7 | 1,262 | 52.5 | 2.05 (2.04 to 2.06) | 2.05 (2.04 to 2.06) |" in filled
    assert "PEFT" not in filled.split("-->")[3]  # no row has it
    assert "Bars: at most 2.1: met; at most 2: **missed**." in filled
    assert _page.fill(filled, {"update": update({"at most 2.1": True, "at most 2": False})}) == filled
    assert _page.fill(PAGE, {}) == PAGE


def test_several_results_are_one_table_with_their_titles():
    filled = _page.fill(PAGE, {"update": update(), "update_smollm2": update({"bar": True}, K=16)})
    assert "| random model | 4 |" in filled and "| SmolLM2-135M, float32 | 16 |" in filled
    assert "Bars: SmolLM2-135M, float32, bar: met." in filled


def test_machines_are_told_apart_by_what_contradicts():
    other, later = update(), update()
    later["result"]["machine"] = {**MACHINE, "versions": {"trl": "1.16.0"}}
    assert "peft 0.21.2, trl 1.16.0." in _page.fill(PAGE, {"update": update(), "update_smollm2": later})
    other["result"]["machine"] = {**MACHINE, "torch": "3.0"}
    filled = _page.fill(PAGE, {"update": update(), "update_smollm2": other})
    assert "peft 0.21.2: update.\n- 2 cores" in filled and "torch 3.0, peft 0.21.2: update_smollm2." in filled


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("<!-- measured: updat -->\n<!-- end -->", "names a measurement 'updat'; expected one of: update, "),
        ("<!-- measured: update -->\n", "has 1 marks of measured parts and 0 ends"),
        ("<!-- measured: memory memory:vocabulary -->\n<!-- end -->", "different parts of results: memory memory:voc"),
    ],
)
def test_a_page_that_cannot_be_filled_is_refused(page, said):
    with pytest.raises(ConfigError, match=said):
        _page.fill(page, {"update": update()})


def test_numbers_as_they_are_shown():
    assert _tables._ratio({"median": 1.0, "q1": 1.0, "q3": 1.0}) == "1.00"
    assert _tables._median_ms(0.0121) == "12.1" and _tables._median_ms({"median": 1.2345}) == "1,234"
    assert _tables._number(0)(None) == "-"


def test_a_chart_tells_bars_that_are_missed():
    met, missed = _chart.ratios({"update": update()}), _chart.ratios({"update": update(**{"update/no_grad": HIGH})})
    assert "random model, K=4" in met and _chart.COLOURS[0] in met and _chart.COLOURS[1] not in met
    assert _chart.COLOURS[1] in missed
    assert _chart.ratios({}) is None and _chart.growth({}) is None


HIGH = {"median": 2.2, "q1": 2.2, "q3": 2.2}


@pytest.fixture
def small_plan(monkeypatch):
    """One measurement of half a second, and one that fails."""
    plan = (
        Planned("environment", "", "environment", "--steps 3 --envs 1 --characters 5"),
        Planned("broken", "", "environment", "--steps none"),
    )
    monkeypatch.setattr(_plan, "PLAN", plan)
    monkeypatch.setattr(bench_all, "PLAN", plan)
    monkeypatch.setattr(_page, "TITLES", {planned.name: planned.title for planned in plan})


@pytest.mark.slow
@pytest.mark.ci
def test_measurements_are_kept_and_failures_are_told(small_plan, tmp_path, capsys):
    page, folder = tmp_path / "page.md", tmp_path / "results"
    page.write_text("<!-- measured: environment -->\n<!-- end -->\n")
    where = ["--page", str(page), "--folder", str(folder)]
    with pytest.raises(Disagreement, match="no result of broken; the reasons are above"):
        bench_all.run(where)
    assert "Argument --steps: found 'none'" in capsys.readouterr().out
    record = json.loads((folder / "environment.json").read_text())
    assert record["command"] == "mafrt bench environment --steps 3 --envs 1 --characters 5"
    assert record["result"]["rows"][0]["environments"] == 1
    assert re.search(r"^\| 1 \| \d+\.\d{3} \|", page.read_text(), re.MULTILINE)  # however slow the machine is
    (folder / "broken.json").write_text((folder / "environment.json").read_text())
    before = page.read_text()
    assert bench_all.run(where)["results"] == ["broken", "environment"]  # nothing is left to measure
    assert page.read_text() == before and "mafrt bench" not in capsys.readouterr().out
    (folder / "environment.json").write_text("{")
    with pytest.raises(ConfigError, match=r"environment\.json is no JSON .* delete it to measure it again"):
        bench_all.run([*where, "--draw"])


def test_a_page_that_is_not_there_is_refused_before_anything_is_measured(small_plan, tmp_path):
    with pytest.raises(ConfigError, match="expected an existing page with marks"):
        bench_all.run(["--page", str(tmp_path / "none.md"), "--folder", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_the_page_has_the_published_results_and_names_all_of_them():
    folder, page = ROOT / "docs" / "benchmarks", (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
    records = bench_all._records(folder)
    assert {path.stem for path in folder.glob("*.json")} == set(records)
    assert _page.fill(page, records) == page
    marked = {name.split(":")[0] for found in _page._BLOCK.finditer(page) for name in found["names"].split()}
    assert marked == {"machine"} | {planned.name for planned in _plan.PLAN}
