"""The report and `mafrt show`: run folders as far as they go, hostile texts as text, and the page in a real browser."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import random
import re
import socket
import struct
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from helpers_report import TEAM, browsing, episode, make_run

from mafrt.core.types import Episode, Turn
from mafrt.scripts import report, show
from mafrt.scripts.reporting import live
from mafrt.scripts.reporting.live import make_server
from mafrt.scripts.reporting.page import build_page, findings_of
from mafrt.scripts.reporting.run_data import Table, read_run
from mafrt.storage.transcripts import TranscriptWriter

pytestmark = pytest.mark.takes(slow=11)

HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    "\x1b[2J\x1b]0;title\x07 \u202eright to left\u202c \u2066isolate \ud83d\ude00 \N{GRINNING FACE} "
    "{{ 7 * 7 }} &lt;b&gt; ` ${1}"
)


def data_of(html: bytes, name: str = "meta"):
    """What a block of a report holds."""
    found = re.search(rf'id="{name}">([^<]*)<', html.decode())
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def add_hostile(run, text=HOSTILE):
    """An iteration in which everything that can be written is hostile."""
    evil = episode("000007-00000", text[:200], 1.0, plan=text, answer=text)
    evil.turns[0].observation = [{"role": text[:50], "content": text}, {"role": "user", "content": text}]
    evil.info = {"task": text, text[:60]: text}
    writer = TranscriptWriter(run / "transcripts", TEAM, lambda ids: "".join(map(chr, ids)), share=1.0, max_mib=64)
    writer.write("train", 7, [evil])


# --------------------------------------------------------------------------------------------------------- the content


def test_a_report_holds_curves_episodes_and_findings(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert report.main([str(run)]) == 0
    html = (run / "report.html").read_bytes()
    meta = data_of(html)
    [told] = meta["runs"]
    assert told["metrics"]["columns"]["reward/solver"][-1] == 1.0 and told["agents"] == ["planner", "solver"]
    assert told["seconds"] == 18.0 and told["problems"] == []
    index = meta["index"]
    assert len(index["run"]) == 6 * 4 + 2 * 8 and index["number"] == list(range(40))
    assert index["coach"]["solver"][8:12] == [0.0, 10.0, 0.0, 10.0] and index["paid"]["solver"][8:12] == [0, 1, 0, 1]
    first = data_of(html, "block0")[8]
    assert first["id"] == "000001-00000" and first["turns"][1]["advantages"] == [-0.5, -0.49]
    assert "40 episodes in" in capsys.readouterr().out
    assert report.main([str(run)]) == 0  # a report is replaced


def test_nothing_that_was_said_is_in_the_markup(tmp_path):
    run = make_run(tmp_path / "run")
    add_hostile(run)
    html = build_page([read_run(run)], max_mib=20).html.decode()
    assert "taken" not in html and "onerror" not in html and "\x1b" not in html
    assert html.count("<script") == 3 + html.count('id="block')  # the index, uPlot and the page's own script
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert "default-src &#39;none&#39;" in policy and "connect-src &#39;none&#39;" in policy
    assert (
        "http://" not in html.replace("http://www.w3.org/2000/svg", "") and "https://" not in html.split("<script>")[0]
    )


def test_runs_that_differ_in_the_seed_share_a_group(tmp_path):
    runs = [make_run(tmp_path / name, **how) for name, how in (("a", {}), ("b", {"seed": 2}), ("c", {"lr": 0.2}))]
    meta = data_of(build_page([read_run(run) for run in runs], max_mib=20).html)
    assert [run["group"] for run in meta["runs"]] == [0, 0, 1]


@pytest.mark.slow
def test_a_page_without_room_for_all_says_so(tmp_path):
    run = make_run(tmp_path / "run", groups=400)
    data = read_run(run)
    page = build_page([data], max_mib=0.05)
    assert 0 < page.episodes < 4000 and page.episodes + page.left_out == 6 * 400 + 2 * 800
    assert f"{page.left_out} of 4000 recorded episodes are left out" in data.problems[-1]
    assert len(page.html) < 600_000


def test_long_curves_are_thinned():
    table = Table()
    for iteration in range(1, 10_001):
        table.add({"iteration": iteration, "score": iteration % 2})
    thin = table.thinned(1000)
    assert len(thin.iterations) == 1000 and thin.iterations[-1] == 10_000
    assert set(thin.columns["score"]) == {0.5}


def test_findings_are_made_again_while_a_run_goes_on(tmp_path):
    run = make_run(tmp_path / "run")
    assert findings_of(read_run(run)) == []
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 7, "kl/solver": 3.0}\n')
    assert "The policy of solver moved away" in findings_of(read_run(run))[0]
    (run / "summary.json").write_text('{"findings": ["as the end of the run said"]}')
    assert findings_of(read_run(run)) == ["as the end of the run said"]


# ------------------------------------------------------------------------------------------------------ damaged folders


def nothing(run):
    """Only a record that cannot be read."""
    for path in sorted(run.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (run / "run.json").write_text("{")


def halves(run):
    for path in [*run.glob("*.jsonl"), *run.glob("transcripts/train_000003*")]:
        path.write_bytes(path.read_bytes()[:-30])


def garbage(run):
    for path in run.rglob("*"):
        if path.is_file():
            path.write_bytes(b"\xff\x00[1]\n{}\n" * 50)


def odd(run):
    """Valid JSON of the wrong shape in every place."""
    for path in run.glob("*.jsonl"):
        path.write_text(
            '{"iteration": 1, "score": [], "turns": 3}\n{"iteration": true}\n{"iteration": 2, "score": 1}\n'
        )
    (run / "summary.json").write_text("[]")
    lines = ['{"format": 1, "team": []}', "{}", '{"turns": [1, {"agent": 4, "coach": 5, "evidence": 7, "text": null}]}']
    lines.append('{"turns": {"a": 1}, "group": null, "info": [], "outcome": "x"}')
    (run / "transcripts" / "train_000001.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


def bare(run):
    """A run without transcripts and with the episodes of an earlier version."""
    for path in (run / "transcripts").iterdir():
        path.unlink()
    (run / "episodes.jsonl").write_text(
        '{"iteration": 1, "id": "e", "group": "g", "turns": [{"agent": "solver", "text": "x"}]}\n'
    )


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (nothing, "The folder holds no settings and no metrics of a run."),
        (halves, "train_000003.jsonl.gz is damaged after line"),
        (garbage, r"lines of metrics.jsonl \(number [\d, .]+\) could not be read"),
        (odd, "39 episodes in"),
        (bare, "1 episode in"),
    ],
)
def test_a_damaged_run_is_shown_as_far_as_it_goes(tmp_path, capsys, damage, says):
    run = make_run(tmp_path / "run")
    damage(run)
    assert report.main([str(run), "--output", str(tmp_path / "r.html")]) == 0
    out = capsys.readouterr().out
    assert re.search(says, out), out
    assert data_of((tmp_path / "r.html").read_bytes())["runs"][0]["name"] == "run"
    assert show.main([str(run)]) == 0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "Name at least one run folder"),
        (["nowhere"], "nowhere does not exist; give a run folder"),
        (["empty"], "empty is no run folder; give one"),
        (["RUN/transcripts"], "/RUN, give that"),
        (["RUN", "--output", "RUN/\x1b[31m.html"], "control characters"),
        (["RUN", "--output", "RUN/args.yaml"], "exists and is no report"),
        (["RUN", "--output", "no/where.html"], "there is no no"),
        (["RUN", "--max_mib", "0"], "max_mib is 0.0"),
        (["RUN", "--ouput", "x"], "did you mean '--output'"),
    ],
)
def test_bad_arguments_get_a_sentence(tmp_path, capsys, monkeypatch, argv, says):
    make_run(tmp_path / "RUN", iterations=1)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    before = (tmp_path / "RUN" / "args.yaml").read_bytes()
    assert report.main(argv) == 2
    assert says in capsys.readouterr().err
    assert (tmp_path / "RUN" / "args.yaml").read_bytes() == before


# ------------------------------------------------------------------------------------------------------------- terminal


def test_show_lists_filters_and_prints(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert show.main([str(run), "--kind", "train", "--iteration", "2", "--min_score", "1"]) == 0
    assert "2 episodes;" in capsys.readouterr().out
    assert show.main([str(run), "--search", "nowhere"]) == 0
    assert capsys.readouterr().out.startswith("0 episodes;")
    assert show.main([str(run), "--episode", "9"]) == 0
    out = capsys.readouterr().out
    assert "Plan." in out and "Task 1-1" in out and "reason of 000001-00001" in out and "tool of" in out
    (tmp_path / "empty").mkdir()
    assert show.main([str(tmp_path / "empty")]) == 2
    assert "is no run folder" in capsys.readouterr().err
    (tmp_path / "empty" / "args.yaml").touch()
    assert show.main([str(tmp_path / "empty")]) == 0
    assert "No episodes are recorded in" in capsys.readouterr().err
    assert show.main([str(run), "--episode", "77"]) == 2
    assert "it has the episodes 0 to 39" in capsys.readouterr().err


def test_show_neutralises_terminal_codes(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    add_hostile(run)
    show.main([str(run), "--episode", "000007-00000"])
    show.main([str(run)])
    out = capsys.readouterr().out
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", out)
    assert "<U+202E>" in out and "</script>" in out


# ----------------------------------------------------------------------------------------------------------------- live


def test_live_follows_a_run_on_loopback(tmp_path):
    run = make_run(tmp_path / "run", iterations=2)
    with make_server([run], 0, 20) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/"

            def get(path="", host=None):
                request = urllib.request.Request(address + path, headers={"Host": host} if host else {})
                with urllib.request.urlopen(request, timeout=300) as reply:
                    return reply.read()

            first = get("version")
            assert len(data_of(get())["runs"][0]["metrics"]["iterations"]) == 2
            with open(run / "metrics.jsonl", "a") as file:
                file.write('{"iteration": 3, "score": 1.0}\n')
            assert get("version") != first
            assert len(data_of(get())["runs"][0]["metrics"]["iterations"]) == 3
            for path, host, status in (("etc", None, 404), ("", "evil.example:80", 403)):
                with pytest.raises(urllib.error.HTTPError) as refused:
                    get(path, host)
                assert refused.value.code == status
        finally:
            server.shutdown()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /", b""])
def test_a_page_that_was_closed_is_no_error_of_the_live_report(tmp_path, capsys, sent):
    (tmp_path / "metrics.jsonl").write_text("")
    with make_server([tmp_path], 0, 1.0) as server:
        with socket.create_connection(("127.0.0.1", server.server_port)) as client:
            client.sendall(sent)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends with a reset
        before = set(threading.enumerate())
        server.handle_request()
        for thread in set(threading.enumerate()) - before:
            thread.join(60)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_connections_that_send_nothing_hold_no_more_than_the_live_report_has(tmp_path, monkeypatch, sent):
    monkeypatch.setattr(live, "MOST_CONNECTIONS", 8)
    (tmp_path / "metrics.jsonl").write_text("")
    with contextlib.ExitStack() as stack, make_server([tmp_path], 0, 1.0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        place = ("127.0.0.1", server.server_port)
        clients = [stack.enter_context(socket.create_connection(place, timeout=60)) for _ in range(40)]
        for client in clients:
            with contextlib.suppress(ConnectionError):  # of one that has made room
                client.sendall(sent)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/version", timeout=60) as reply:
            assert reply.read()
        for client in clients[: 40 - 8]:
            with contextlib.suppress(ConnectionError):
                assert client.recv(1) == b""
        assert len(server._waiting) <= 8


# -------------------------------------------------------------------------------------------------------------- browser


def opened(page, path, where=""):
    page.goto(f"{path.as_uri()}#{where}")
    page.reload()
    page.wait_for_selector("body[data-ready]")


def counted(page, words):
    """Wait until the number of episodes is told with these words."""
    page.locator(f'#count:has-text("{words}")').wait_for(timeout=20_000)


def drawn(page) -> int:
    """Charts whose canvas is not blank."""
    script = """() => [...document.querySelectorAll('.chart canvas')].filter((c) =>
        c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v)).length"""
    return page.evaluate(script)


@pytest.mark.slow
@pytest.mark.ci
def test_the_page_in_a_browser(tmp_path):
    runs = [make_run(tmp_path / name, seed=seed, lr=lr) for name, seed, lr in (("a", 1, 1), ("b", 2, 1), ("c", 1, 2))]
    add_hostile(runs[0], HOSTILE * 8000)
    target = tmp_path / "report.html"
    assert report.main([*map(str, runs), "--output", str(target)]) == 0
    with browsing() as page:
        opened(page, target, "overview")
        page.locator(".chart canvas").nth(1).wait_for()
        assert drawn(page) >= 2
        assert page.locator(".strip rect").count() > 4
        page.click("[data-tab=curves]")
        page.wait_for_selector(".chart canvas")
        assert drawn(page) >= 3

        # Filters: one run, one iteration, one outcome, then a text.
        page.click("[data-tab=episodes]")
        counted(page, "of 121")
        page.select_option("[name=run]", "1")
        page.fill("[name=from]", "3")
        page.fill("[name=to]", "3")
        page.select_option("[name=outcome]", "high")
        counted(page, "2 episodes of")
        page.fill("[name=words]", "REASON OF 000003-00001")
        counted(page, "1 episode of")
        assert "reason of 000003-00001" in page.inner_text(".pane")

        # The conversation, with its heat map: red below zero, blue above.
        opened(page, target, "episodes?run=0&kind=train&from=1&to=1&sort=number&heat=1")
        page.wait_for_selector(".conversation .token")
        assert page.locator(".turn").count() == 2
        told = page.locator(".turn .token").first.get_attribute("title")
        assert told == "advantage +0.250"
        assert page.locator(".turn:nth-child(2) .token").first.get_attribute("title") == "advantage −0.500"
        assert "233, 120, 20" in page.locator(".turn:nth-child(2) .token").first.evaluate(
            "e => e.style.backgroundColor"
        )

        # A constant has an axis that begins at 0 and leaves room above.
        source = (Path(report.__file__).parent / "reporting/assets/js/charts.js").read_text(encoding="utf-8")
        roomy = source[source.index("function roomy") :].partition("\n}\n")[0] + "}"
        axes = page.evaluate(f"() => {{ {roomy}; return [1, 0, -2].map((y) => roomy(null, y, y)); }}")
        assert axes == [[0, pytest.approx(1.1)], [0, 1], [pytest.approx(-2.2), 0]]

        # Hostile texts: shown as text, cut, and shown whole when asked for.
        opened(page, target, "episodes?run=0&kind=train&from=7&to=7&heat=")
        page.wait_for_selector(".conversation")
        said = page.locator(".turn > div > .said").first
        assert said.inner_text().startswith("</script><script>document.title='taken'</script>")
        assert "␛[2J" in said.inner_text() and "U+202E" in said.inner_text() and "\x1b" not in said.inner_text()
        assert len(said.inner_text()) < 10_000
        page.locator(".turn > div > button.link").first.click()
        assert page.locator(".turn > div > .said").first.evaluate("e => e.textContent.length") > 1_000_000
        assert page.title() != "taken" and page.locator("img").count() == 0

        # Before and after, and runs side by side.
        page.click("[data-tab=before]")
        page.wait_for_selector("#sides .conversation")
        assert page.locator("#sides .card").count() == 2 and "4 better" in page.inner_text(".tasks")
        page.click("[data-tab=runs]")
        assert "seeds 1, 2" in page.inner_text("main")
        assert re.search(r"lr\s+1\s+1\s+2", page.inner_text("main"))
        page.click("[data-tab=coach]")
        assert "mean score 10 where the episode was solved, 0.0 where it was not" in page.inner_text("main")


@pytest.mark.slow
def test_long_names_fit_on_a_phone(tmp_path):
    runs = [make_run(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("n" * 90, 2))]
    target = tmp_path / "report.html"
    assert report.main([*map(str, runs), "--output", str(target)]) == 0
    # What reaches beyond the screen and no box of its own scrolls, by the place of its right edge.
    beyond = """() => [...document.querySelectorAll("main *")].filter((e) => e.offsetParent &&
        !e.closest(".scroll") && e.getBoundingClientRect().right > innerWidth + 1)
        .map((e) => e.outerHTML.slice(0, 90))"""
    with browsing() as page:
        page.set_viewport_size({"width": 360, "height": 720})
        for tab in ("overview", "curves", "episodes?run=1", "before", "runs"):
            opened(page, target, tab)
            assert page.evaluate(beyond) == [], tab
        heads = page.locator("table").first.locator("th").evaluate_all("all => all.map((e) => e.clientHeight)")
        assert max(heads) < 60  # names of columns are words, not a letter a line
        opened(page, target, "episodes?run=1")
        rows = page.locator(".row").evaluate_all("all => all.map((e) => e.scrollHeight - e.clientHeight)")
        assert rows and max(rows) <= 0


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_fifty_thousand_turns_open_fast_in_a_small_file(tmp_path):
    words, draw = [f"word{number:04d} " for number in range(3000)], random.Random(1)

    def text(ids) -> str:
        return "".join(words[i] for i in ids)

    def said(agent: str, place: int, name: str) -> Turn:
        ids = draw.choices(range(3000), k=48)
        more = {"advantages": [draw.gauss(0, 1) for _ in ids], "observation": f"Task {name}: {text(ids[:30])}"}
        return Turn(agent, [1, 2], ids, [-0.1] * 48, "eos", text(ids), place, place, 0, paid=0.5, **more)

    run = make_run(tmp_path / "run", iterations=1)
    writer = TranscriptWriter(run / "transcripts", TEAM, text, share=1.0, max_mib=500)
    for iteration in range(2, 12):
        played = []
        for n in range(2500):
            turns = [said(agent, place, f"{iteration}-{n}") for place, agent in enumerate(TEAM.names)]
            played.append(Episode(f"{iteration:06d}-{n:05d}", f"{iteration}-{n}", turns, float(n % 2), {}))
        writer.write("train", iteration, played)
    target = tmp_path / "report.html"
    assert report.main([str(run), "--output", str(target)]) == 0
    assert target.stat().st_size < 30e6
    with browsing() as page:
        page.goto(f"{target.as_uri()}#overview")
        page.wait_for_selector("body[data-ready]")
        page.goto("about:blank")
        page.goto(f"{target.as_uri()}#episodes?kind=&sort=newest")
        page.wait_for_selector(".conversation", timeout=240_000)
        assert page.inner_text("#count") == "25,020 episodes of 25,020"  # those of `make_run` too
        assert page.locator(".row").count() < 60  # only rows in view are there
        page.fill("[name=words]", "Task 6-77: ")
        counted(page, "1 episode of")
