"""Whether a folder can hold a model, without opening it; importing this does not import torch."""

import re
import sys
from pathlib import Path


def check_folder(where: str, option: str, hub: bool = True) -> None:
    """Raises ValueError where `where` is, or can only be, a folder without a model; suggests another one.

    With `hub`, a possible hub name is accepted and a line is printed: for a misspelt folder the hub's own
    error comes late and says little.
    """
    path = Path(where).expanduser()
    if (path / "config.json").is_file():
        return
    if path.is_dir():
        inside = sorted(
            found.parent for pattern in ("*/config.json", "*/*/config.json") for found in path.glob(pattern)
        )
        remedy = f"did you mean {inside[-1]}?" if inside else "give a folder that from_pretrained opens"
        raise ValueError(f"{option} {where}: no config.json in it; {remedy}")
    there = sorted(found.parent.name for found in path.parent.glob("step_*/config.json"))
    if there:
        raise ValueError(f"{option} {where}: no such folder; {path.parent} holds {', '.join(there)}")
    # The hub's own rule for names
    named = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", where) and (
        path.parent == Path() or not path.parent.is_dir()
    )
    if named and hub:
        print(f"{option} {where}: no such folder here; asking the hub", file=sys.stderr)
        return
    remedy = (
        "or a hub name such as Qwen/Qwen2.5-3B (which cannot begin with the name of a folder here)"
        if hub
        else f"or for a hub name: `hf download {where if named else 'NAME'} --local-dir DIR`"
    )
    raise ValueError(f"{option} {where}: no such folder; give one that from_pretrained opens, {remedy}")
