"""Whether a folder can hold a model, without opening it; importing this does not import torch."""

import re
import sys
from pathlib import Path

# A folder with one of these holds a model, or adapters of one
DESCRIBED = ("config.json", "adapter_config.json")


def described(folder: Path, pattern: str = "") -> list[Path]:
    """The folders of models or adapters among those that match `pattern`, or `folder` itself."""
    found = {path.parent for name in DESCRIBED for path in folder.glob(f"{pattern}{name}") if path.is_file()}
    return sorted(found)


def check_folder(where: str, option: str, hub: bool = True) -> None:
    """Raises ValueError where `where` is, or can only be, a folder without a model; suggests another one.

    With `hub`, a possible hub name is accepted and a line is printed: for a misspelt folder the hub's own
    error comes late and says little.
    """
    path = Path(where).expanduser()
    if described(path):
        return
    if path.is_dir():
        inside = described(path, "checkpoints/*/") or sorted(described(path, "*/") + described(path, "*/*/"))
        remedy = f"did you mean {inside[-1]}?" if inside else "give a folder that from_pretrained opens"
        raise ValueError(f"{option} {where}: no config.json in it; {remedy}")
    there = [found.name for found in described(path.parent, "step_*/")]
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
