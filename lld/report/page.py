"""Run folders -> one self-contained HTML page: the template `report.html` with the logs inserted as JSON.

Retrieved passages and model output are untrusted text. They are inserted as JSON with all markup characters
escaped, and the page's script shows them as text nodes only. The content security policy allows the one
script and the one style sheet by their hashes, and nothing else.
"""

import base64
import hashlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

from lld.config import keys_of
from lld.protocol import PARTS
from lld.record import courses, phases, runs, verdict
from lld.record.glossary import GLOSSARY
from lld.report.compact import collect_trajectories, escaped_json, rounded
from lld.rules import clip_bounds

TEMPLATE = Path(__file__).with_name("report.html")
# A page of this size still opens at once; all groups of a 3B run would take several times as much.
TRAJECTORIES_MB = 24.0
WINDOWS = 4  # quarters of a run, for `by_update`


def columns(rows: Sequence[dict]) -> dict[str, dict]:
    """Name -> {"v": one value or null per row}, or {"i": row indices, "v": values} if most rows have none."""
    table = {}
    for name in sorted({name for row in rows for name in row} - {"step"}):
        present = [
            (index, value) for index, row in enumerate(rows) if (value := rounded(row.get(name))) is not None
        ]
        if 2 * len(present) < len(rows):
            table[name] = {"i": [index for index, _ in present], "v": [value for _, value in present]}
        else:
            table[name] = {"v": [rounded(row.get(name)) for row in rows]}
    return table


def by_update(rows: Sequence[dict], name: str = "displacement/correct") -> list[dict]:
    """The mean of `name` by update within the rollout, for each quarter of a run.

    Returns [{"first_step", "last_step", "means"}], with one mean per update (None without values).
    """
    some = [row for row in rows if runs.is_number(row.get(name)) and "update" in row]
    if not some:
        return []
    first, last = some[0]["step"], some[-1]["step"]
    cells: dict[int, dict[int, list[float]]] = {}
    for row in some:
        window = min(WINDOWS - 1, (row["step"] - first) * WINDOWS // (last - first + 1))
        cells.setdefault(window, {}).setdefault(row["update"], []).append(row[name])

    def first_step_of(window: int) -> int:
        return first + math.ceil(window * (last - first + 1) / WINDOWS)

    return [
        {
            "first_step": first_step_of(w),
            "last_step": first_step_of(w + 1) - 1,
            "means": [rounded(sum(v) / len(v)) if (v := by.get(u)) else None for u in range(max(by) + 1)],
        }
        for w, by in sorted(cells.items())
    ]


def page_content(
    run_dirs: Sequence[str | Path], trajectories_mb: float = TRAJECTORIES_MB
) -> tuple[dict, dict[str, str]]:
    """The content of the page's first data block, and id -> JSON of the blocks that it reads on demand."""
    folders = [Path(run_dir) for run_dir in run_dirs]
    # An option that a run's file lacks had its default; without a file nothing is known.
    options = [some and runs.defaults() | some for some in map(runs.read_options, folders)]
    room = int(trajectories_mb * 1e6 / len(folders))
    shown, blocks = [], {}
    named = zip(folders, runs.labels(folders), runs.settings(options), strict=True)
    for index, (folder, label, setting) in enumerate(named):
        rows = runs.read_metrics(folder)
        about, updates = folder / "run.json", folder / "updates.jsonl"
        trajectories, texts = collect_trajectories(folder, room)
        blocks |= {f"trajectories-{index}-{step}": text for step, text in texts.items()}
        shown.append(
            {
                "label": label,
                "about": runs.parse_json(
                    about.read_bytes(), str(about), "delete it, and the report does without"
                )
                if about.is_file()
                else {},
                "method": runs.method(options[index]) if options[index] else "unknown (no config.yaml)",
                "setting": setting,
                "options": options[index],
                "clip": clip_of(options[index]),
                "outcome": courses.outcome(rows, options[index]),
                "verdict": verdict.judge(rows, options[index]),
                "remedy": phases.remedy(options[index]),
                "checkpoint": verdict.describe_checkpoint(folder),
                "steps": [row["step"] for row in rows],
                "columns": columns(rows),
                "by_update": by_update(runs.read_rows(updates)) if updates.is_file() else [],
                "trajectories": trajectories,
            }
        )
    content = {
        "runs": shown,
        "differences": runs.differences(options),
        "glossary": GLOSSARY,
        "parts": PARTS,
        "gates": keys_of("loss", "GATES"),
    }
    return content, blocks


def clip_of(options: dict) -> list[float | None] | None:
    """The ratios between which a run's loss keeps the gradient (`clip_bounds`): [low, high or null].

    None where they are not known: without a config.yaml, or where it holds no numbers.
    """
    names = {name.removeprefix("loss."): value for name, value in options.items()}
    try:
        return [bound if runs.is_number(bound) else None for bound in clip_bounds(SimpleNamespace(**names))]
    except (TypeError, OverflowError, AttributeError):
        return None


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def render(content: dict, blocks: dict[str, str]) -> Iterable[str]:
    """The page in pieces: the template, filled with its security policy, content and trajectories."""
    template = TEMPLATE.read_text(encoding="utf-8")

    def between(start: str, end: str) -> str:
        return template[template.index(start) + len(start) : template.index(end)]

    policy = (
        f"default-src 'none'; script-src {_hash(between('<script>', '</script>'))}; style-src "
        f"{_hash(between('<style>', '</style>'))}; base-uri 'none'; form-action 'none'"
    )
    head, tail = template.replace("{{policy}}", policy, 1).split("{{content}}")
    yield head
    yield f'<script type="application/json" id="content">{escaped_json(content)}</script>\n'
    for name, text in blocks.items():
        yield f'<script type="application/json" id="{name}">{text}</script>\n'
    yield tail


def write_page(
    run_dirs: Sequence[str | Path], path: str | Path, trajectories_mb: float = TRAJECTORIES_MB
) -> None:
    """Writes the report of the runs: one HTML file that needs no server and no network.

    Metrics, options and files that a run lacks are shown as missing. Raises ValueError for a folder without
    metrics and for damaged logs.
    """
    pieces = render(*page_content(run_dirs, trajectories_mb))
    # In a folder from elsewhere the file may be a link: do not write through it.
    Path(path).unlink(missing_ok=True)
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(pieces)
