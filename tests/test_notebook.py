"""docs/quickstart.ipynb: it runs from its first cell to its last, and is stored with small outputs."""

import json

import pytest
from conftest import ROOT

NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"


def outputs_of(cells: list[dict]) -> list[dict]:
    return [output for cell in cells for output in cell.get("outputs", ())]


def text_of(outputs: list[dict]) -> str:
    return "".join("".join(output.get("text", "")) for output in outputs)


def check_outputs(cells: list[dict]) -> None:
    outputs = outputs_of(cells)
    told = text_of(outputs)
    assert all(output["output_type"] in ("stream", "display_data", "execute_result") for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1, "one picture"
    assert "<answer>" in told and "gate open" in told
    for name in ("GRPO", "LLDS"):
        [line] = [line for line in told.splitlines() if line.startswith(f"{name}  by hand")]
        by_hand, by_code = line.split("by hand ")[1].split(", by lld/loss.py ")
        assert abs(float(by_hand) - float(by_code)) < 1e-3


def test_the_notebook_is_stored_as_run_once_from_the_top_and_small():
    tree = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in tree["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    check_outputs(code)
    assert str(ROOT) not in NOTEBOOK.read_text() and NOTEBOOK.stat().st_size < 150_000
    assert all(len(line) <= 111 for cell in tree["cells"] for line in cell["source"])


@pytest.mark.whole_runs
def test_the_notebook_runs():
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources=where).execute()
    check_outputs(notebook.cells)
