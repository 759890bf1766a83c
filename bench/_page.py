"""The measured parts of BENCHMARKS.md: tables between marks, of which the text around them is independent.

    <!-- measured: NAME NAME ... -->
    ...
    <!-- end -->

A name is that of a measurement (`bench._plan`), or `NAME:PART` for another table of its result.
Several names of one benchmark are one table. `machine` stands for the machines and versions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from bench._plan import TITLES
from bench._tables import bars, table
from mafrt.core.errors import ConfigError

Record = Mapping[str, Any]
_BLOCK = re.compile(r"(?P<mark><!-- measured: (?P<names>[^>]*?) -->\n)(?P<body>.*?)(?P<end><!-- end -->)", re.DOTALL)
MACHINE = ("processor", "GPU", "instructions")


def fill(page: str, records: Mapping[str, Record]) -> str:
    """The page with its measured parts of these records; a part without a record stays as it is.

    Raises:
        ConfigError: a mark has no end, or names no measurement.
    """
    marks, ends = page.count("<!-- measured: "), page.count("<!-- end -->")
    if marks != ends:
        raise ConfigError(f"the page has {marks} marks of measured parts and {ends} ends; each mark needs its end.")
    return _BLOCK.sub(lambda found: _part(found, records), page)


def _part(found: re.Match[str], records: Mapping[str, Record]) -> str:
    names = found["names"].split()
    if names == ["machine"]:
        return f"{found['mark']}{_machines(records)}\n{found['end']}" if records else found[0]
    for name in names:
        if name.split(":")[0] not in TITLES:
            raise ConfigError(f"the page names a measurement {name!r}; expected one of: {', '.join(TITLES)}.")
    parts = {name.partition(":")[2] for name in names}
    if len(parts) > 1:
        raise ConfigError(f"one table of the page has different parts of results: {' '.join(names)}.")
    known = [name for name in (name.split(":")[0] for name in names) if name in records]
    if not known:
        return found[0]
    results = [(TITLES[name], records[name]["result"]) for name in known]
    part = parts.pop() or None
    body = [_commands([records[name] for name in known]), table(results, part), "" if part else bars(results)]
    return found["mark"] + "\n\n".join(text for text in body if text) + "\n" + found["end"]


def _commands(records: Sequence[Record]) -> str:
    """What was run, and when."""
    days = sorted({record["date"] for record in records})
    said = ", ".join(f"`{record['command']}`" for record in records)
    return f"{said} ({' and '.join(_day(day) for day in days)})"


def _day(iso: str) -> str:
    day = date.fromisoformat(iso)
    return f"{day.day} {day:%B %Y}"


def _machines(records: Mapping[str, Record]) -> str:
    """Each machine with its versions, and what was measured on it where there are several."""
    machines: list[tuple[dict[str, Any], list[str]]] = []
    for name, record in records.items():
        facts = _facts(record["result"]["machine"])
        for known, names in machines:
            # A package that was installed in between makes no other machine.
            if all(known.get(fact, value) == value for fact, value in facts.items()):
                known.update(facts)
                names.append(name)
                break
        else:
            machines.append((facts, [name]))
    said = []
    for facts, names in machines:
        versions = ", ".join(f"{fact} {value}" for fact, value in facts.items() if fact not in MACHINE)
        able = f" ({facts['instructions']})" if "instructions" in facts else ""
        said.append((f"{facts['processor']}{able}; {facts['GPU'] or 'no GPU'}; {versions}", ", ".join(names)))
    return f"{said[0][0]}." if len(said) == 1 else "\n".join(f"- {machine}: {names}." for machine, names in said)


def _facts(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Its processor and GPU, and the versions of packages by name."""
    # A result of an earlier version does not name the instructions.
    instructions = {"instructions": ", ".join(machine["instructions"])} if "instructions" in machine else {}
    return {
        "processor": f"{machine['cores']} cores of {machine['cpu']}",
        "GPU": machine["gpu"],
        **instructions,
        "Python": machine["python"],
        "torch": machine["torch"],
        **machine["versions"],
    }
