"""The options that a checkpoint is evaluated with; importing this does not import torch."""

import json
import sys
import urllib.parse
from pathlib import Path

from lld.config import Config, Retriever
from lld.record.runs import printable
from lld.settings import read_back

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def lies_in_run(ckpt: Path) -> bool:
    """Whether a checkpoint is RUN/checkpoints/step_N of a run with options."""
    path = ckpt.absolute()
    return path.parent.name == "checkpoints" and (path.parent.parent / "config.yaml").is_file()


def checkpoint_of(where: str) -> str:
    """The checkpoint that is meant: of a run's folder the best on held-out questions, else the newest.

    Anything but a run's folder is returned as it is. Raises ValueError for a run without a checkpoint.
    """
    folder = Path(where) / "checkpoints"
    if not folder.is_dir():
        return where
    found = sorted(
        (path.parent for path in folder.glob("step_*/manifest.json")),
        key=lambda path: (len(path.name), path.name),
    )
    if not found:
        raise ValueError(f"{where} has no checkpoint yet: it is saved every run.save_every steps")
    try:
        best = json.loads((folder / "best.json").read_text())["checkpoint"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        best = None  # no evaluation yet
    return str(next((path for path in found if path.name == best), found[-1]))


def options_of(ckpt: Path, config_file: str | None, overrides: list[str], questions: bool = True) -> Config:
    """The options of `config_file`, or of the run that the checkpoint lies in (RUN/checkpoints/step_N).

    Either file may be somebody else's: neither code nor places to write are taken from it, nor, from a run's
    own file, a server on another machine; the command line may name them. Prints what was not taken and, for
    a run's own file, what will be read (`questions`: its files of questions too). Raises ValueError for a
    missing file or a mistake in it.
    """
    inside = ckpt if len(ckpt.parts) > 1 else ckpt.absolute()
    path = Path(config_file) if config_file is not None else inside.parent.parent / "config.yaml"
    if config_file is None and not lies_in_run(ckpt):
        raise ValueError(
            f"{ckpt} does not lie in a run's folder (RUN/checkpoints/step_N with RUN/config.yaml): "
            "give --config"
        )
    given = {override.partition("=")[0] for override in overrides}
    if config_file is None and "retriever.url" in given and "retriever.replicas" not in given:
        overrides = [*overrides, "retriever.replicas=[]"]  # those in the file belong to the file's url
    cfg, dropped = read_back(path, overrides)
    for name in dropped:
        if name in ("model.trust_remote_code", "retriever.record", "reward.kind"):
            _tell(
                f"{path}: {name} is not taken from a file: give {name}=… on the command line if it is meant"
            )
    if config_file is None:
        servers = [url for url in (cfg.retriever.url, *cfg.retriever.replicas) if url is not None]
        if cfg.retriever.replay is None:
            _refuse_elsewhere(path, cfg.retriever, given)
        _tell(_what_is_read(path, cfg, servers, questions))
    return cfg


def _refuse_elsewhere(path: Path, options: Retriever, given: set[str]) -> None:
    for name, servers in (("url", [options.url]), ("replicas", options.replicas)):
        for url in servers:
            mine = url is None or urllib.parse.urlsplit(url).hostname in LOOPBACK
            if not mine and f"retriever.{name}" not in given:
                value = url if name == "url" else f"[{','.join(servers)}]"
                raise ValueError(
                    f"{path} names the server {url!r}, which would be sent what the model asks: "
                    f"give retriever.{name}={value} if it is meant"
                )


def _what_is_read(path: Path, cfg: Config, servers: list[str], questions: bool) -> str:
    options = cfg.retriever
    index = options.index
    if index is not None and options.backend != "bm25":
        index += f" with encoder {options.encoder}"
    files = ", ".join(file for file in (options.corpus, index, options.oracle_questions) if file is not None)
    in_process = f"{options.backend or 'the backend of the index'} over {files}"
    where = options.replay or ", ".join(servers) or in_process
    if options.fail_share:
        where += f"; failed searches: random passages of {options.corpus}"
    told = f"options of {path}; search: {where}"
    if not questions:
        return told
    sets = ", ".join(f"{name} = {file}" for name, file in cfg.eval.benchmarks.items())
    return f"{told}; benchmarks: {sets}; training questions: {cfg.data.train}"


def _tell(text: str) -> None:
    print(printable(text), file=sys.stderr)
