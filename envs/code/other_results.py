"""A right program made wrong in its results alone, to tell checks of what it does from checks of what it looks like."""

from __future__ import annotations

import ast
import secrets
from collections.abc import Collection

# Of the same type where there is one, so that a check of the type alone does not notice.
_OTHER = """
def OTHER(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float, complex)):
        return -value - 1000003
    if isinstance(value, (str, bytes)):
        mark = "~" if isinstance(value, str) else b"~"
        return mark + value[::-1] + mark
    if isinstance(value, (list, tuple)):
        return type(value)([*reversed(value), None]) if type(value) in (list, tuple) else None
    if isinstance(value, (set, frozenset)):
        return type(value)([*value, None])
    if isinstance(value, dict):
        return {**value, None: None}
    return 0 if value is None else None
"""


def with_other_results(program: str, names: Collection[str]) -> str | None:
    """`program` with another value of the same type in every `return` of the functions `names`.

    None where that cannot be made: a function is missing, or returns nothing of which there could be another.
    """
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    # A name that no check can know, so that none can tell this program from a right one by looking for it.
    name = f"_{secrets.token_hex(8)}"
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if not names or any(each not in found or not _Returns(name).change(found[each]) for each in names):
        return None
    return f"{ast.unparse(ast.fix_missing_locations(tree))}\n{_OTHER.replace('OTHER', name)}"


class _Returns(ast.NodeTransformer):
    """Passes what a function returns through the function `name`; functions within it stay as they are."""

    def __init__(self, name: str) -> None:
        self.name, self.changed = name, 0

    def change(self, function: ast.FunctionDef) -> bool:
        function.body = [self.visit(statement) for statement in function.body]
        return self.changed > 0

    def visit_Return(self, node: ast.Return) -> ast.Return:
        if node.value is not None:
            self.changed += 1
            node.value = ast.Call(ast.Name(self.name, ast.Load()), [node.value], [])
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return node
