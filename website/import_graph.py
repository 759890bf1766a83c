"""Draws docs/import_graph.svg: the folders of the package as they import each other, read from the source.

    .venv/bin/python website/import_graph.py

A folder stands one line above the highest folder that it imports. Dark arrows are the ones that no other way implies.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "import_graph.svg"
BESIDE = ("scripts", "runners", "envs")
"""Folders beside `mafrt/` in the checkout; installed, they are subpackages of it as well."""
WIDTH, ROW, BOX, HEIGHT = 860, 92, 132, 40


@cache
def folders() -> dict[str, list[Path]]:
    """Folder -> its modules."""
    inner = [path.parent for path in sorted((ROOT / "mafrt").glob("*/__init__.py"))]
    return {path.name: sorted(path.rglob("*.py")) for path in [*inner, *(ROOT / name for name in BESIDE)]}


def imported(path: Path) -> Iterator[str]:
    """Dotted names of all imports of a module, those inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "mafrt":
            yield from (f"mafrt.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@cache
def arrows() -> set[tuple[str, str]]:
    """(folder, folder that it imports), of all folders."""
    known = folders()
    pairs: set[tuple[str, str]] = set()
    for folder, modules in known.items():
        for name in (name for path in modules for name in imported(path)):
            package, *inner = name.split(".")
            if package == "mafrt" and inner and inner[0] in known and inner[0] != folder:
                pairs.add((folder, inner[0]))
    return pairs


def levels(pairs: set[tuple[str, str]]) -> dict[str, int]:
    """Folder -> its line, 0 at the bottom. Raises ValueError where folders import each other in a circle."""

    @cache
    def level(folder: str, above: tuple[str, ...] = ()) -> int:
        if folder in above:
            raise ValueError(f"{' -> '.join([*above, folder])} is a circle")
        return max((1 + level(low, (*above, folder)) for high, low in pairs if high == folder), default=0)

    return {folder: level(folder) for folder in folders()}


def drawing() -> str:
    pairs = arrows()
    rows = levels(pairs)
    top = max(rows.values())
    places: dict[str, tuple[float, float]] = {}
    for row in range(top + 1):
        line = [folder for folder in folders() if rows[folder] == row]
        for number, folder in enumerate(line):
            # Every second line is moved to the side, so that long arrows pass beside boxes and not behind them.
            shift = 0 if len(line) > 1 or row == top else 70 * (-1) ** row
            places[folder] = (WIDTH * (number + 1) / (len(line) + 1) + shift, 30 + HEIGHT / 2 + ROW * (top - row))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {60 + HEIGHT + ROW * top}" '
        'font-family="sans-serif" font-size="15">',
        '<rect width="100%" height="100%" fill="white"/>',
        "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 8 4 0 8z" fill="{colour}"/></marker>'
            for name, colour in (("dark", "#334e68"), ("light", "#c3ced9"))
        ),
    ]
    implied = {pair for pair in pairs if any((pair[0], m) in pairs and _leads(pairs, m, pair[1]) for m in rows)}
    for pair in sorted(pairs, key=lambda pair: (pair not in implied, pair)):
        parts.append(_arrow(places[pair[0]], places[pair[1]], "light" if pair in implied else "dark"))
    for folder, (x, y) in places.items():
        name = folder if folder in BESIDE else f"mafrt/{folder}"
        fill = "#fff3d6" if folder in BESIDE else "#e3effa"
        parts.append(
            f'<rect x="{x - BOX / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{BOX}" height="{HEIGHT}" rx="7" '
            f'fill="{fill}" stroke="#334e68"/><text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle">{name}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _leads(pairs: set[tuple[str, str]], high: str, low: str) -> bool:
    return (high, low) in pairs or any(_leads(pairs, middle, low) for up, middle in pairs if up == high)


def _arrow(start: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    (x, y), (u, v) = (start[0], start[1] + HEIGHT / 2), (end[0], end[1] - HEIGHT / 2)
    # Arrows over several lines leave and arrive upright, and bow away from the middle.
    bow = 0.0 if v - y < ROW else (60 + 14 * (v - y) / ROW) * (1 if x + u >= WIDTH else -1)
    colour = {"dark": "#334e68", "light": "#c3ced9"}[kind]
    return (
        f'<path d="M{x:.0f} {y:.0f}C{x + bow:.0f} {y + (v - y) / 3:.0f} {u + bow:.0f} {v - (v - y) / 3:.0f} '
        f'{u:.0f} {v:.0f}" fill="none" stroke="{colour}" stroke-width="1.3" marker-end="url(#{kind})"/>'
    )


if __name__ == "__main__":
    PICTURE.write_text(drawing(), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: {len(folders())} folders, {len(arrows())} arrows")
