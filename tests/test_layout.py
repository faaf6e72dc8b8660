"""The layout: imports run one way, lines and functions stay short, `lld/` itself holds the method alone."""

import ast
from pathlib import Path

import pytest
from conftest import ROOT

# A room is a module or a folder of lld/, or a program. It may import from rooms above its own line or on it,
# never from one below.
FLOORS = (
    {"config", "tools", "protocol", "advantages", "files"},
    {"rules", "episode", "loss", "model"},
    {"settings", "data", "reward", "policy", "engine", "weights"},
    {"retrieval", "rollout", "update", "selection"},
    {"record"},
    {"evaluate", "tinyworld"},
    {"running", "report"},
    {"experiment", "influence", "evaluation", "ask", "share"},
    {"train", "eval", "retriever_server"},
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
METHOD = {
    *("config", "rules", "settings", "files", "protocol", "episode", "rollout", "tools"),
    *("reward", "advantages", "policy", "loss", "weights", "update", "selection", "evaluate"),
}
REEXPORTS = ROOT / "lld" / "data" / "__init__.py"
FILES = [*sorted((ROOT / "lld").rglob("*.py")), *sorted(ROOT.glob("*.py"))]


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in FILES}


def imports(path: Path) -> set[str]:
    """The project's modules that a file imports, at its top or inside its functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relative to itself"
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in named}
    return found & MODULES.keys()


IMPORTS = {module: imports(path) for module, path in MODULES.items()}


def room(module: str) -> str:
    return module.removeprefix("lld.").split(".")[0]


def test_every_room_has_its_floor():
    assert {room(module) for module in MODULES} - {"lld"} == FLOOR.keys()


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"lld"}))
def test_imports_run_one_way(module):
    upward = {other for other in IMPORTS[module] - {"lld"} if FLOOR[room(other)] > FLOOR[room(module)]}
    assert not upward, f"{module} imports from floors that stand on it"


def test_no_module_imports_itself_by_way_of_others():
    """Neither do rooms: a circle between two of one floor would be one of modules, or soon become one."""
    rooms = {}
    for module, imported in IMPORTS.items():
        rooms.setdefault(room(module), set()).update({room(other) for other in imported} - {room(module)})
    for graph in (IMPORTS, rooms):
        left = dict(graph)
        while free := [node for node, imported in left.items() if not imported & left.keys()]:
            for node in free:
                del left[node]
        assert not left, f"these stand in a circle, or import from one: {sorted(left)}"


def test_the_method_is_what_lies_at_the_top():
    assert {path.stem for path in (ROOT / "lld").glob("*.py")} - {"__init__"} == METHOD
    for path in {*(ROOT / "lld").rglob("__init__.py")} - {ROOT / "lld" / "__init__.py", REEXPORTS}:
        assert not path.read_text(), f"{path} is not empty"


def test_train_is_a_page_or_two():
    assert len((ROOT / "train.py").read_text().splitlines()) <= 200


def loaded_modules(path: Path) -> set[str]:
    """The project's modules that importing a file loads: neither those of type annotations nor late ones."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in named}
    return found & MODULES.keys()


def test_the_method_can_be_read_in_an_evening():
    """What importing rollout, loss and update loads of the project is at most 3,100 lines.

    2,600 held GRPO and LLDS; kept ids, other samplers and other losses are the rest.
    """
    closure, left = set(), {"lld.rollout", "lld.loss", "lld.update"}
    while left:
        module = left.pop()
        closure.add(module)
        left |= loaded_modules(MODULES[module]) - closure
    assert "lld.engine.engine" in closure
    lines = {module: len(MODULES[module].read_text().splitlines()) for module in closure}
    assert sum(lines.values()) <= 3100, lines


def test_functions_are_short():
    lengths = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lengths[f"{path.relative_to(ROOT)} {node.name}"] = node.end_lineno - node.lineno + 1
    long = {name: length for name, length in lengths.items() if length > 45}
    assert len(long) <= 10 and max(lengths.values()) <= 60, long


def test_lines_end_at_110_columns():
    for path in [*FILES, *(ROOT / "tests").rglob("*.py")]:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            assert len(line) <= 110, f"{path}:{number}"
