"""Every script in tests/bench still starts: what it imports is there. What it measures takes hours."""

import ast
import importlib.util
import os
import sys

import pytest
from conftest import ROOT

SCRIPTS = sorted((ROOT / "tests" / "bench").glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_its_imports_are_there(path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    spec = importlib.util.spec_from_file_location(f"bench_{path.stem}", path)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    spec.loader.exec_module(script)
    assert f"tests/bench/{path.name}" in script.__doc__, "how to run it"
    for node in ast.walk(ast.parse(path.read_text())):  # those inside functions too
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "lld":
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")
