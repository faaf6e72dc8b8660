"""What the README says of names, files and commands is so."""

import re

import pytest
from conftest import ROOT

from lld import config, settings
from lld.record import glossary

README = (ROOT / "README.md").read_text()


def test_the_glossary_is_metrics_own():
    for name, text in glossary.GLOSSARY.items():
        assert f"| `{name}` | {text} |" in README
    listed = set(
        re.findall(
            r"^\| `([^`]+)` \| ",
            README[README.index("## A healthy run") : README.index("## What is different")],
            re.MULTILINE,
        )
    )
    assert listed == set(glossary.GLOSSARY)


def test_every_file_it_names_is_there_and_every_file_there_is_named():
    for name in re.findall(r"`((?:lld|configs|docs|tests)/[\w./-]+\.(?:py|yaml|png))`", README):
        assert (ROOT / name).is_file(), name
    for path in [*(ROOT / "lld").rglob("[a-z]*.py"), *ROOT.glob("*.py")]:
        assert f"`{path.relative_to(ROOT)}`" in README, path
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")


def test_every_config_is_named_and_every_config_named_loads():
    named = set(
        re.findall(r"^\| (`[\w`., -]+`) \|", README[README.index("| config | what |") :], re.MULTILINE)
    )
    named = {name for group in named for name in re.findall(r"`([\w.-]+)`", group)}
    there = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    assert there - {"tiny"} <= named
    for name in re.findall(r"configs/(\w[\w-]*)\.yaml", README):
        settings.load(str(ROOT / "configs" / f"{name}.yaml"))


@pytest.mark.parametrize(
    "option",
    sorted(
        set(
            re.findall(
                r"`(?:[\w.]+ )*?((?:run|model|rollout|loss|optim|eval|retriever|monitor)\.(?!py\b)\w+)\b",
                README,
            )
        )
    ),
)
def test_every_option_it_names_exists(option):
    section, name = option.split(".")
    assert hasattr(getattr(config.Config(), section), name)
