"""Every script in tests/bench still starts: what it imports is there. What it measures takes hours."""

import ast
import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

SCRIPTS = sorted((ROOT / "tests" / "bench").glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_its_imports_are_there(path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    body = [ast.unparse(statement) for statement in ast.parse(path.read_text()).body]
    found = [number for number, text in enumerate(body) if text.startswith(("import lld", "from lld"))]
    before = body[: found[0]] if found else ["sys.path"]
    assert any(text.startswith("sys.path") for text in before), "python FILE finds only the file's own folder"
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


def test_a_part_of_the_gpu_day_is_stopped_with_its_children(tmp_path, monkeypatch):
    """A child that goes on would hold the GPU beside the next part."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "bench"))
    import gpu_day

    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    command = ["-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"]
    part = gpu_day.Part("slow", 6, command, None)
    found = gpu_day.carry_out(part, tmp_path, False, 6)
    assert found["outcome"] == "stopped after 6 s"
    pid, deadline = int(found["output"]), time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
