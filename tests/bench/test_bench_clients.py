"""`mafrt bench clients` at a tiny size: what it times are equal sums of gradients."""

from __future__ import annotations

import pytest

from bench import _measure, clients
from mafrt.scripts.tinker_server.trainer import Trainer

SHORT = ["--clients", "3", "--rows", "2", "--tokens", "5", "--rank", "2", "--rounds", "1", "--clock", "cpu"]

pytestmark = pytest.mark.usefixtures("same_threads")


def test_clients_are_measured_against_one_with_all_rows(capsys):
    [row] = clients.run(SHORT)["rows"]
    assert row["tokens"] == 5 and row["parity"] < 1e-3 and row["many/one"]["median"] > 0
    assert "3 clients cost" in capsys.readouterr().out


def test_clients_whose_rows_are_lost_are_not_timed(monkeypatch):
    whole = Trainer._micro_batches
    monkeypatch.setattr(Trainer, "_micro_batches", lambda trainer, jobs: whole(trainer, jobs[:2]))
    with pytest.raises(_measure.Disagreement):
        clients.run(SHORT)
