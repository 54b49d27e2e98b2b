"""Rooms import only rooms before them (docs/architecture.md), the runtime imports nothing else of the project, and no
module imports itself through others. Imports inside functions count."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "dsr1build"
ORDER = (
    "errors",
    "digest",
    "config",
    "graph",
    "ops",
    "frontends",
    "partition",
    "lower",
    "toolchains",
    "plan",
    "cache",
    "execute",
    "link",
    "cli",
)
# The package's own front door and version stand above all rooms: `dsr1build.load` opens a bundle.
FRONT_DOOR = ("dsr1build", "dsr1build.__main__")


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    out = {}
    for path in sorted(package.rglob("*.py")):
        parts = ("dsr1build", *path.relative_to(package).with_suffix("").parts)
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return out


def imports(name: str, source: str, known: set[str], is_package: bool = False) -> dict[str, int]:
    """Modules of the project that a module imports anywhere in its text, with a line. Type checkers' imports count too."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(source)):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                parts = name.split(".")
                base = parts[: len(parts) - node.level + (1 if is_package else 0)]
                origin = ".".join([*base, *(node.module.split(".") if node.module else [])])
            else:
                origin = node.module or ""
            targets = [f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in known else origin for alias in node.names]
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            targets = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        for target in targets:
            if target == "dsr1build" or target.startswith("dsr1build."):
                found.setdefault(target, node.lineno)
    return found


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def violations(graph: dict[str, dict[str, int]]) -> list[str]:
    out = []
    for name, targets in graph.items():
        if name in FRONT_DOOR:
            continue
        for target, line in targets.items():
            here, there = room(name), room(target)
            if here == there:
                continue
            if here == "runtime":
                out.append(f"{name}:{line}: the runtime imports {target}")
            elif there == "runtime" and here != "cli":
                out.append(f"{name}:{line}: {here} imports {target}; only the command line may load a bundle")
            elif there == "":
                # `from dsr1build import __version__` is the package itself, which imports no room when it is loaded.
                continue
            elif there != "runtime" and ORDER.index(there) > ORDER.index(here):
                out.append(f"{name}:{line}: {here} imports {target}, which stands after it")
    return out


def cycle(graph: dict[str, dict[str, int]]) -> list[str]:
    state: dict[str, int] = {}
    path: list[str] = []

    def visit(name: str) -> list[str]:
        state[name] = 1
        path.append(name)
        for target in graph.get(name, {}):
            if target not in graph or target == name or target == "dsr1build":
                continue
            if state.get(target) == 1:
                return [*path[path.index(target) :], target]
            if target not in state and (found := visit(target)):
                return found
        state[name] = 2
        path.pop()
        return []

    for name in graph:
        if name not in state and (found := visit(name)):
            return found
    return []


def project() -> dict[str, dict[str, int]]:
    files = modules()
    return {
        name: imports(name, path.read_text(encoding="utf-8"), set(files), path.name == "__init__.py")
        for name, path in files.items()
    }


def test_every_room_is_in_the_order() -> None:
    rooms = {room(name) for name in modules()} - {""}
    assert rooms - set(ORDER) - {"runtime", "__main__"} == set()


def test_rooms_import_only_rooms_before_them() -> None:
    assert violations(project()) == []


def test_no_module_imports_itself_through_others() -> None:
    assert cycle(project()) == []


def test_the_checks_see_what_they_should() -> None:
    known = {"dsr1build.graph.model", "dsr1build.plan.action"}
    nested = "def f():\n    from dsr1build.plan import action\n"
    assert imports("dsr1build.graph.model", nested, known) == {"dsr1build.plan.action": 2}
    assert imports("dsr1build.graph.model", "from ..plan.action import x", known) == {"dsr1build.plan.action": 1}
    assert imports("dsr1build.graph.model", "import_module('dsr1build.plan.action')", known) == {"dsr1build.plan.action": 1}
    assert violations({"dsr1build.graph.model": {"dsr1build.plan.action": 2}}) == [
        "dsr1build.graph.model:2: graph imports dsr1build.plan.action, which stands after it"
    ]
    assert violations({"dsr1build.runtime.session": {"dsr1build.errors": 1}}) == [
        "dsr1build.runtime.session:1: the runtime imports dsr1build.errors"
    ]
    assert violations({"dsr1build.plan.action": {"dsr1build.graph.model": 1}}) == []
    assert cycle({"dsr1build.a": {"dsr1build.b": 1}, "dsr1build.b": {"dsr1build.a": 1}}) == [
        "dsr1build.a",
        "dsr1build.b",
        "dsr1build.a",
    ]
