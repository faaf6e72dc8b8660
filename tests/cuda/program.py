"""Runs a script on the pretended device: `python tests/cuda/program.py FOLDER SCRIPT [ARGUMENT …]`; FOLDER
keeps the built hooks."""

import builtins
import runpy
import sys
from pathlib import Path

import start

hooks = start.load_hooks(Path(sys.argv[1]))

import pretended

pretended.guard = hooks

import torch


def plain_type(x, *rest):
    """`type` for lld/engine/decoder.py, which asks whether weights are plain parameters.

    A wrapped one is, as it would be on a GPU.
    """
    return torch.nn.Parameter if not rest and getattr(x, "_is_param", False) else builtins.type(x, *rest)


if __name__ == "__main__":
    sys.argv = sys.argv[2:]
    sys.path[:0] = [str(Path(sys.argv[0]).resolve().parent), str(pretended.ROOT)]
    import lld.engine.decoder

    lld.engine.decoder.type = plain_type
    with pretended.pretend():
        runpy.run_path(sys.argv[0], run_name="__main__")
