"""A second tool takes one entry in `lld.tools.TOOLS` and its function; all else follows from the table."""

import subprocess
import sys

from conftest import ROOT


def test_a_calculator_beside_the_search():
    """In a process of its own: the modules of lld read the table when they are imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/calculator.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
