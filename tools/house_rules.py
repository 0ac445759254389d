"""Measures the house rules that no linter measures, prints the figures, and fails where one is broken.

Complexity, nesting, arguments and docstrings are ruff's (pyproject.toml); here are the lengths of functions and files, the
places of `except Exception`, and the arguments of operators.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("airflow_profsched", "throwaway", "tools")
MEDIAN, P95, LONGEST, FILE_LINES, OPERATOR_ARGUMENTS = 10, 40, 60, 500, 16
BROAD = {
    "airflow_profsched/cluster/poller.py": 1,  # the fan-out: every waiter has to learn of it
    "throwaway/one_task.py": 1,  # a test's own process: whatever it was, its parent has to see it
}
"""Where `except Exception` may stand, and how often."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function and its length in lines of code: no blank lines, comments or docstring."""

    place: str
    lines: int


@dataclass(frozen=True, slots=True)
class Source:
    """A file of Python.

    Args:
        name: its path, for messages.
        text: its content.
    """

    name: str
    text: str

    def functions(self) -> Iterator[Function]:
        """Yield every function with its length."""
        for node in ast.walk(ast.parse(self.text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield Function(f"{self.name}:{node.lineno} {node.name}", self._length(node))

    def _length(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if not body:
            return 0
        lines = self.text.splitlines()[body[0].lineno - 1 : node.end_lineno]
        return sum(1 for line in lines if line.strip() and not line.strip().startswith("#"))

    def broad_excepts(self) -> int:
        """Count handlers of Exception, BaseException (unless it is raised again) or everything."""
        return sum(
            1 for node in ast.walk(ast.parse(self.text)) if isinstance(node, ast.ExceptHandler) and _is_broad(node)
        )

    def operator_arguments(self) -> Iterator[tuple[str, int]]:
        """Yield each operator's own arguments."""
        for node in ast.walk(ast.parse(self.text)):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Operator"):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                        yield (
                            f"{self.name}:{inner.lineno} {node.name}",
                            len(inner.args.args) - 1 + len(inner.args.kwonlyargs),
                        )


def _is_broad(handler: ast.ExceptHandler) -> bool:
    kind = handler.type
    if isinstance(kind, ast.Name) and kind.id == "BaseException":
        return not any(isinstance(node, ast.Raise) and node.exc is None for node in ast.walk(handler))
    return kind is None or (isinstance(kind, ast.Name) and kind.id == "Exception")


def measure(sources: list[Source]) -> tuple[dict[str, float], list[str]]:
    """Measure files.

    Args:
        sources: the files.

    Returns:
        The figures, and what is broken, in words.
    """
    functions = [function for source in sources for function in source.functions()]
    lengths = sorted(function.lines for function in functions)
    figures = {
        "functions": float(len(lengths)),
        "median lines": statistics.median(lengths or [0]),
        "95th percentile": float(lengths[int(len(lengths) * 0.95)] if lengths else 0),
        "longest": float(max(lengths, default=0)),
        "files": float(len(sources)),
        "longest file": float(max((len(source.text.splitlines()) for source in sources), default=0)),
    }
    return figures, list(_broken(sources, functions, figures))


def _broken(sources: list[Source], functions: list[Function], figures: dict[str, float]) -> Iterator[str]:
    if figures["median lines"] > MEDIAN:
        yield f"half of all functions are longer than {figures['median lines']:.0f} lines (allowed: {MEDIAN})"
    if figures["95th percentile"] > P95:
        yield f"one function in twenty is longer than {figures['95th percentile']:.0f} lines (allowed: {P95})"
    for function in functions:
        if function.lines > LONGEST:
            yield f"{function.place}: {function.lines} lines (allowed: {LONGEST})"
    for source in sources:
        lines = len(source.text.splitlines())
        if lines > FILE_LINES:
            yield f"{source.name}: {lines} lines (allowed: {FILE_LINES})"
        broad = source.broad_excepts()
        if broad > BROAD.get(source.name, 0):
            yield f"{source.name}: {broad} × `except Exception` (allowed: {BROAD.get(source.name, 0)})"
        for place, count in source.operator_arguments():
            if count > OPERATOR_ARGUMENTS:
                yield f"{place}: {count} own arguments (allowed: {OPERATOR_ARGUMENTS})"


def main() -> int:
    """Measure this checkout.

    Returns:
        0 where every rule holds, else 1.
    """
    root = Path(__file__).resolve().parent.parent
    paths = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    sources = [Source(str(path.relative_to(root)), path.read_text(encoding="utf-8")) for path in paths]
    figures, broken = measure(sources)
    print("house rules: " + ", ".join(f"{name} {figure:.0f}" for name, figure in figures.items()))
    for fault in broken:
        print(f"  broken: {fault}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
