"""Publishes a checkpoint on the Hugging Face hub: weights, tokenizer, figure and a model card.

    python -m lld.share RUN --to ORG/NAME [--out FOLDER] [--private] [--dry-run]

RUN is a run's folder (its best checkpoint is taken) or RUN/checkpoints/step_N. The files are first put into
FOLDER (default: RUN/share); --dry-run ends there. The trainer's state is left out. Run eval.py first: its
scores are in the card. Exit codes: 0 done; 2 a mistake in what was asked for; 3 the hub refused or did not
answer; 7 FOLDER cannot be written.
"""

import argparse
import os
import re
import shutil
import sys
from pathlib import Path

from lld.evaluation.options import checkpoint_of, lies_in_run
from lld.files import DISK_ERRORS, replace_file
from lld.record.runs import printable
from lld.settings import load

MODE = 0o644
# The last line of a card; without it the card is its reader's own
MARK = "<!-- written by lld.share; delete this line to keep your edits -->\n"


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        ckpt = Path(checkpoint_of(args.run))
        if not lies_in_run(ckpt):
            raise ValueError(
                f"{args.run}: give a run's folder, or RUN/checkpoints/step_N with RUN/config.yaml"
            )
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", args.to):
            raise ValueError(f"--to {args.to!r}: must be ORGANISATION/NAME")
        out = args.out or ckpt.parent.parent / "share"
        gather(ckpt, out, args.to)
        if args.dry_run:
            print(f"{out} holds what would be uploaded to {args.to}; read its README.md")
            return 0
        print(upload(out, args.to, args.private))
    except ValueError as error:
        return tell(str(error), 2)
    except ConnectionError as error:
        return tell(f"{error}; {out} holds the files, and the same command tries again", 3)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        return tell(f"{error.filename}: {error.strerror}; mend its permissions or choose another --out", 7)
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lld.share", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, or one of its checkpoints")
    parser.add_argument("--to", required=True, metavar="ORG/NAME", help="the repository on the hub")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the files are put together")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--dry-run", action="store_true", help="put the files together and upload nothing")
    return parser.parse_args(argv)


def gather(ckpt: Path, out: Path, name: str) -> None:
    """Puts weights, tokenizer, figure and card into the folder `out`; a card without its last line is kept.

    Large files are hard links where the file system has them. Raises ValueError if the checkpoint is damaged,
    or `out` holds anything else.
    """
    from lld.evaluation.folder import checkpoint_files  # imports torch, which takes seconds
    from lld.model.adapters import base_of
    from lld.share.card import on_hub, write_card

    run_dir, card = ckpt.parent.parent, out / "README.md"
    files = checkpoint_files(ckpt)
    files += [path for path in [run_dir / "figure.png"] if path.is_file()]
    others = {path.name for path in out.iterdir()} if out.exists() else set()
    others -= {card.name, *(path.name for path in files)}
    if others:
        raise ValueError(f"{out} holds {min(others)}, which is not of {ckpt}: choose another --out")
    edited = card.is_file() and not card.read_text(encoding="utf-8").endswith(MARK)
    text = write_card(name, ckpt, run_dir, load(str(run_dir / "config.yaml"))) + MARK
    out.mkdir(parents=True, exist_ok=True)
    for path in files:
        place(path, out / path.name)
    if edited:
        tell(f"{card} has been edited and is kept", 0)
    else:
        replace_file(card, text)
        card.chmod(MODE)
    base = base_of(out)
    if base is not None and not on_hub(base):
        tell(
            f"note: these are adapters of {base}, a folder of this machine: nobody else can open them; "
            "publish merged weights (docs/one-gpu.md)",
            0,
        )
    for path in sorted(out.glob("*.json")):
        if path.name != "adapter_config.json" and any(
            str(place) in path.read_text(encoding="utf-8") for place in (Path.cwd(), Path.home())
        ):
            tell(f"note: {path} names a folder of this machine", 0)


def place(path: Path, target: Path) -> None:
    """`path` as `target`, readable by everybody: weights as a hard link if they already are, else a copy.

    Other files are read and edited by people, which must not change the checkpoint.
    """
    target.unlink(missing_ok=True)
    if path.suffix in (".safetensors", ".bin") and path.stat().st_mode & 0o777 == MODE:
        try:
            os.link(path, target)
            return
        except OSError:  # another file system, or one without links
            pass
    shutil.copyfile(path, target)
    target.chmod(MODE)


def upload(folder: Path, name: str, private: bool) -> str:
    """Uploads the folder's files to the repository `name`, which is made if needed; returns its address.

    Raises ConnectionError, with the remedy, where the hub refuses or does not answer.
    """
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api = HfApi()
    try:
        url = api.create_repo(name, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=str(url.repo_id), folder_path=folder, commit_message="Checkpoint and model card"
        )
    except LocalTokenNotFoundError:
        raise ConnectionError("no token of the hub here: `hf auth login`, or set HF_TOKEN") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        remedy = "`hf auth login` with a token that may write there" if status in (401, 403) else "try again"
        raise ConnectionError(f"the hub refused {name} with status {status}: {remedy}") from None
    except httpx.HTTPError as error:
        raise ConnectionError(f"the hub did not answer ({type(error).__name__}: {error})") from None
    return str(url)


def tell(text: str, code: int) -> int:
    print(printable(f"lld.share: {text}"), file=sys.stderr)
    return code
