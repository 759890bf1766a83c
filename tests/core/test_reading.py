"""Files as people write them."""

from __future__ import annotations

from mafrt.core.reading import read_list
from mafrt.core.text import counted


def test_a_list_has_comments_on_lines_of_their_own_and_behind_an_entry(tmp_path):
    path = tmp_path / "servers.txt"
    path.write_text("# all\n\nhost:1  # first\n  host:2\n#host:3\nhttp://host:4/#x\n\t# end\n", encoding="utf-8")
    assert read_list(path) == ["host:1", "host:2", "http://host:4/#x"]


def test_a_number_and_its_noun_agree():
    assert [counted(number, "next observations") for number in (0, 1, 2)] == [
        "0 next observations", "1 next observation", "2 next observations",
    ]  # fmt: skip
