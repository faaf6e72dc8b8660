"""What README.md and docs/ say of names, files, options, links and commands is so.

`python tests/test_readme.py` writes the table of docs/metrics.md anew from the glossary.
"""

import itertools
import re

import pytest
from conftest import ROOT

import lld.advantages
import lld.loss
import lld.reward
import lld.update
from lld import config, settings
from lld.record.glossary import GLOSSARY

README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
ALL = [README, *PAGES]
SECTIONS = "run|model|data|rollout|reward|advantage|loss|optim|eval|retriever|monitor|plan|tinyworld"
GLOSSARY_MARK = "<!-- glossary -->\n"


def every_page(test):
    return pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)(test)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def glossary_table() -> str:
    rows = [f"| `{name}` | {text} |".replace("||", r"\|\|") for name, text in GLOSSARY.items()]
    rows = [re.sub(r"(?<=\| mean )\|(.*?)\|(?= per token before)", r"\\|\1\\|", row) for row in rows]
    return "\n".join(["| name | what it is |", "|---|---|", *rows]) + "\n"


def anchors(page) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    titles = re.findall(r"^#+ (.+)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_is_200_lines_of_110_columns():
    lines = README.read_text().splitlines()
    assert len(lines) <= 200
    marked = [after for line, after in itertools.pairwise(lines) if line in COMMAND_MARKS]
    assert len(marked) == 2 and all(line.startswith("`python3 -m venv .venv && ") for line in marked)
    assert [line for line in lines if len(line) > 110 and line not in marked] == []


COMMAND_MARKS = ("<!-- run line -->", "<!-- test line -->")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_answers_one_question_in_lines_of_110_columns(page):
    text = page.read_text()
    title, *rest = text.splitlines()
    assert title.startswith("# ") and title.endswith("?")
    prose = without_code(text).splitlines()
    assert [line for line in prose if len(line) > 110 and not line.startswith(("|", "<!--", "!["))] == []
    assert not any(line.startswith("# ") for line in without_code("\n".join(rest)).splitlines())
    assert f"docs/{page.name}" in README.read_text(), "the README links to every page"


def test_the_readme_names_every_file_of_the_method_and_every_folder():
    text = README.read_text()
    for path in [*(ROOT / "lld").glob("[a-z]*.py"), *ROOT.glob("*.py")]:
        assert f"`{path.relative_to(ROOT)}`" in text, path
    for path in (ROOT / "lld").iterdir():
        if path.is_dir() and (path / "__init__.py").is_file():
            assert f"`{path.relative_to(ROOT)}/`" in text, path


@every_page
def test_every_file_function_and_test_that_is_named_is_there(page):
    text = page.read_text()
    for name in re.findall(r"`((?:lld|configs|docs|tests)/[\w./-]+)", without_code(text)):
        assert (ROOT / name).exists(), name
    known = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"\b(test_\w+)(?!\w|\.py|…)", text):
        if not (ROOT / "tests" / f"{name}.py").exists():
            assert f"def {name}(" in known, name
    if page == README:
        modules = (lld.loss, lld.update, lld.reward, lld.advantages)
        for name in re.findall(r"\b(\w+)\(\)", text):
            assert any(hasattr(module, name) for module in modules), name


@every_page
def test_links_anchors_and_pictures_lead_somewhere(page):
    text = without_code(page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target
        assert path.suffix != ".png" or path.read_bytes().startswith(b"\x89PNG")


def test_every_config_is_named_and_every_config_named_loads():
    recipes = (ROOT / "docs" / "recipes.md").read_text()
    named = re.findall(r"^\| (`[\w.-]+`(?:, `[\w.-]+`)*) \|", recipes + README.read_text(), re.MULTILINE)
    named = {name for group in named for name in re.findall(r"`([\w.-]+)`", group)}
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} <= named
    table = README.read_text().split("| config | what")[1].split("\n\n")[0]
    for name in re.findall(r"(?<=[|,] )`([\w.-]+)`", table):
        settings.load(str(ROOT / "configs" / f"{name}.yaml"))
    for page in ALL:
        for name in re.findall(r"configs/(\w[\w-]*)\.yaml", page.read_text()):
            settings.load(str(ROOT / "configs" / f"{name}.yaml"))


# The diffs of forking.md add options; the test that applies them reads them.
@pytest.mark.parametrize(
    "page", [page for page in ALL if page.name != "forking.md"], ids=lambda page: page.name
)
def test_every_option_that_is_named_exists(page):
    text, defaults = page.read_text(), config.Config()
    named = re.findall(rf"`(?:[\w.]+ )*?((?:{SECTIONS})\.(?!py\b|md\b|json)\w+)", text)
    named += re.findall(rf"(?<=[\s\[])((?:{SECTIONS})\.\w+)=", text)
    for option in named:
        section, name = option.split(".")
        assert hasattr(getattr(defaults, section), name), option


def test_the_table_of_metrics_is_the_glossary():
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert text.split(GLOSSARY_MARK)[1] == glossary_table(), "run python tests/test_readme.py"


@every_page
def test_every_command_says_which_test_runs_it_or_why_none_does(page):
    """A code block with commands is followed by <!-- run by TEST … --> or <!-- not run … : why -->."""
    text = page.read_text()
    for block in re.finditer(r"^```bash\n(.*?)^```\n(.*?)$", text, re.MULTILINE | re.DOTALL):
        commands, after = block[1], block[2]
        assert re.fullmatch(r"<!-- (run by tests/\S+|not run\b[^:]*: .+) -->", after), commands
        for name in re.findall(r"tests/\w+\.py", after):
            assert (ROOT / name).is_file(), name
        for script in re.findall(r"(?:^|python |launch |\d )([\w/]+\.py)\b", commands, re.MULTILINE):
            assert (ROOT / script).is_file(), script
        for name in re.findall(r"(?<=[ =])configs/\S+", commands):
            assert (ROOT / name).is_file(), name
    blocks = re.findall(r"^```bash$", text, re.MULTILINE)
    commands = re.findall(r"^(?:python|accelerate|torchrun|hf) ", text, re.MULTILINE)
    assert blocks or not commands, "commands stand in blocks marked bash"


if __name__ == "__main__":
    page = ROOT / "docs" / "metrics.md"
    page.write_text(page.read_text().split(GLOSSARY_MARK)[0] + GLOSSARY_MARK + glossary_table())
