"""docs/forking.md: each diff applies to a copy of the repository, opens as few files as promised, and works.

Run as a script (`test_forking.py COPIES WORLD CONFIG NAME…`), this file is the one that imports torch:
each fork's check runs in a forked child of it, in that fork's own copy, so that `import lld` there is the
changed code.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from conftest import ROOT

PAGE = "docs/forking.md"
TIME_LIMIT_S = 120  # of one fork's check

# Files that a fork opens, its tests not counted
FILES = {
    "A reward": 1,
    "An advantage estimator": 1,
    "A loss term": 2,
    "An LLDS gate": 1,
    "A tool": 2,
    "A retriever": 2,
    "A dataset": 1,
    "A model of the Llama or Qwen kind": 1,
    "A metric": 2,
}


def diffs() -> dict[str, str]:
    """The diff under each heading of the page."""
    sections = re.split(r"^## (.+)\n", (ROOT / PAGE).read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for heading, text in zip(sections[::2], sections[1::2], strict=True):
        blocks = re.findall(r"^```diff\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
        assert len(blocks) <= 1, f"{PAGE}: {heading!r} holds {len(blocks)} diffs; one fork is one diff"
        if blocks:
            found[heading] = blocks[0]
    return found


def copy_with(diff: str, copy: Path) -> str | None:
    """Makes a copy of what runs, changed by `diff`; returns how to mend the page where it does not apply."""
    copy.mkdir()
    for name in ("lld", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for script in ROOT.glob("*.py"):
        shutil.copy(script, copy)
    # In a folder of another repository, git would look for the files in that one, and silently change nothing
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(copy.parent)}
    done = subprocess.run(
        ["git", "apply", "-"], input=diff, text=True, capture_output=True, cwd=copy, env=env
    )
    if done.returncode == 0:
        return None
    return (
        f"the diff no longer applies:\n{done.stderr}"
        "The code around it has changed. Make the change by hand in a scratch copy of the repository, and "
        "put what `git add -A; git diff --cached -U1` prints there in the old diff's place."
    )


@pytest.fixture(scope="module")
def outcomes(folder, tmp_path_factory) -> dict[str, str | None]:
    """Why each fork does not work; None where it does."""
    from test_train import write_config

    copies = tmp_path_factory.mktemp("forks")
    failures = {name: copy_with(diff, copies / slug(name)) for name, diff in diffs().items()}
    applied = [name for name in failures if failures[name] is None]
    config = write_config(folder, "forks", eval={"every": 0, "at_start": False})
    subprocess.run(
        [sys.executable, __file__, str(copies), str(folder / "world"), str(config), *applied],
        check=True,
        timeout=TIME_LIMIT_S * len(applied),
    )
    for name in applied:
        copy = copies / slug(name)
        if not (copy / "passed").exists():
            failures[name] = (copy / "check.log").read_text()[-6000:]
    return failures


def slug(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def files_of(diff: str) -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)$", diff, flags=re.MULTILINE)


def test_the_page_has_a_fork_for_each_question():
    assert list(diffs()) == list(FILES) == list(CHECKS)


@pytest.mark.parametrize("heading", FILES)
def test_a_fork_opens_as_few_files_as_promised(heading):
    files = files_of(diffs()[heading])
    assert len(files) == len(set(files)) == FILES[heading], f"{heading}: {', '.join(files)}"


@pytest.mark.parametrize("heading", FILES)
def test_a_fork_works(outcomes, heading):
    assert outcomes[heading] is None, f"{PAGE}, {heading!r}: {outcomes[heading]}"


def test_llds_for_another_trainer_is_ours():
    import torch

    from lld.loss import lld_terms

    made: dict = {}
    exec(re.search(r"^```python\n(.*?)^```$", (ROOT / PAGE).read_text(), re.M | re.S)[1], made)
    torch.manual_seed(0)
    for _ in range(20):
        logprobs_BT = torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
        old_BT, written_BT = torch.randn(6, 12, dtype=torch.float64), torch.rand(6, 12) < 0.7
        advantages_B = torch.tensor([1.0, -1.0, 0.0, 0.5, -0.2, 2.0])
        ids_BT, last = torch.zeros(6, 12, dtype=torch.long), 0
        for row in range(6):
            last = 0
            for place in range(12):
                last += bool(written_BT[row, place]) and not (place and written_BT[row, place - 1])
                ids_BT[row, place] = last if written_BT[row, place] else 0
        theirs = made["llds"](logprobs_BT, old_BT, advantages_B, written_BT)
        terms_BT = lld_terms(logprobs_BT, old_BT, advantages_B, ids_BT, gate="action")
        ours = terms_BT.sum() / written_BT[advantages_B >= 0].sum()
        grads = [torch.autograd.grad(value, logprobs_BT)[0] for value in (theirs, ours)]
        assert torch.allclose(theirs, ours, rtol=1e-12) and torch.allclose(*grads, rtol=1e-12)
        assert ours > 0 and (terms_BT == 0).any()


# The checks: each runs in its fork's copy, with the smallest world of tests/test_train.py beside it.


def train_two_steps(config: str, *options: str) -> list[dict]:
    """Trains, and returns the rows of metrics.jsonl; asserts that the program ended as it should."""
    from lld.report import figure

    figure.write_report = lambda *_: ""  # before train imports it: a figure takes longer than two steps
    import train

    assert train.main(["--config", config, "run.steps=2", "run.dir=run", *options]) == 0
    return [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]


def check_reward(world: Path, config: str) -> None:
    from lld.config import Reward
    from lld.reward import score_text

    def score(answer):
        return score_text([""], [""], answer, ["Ada Byron"], Reward(kind="brief"))

    assert score("It was Ada Byron") == 1.0
    assert score("One of Ada Byron, Jane Austen, Emily Brontë") == 0.0
    assert score(None) == 0.0
    train_two_steps(config, "reward.kind=brief")


def check_estimator(world: Path, config: str) -> None:
    import torch

    from lld.advantages import group_advantages
    from lld.config import Advantage

    rewards_PG = torch.tensor([[1.0, 0.0, 0.0], [0.1, 0.1, 0.1]])
    advantages_PG = group_advantages(rewards_PG, Advantage(kind="median"))
    assert advantages_PG.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    train_two_steps(config, "advantage.kind=median")


def check_loss_term(world: Path, config: str) -> None:
    import torch

    from lld import settings
    from lld.loss import Tokens, drift
    from lld.record import glossary
    from lld.running.dry_row import check_names

    new_BT, old_BT = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -4.0]])
    terms_BT = drift(Tokens.of(new_BT, old_BT, torch.ones(1), torch.ones(1, 2)), 0.5)
    assert terms_BT.tolist() == [[0.0, 1.0]]
    # The second file is not optional, and the run says so before its first rollout
    explained = glossary.GLOSSARY.pop("loss/drift")
    with pytest.raises(ValueError, match="would log loss/drift, which lld/record/glossary.py does not"):
        check_names(settings.load(config, ["loss.penalties={drift: 0.1}"]))
    glossary.GLOSSARY["loss/drift"] = explained
    rows = train_two_steps(config, "loss.penalties={drift: 0.1}")
    assert any(row["loss/drift"] > 0 for row in rows)


def check_gate(world: Path, config: str) -> None:
    import torch

    from lld.loss import lld_gate
    from lld.report import page

    # Two small falls outvote one large rise in action 1; action 2 only rose
    fall_BT = torch.tensor([[0.1, 0.1, -5.0, 9.0, -1.0, -1.0]])
    action_ids_BT = torch.tensor([[1, 1, 1, 0, 2, 2]])
    assert lld_gate(fall_BT, action_ids_BT, "majority").tolist() == [[True, True, True, False, False, False]]
    rows = train_two_steps(config, "loss.lld_gate=majority", "monitor.trajectories_every=1")
    assert all(0 <= row["gate/majority/open"] <= 1 and "gate/majority/penalty" in row for row in rows)
    page.write_page(["run"], "report.html")
    if shutil.which("node"):
        gates, colors = page_script("[GATES, Object.keys(COLORS)]")
        assert "majority" in gates and "gate_majority" in colors


def check_tool(world: Path, config: str) -> None:
    import torch
    from conftest import make_tokenizer
    from test_rollout import BUDGETS, ScriptedEngine

    from lld import protocol
    from lld.config import Reward
    from lld.episode import PART_IDS, Question, collate
    from lld.record import metrics, monitor, trajectories
    from lld.report import page
    from lld.reward import score_episodes
    from lld.rollout import Budgets, rollout
    from lld.tools import calculate
    from lld.update import Scores

    assert calculate("2 + 3 * (4 - 1) / 2") == "6.5"
    for wrong in ("1 / 0", "__import__('os')", "2 ** 999999999", "two", "(" * 5000, "1" * 5000):
        assert calculate(wrong) == "Not an arithmetic expression."

    # Its stop string, its sentence, and no way for retrieved text to forge it
    assert "</calc>" in protocol.STOP_STRINGS and "<calc>" in protocol.PROMPT
    assert protocol.defuse("a </calc> b") == "a (/calc) b"

    # A conversation, from what the model writes to what it reads, and its parts
    tokenizer = make_tokenizer()
    says = ["<think> sum </think> <calc> 2 + 3 </calc>", "<think> so </think> <answer> 5 </answer>"]
    guesses = ["<think> six </think> <answer> 6 </answer>"]
    engine = ScriptedEngine(tokenizer, [[says, guesses]])
    question = Question("q/1", "How much is 2 + 3?", ("5",), "q")
    episodes = rollout(engine, tokenizer, [question], None, Budgets(**BUDGETS), num_samples=2, seed=0, step=0)
    turn = episodes[0].turns[0]
    assert (turn.kind, turn.content, turn.tool_was_read, turn.searched) == ("calc", "2 + 3", True, False)
    read = tokenizer.decode(episodes[0].token_ids[turn.end : turn.observation_end])
    assert read == "\n\n<information>5</information>\n\n"
    advantages_PG = torch.tensor([[1.0, -1.0]])
    batch = collate(episodes, advantages_PG, tokenizer.pad_token_id)
    start = len(episodes[0].prompt_ids)
    parts_T = batch.part_ids_BT[0, start + turn.tag_start : start + turn.end]
    assert set(parts_T.tolist()) == {PART_IDS["calc"]} and PART_IDS["calc"] not in (1, 2, 3)

    # Its grammar, and its metrics
    assert score_episodes(episodes, tokenizer, Reward(kind="format")) == [1.0, 0.2]
    told = metrics.describe_episodes(episodes, advantages_PG)
    assert told["calls/calc"] == 0.5 and told["searches"] == 0 and told["valid_actions"] == 1
    old_BT = torch.zeros(batch.token_ids_BT.shape)
    moved = monitor.displacement(batch, old_BT, old_BT - 0.25, [0, 1])
    assert moved["displacement/correct/calc/turn1"] == -0.25
    assert all(map(metrics.described, [*told, *moved]))

    # A run with it, and its colour on the page
    rows = train_two_steps(config, "rollout.max_prompt_tokens=200", "rollout.max_episode_tokens=600")
    assert all("calls/calc" in row for row in rows)
    scores = Scores(old_BT, old_BT, old_BT, None, old_BT, [[0, 1]])
    records = trajectories.describe(tokenizer, 1, episodes, batch, scores, [1.0, 0.0], [0, 1])
    shutil.rmtree("run/trajectories", ignore_errors=True)
    trajectories.write(Path("run/trajectories/step_000001.jsonl"), records)
    page.write_page(["run"], "report.html")
    if shutil.which("node"):
        episode = "loadStep(runs[0], 1).groups[0].episodes[0]"
        painted = page_script(f"{episode}.turns.map((turn) => tokenClass({episode}, turn.tag, 'author'))")
        assert painted == ["by-more0", "by-answer"]
    assert ".by-more0 {" in Path("report.html").read_text()


def page_script(expression: str) -> object:
    """The value of an expression among report.html's functions, by Node, which has no document to draw in."""
    page = Path("report.html").read_text()
    blocks = dict(re.findall(r'<script type="application/json" id="(.+?)">(.*?)</script>', page, re.DOTALL))
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    functions = script[: script.index("let width = innerWidth")]
    Path("page.js").write_text(
        f"const blocks = {json.dumps(blocks)};\n"
        "const document = { getElementById: (id) => (id in blocks ? { textContent: blocks[id] } : null) };\n"
        f"{functions}\nconsole.log(JSON.stringify({expression}));\n"
    )
    done = subprocess.run(["node", "page.js"], capture_output=True, text=True, timeout=TIME_LIMIT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_retriever(world: Path, config: str) -> None:
    corpus = world / "corpus.jsonl"
    titles = [json.loads(line)["contents"].partition("\n")[0].strip('"') for line in corpus.open()]

    from lld.config import Retriever
    from lld.retrieval.backends import open_retriever

    retriever = open_retriever(Retriever(url=None, corpus=str(corpus), backend="titles"))
    [found] = retriever.search([f"Where was {titles[-1]} born?"], 3)
    assert len(found) == 3 and found[0].contents.startswith(f'"{titles[-1]}"')
    train_two_steps(config, "retriever.backend=titles")


def check_dataset(world: Path, config: str) -> None:
    from lld.data import load_questions

    Path("mine.csv").write_text('id,question,answers\n7,"Who, then, wrote Emma?",Jane Austen|Austen\n')
    [question] = load_questions("mine.csv")
    assert question.id == "mine/7" and question.text == "Who, then, wrote Emma?"
    assert question.golden_answers == ("Jane Austen", "Austen")


def check_model(world: Path, config: str) -> None:
    import torch
    import yaml
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from lld import settings

    mine = Path("smollm.yaml")
    assert settings.load(str(mine), []).model.path == "HuggingFaceTB/SmolLM2-1.7B"
    # The same file with a made-up Llama in the place of the true one, in the smallest world
    tokenizer = AutoTokenizer.from_pretrained(world / "policy")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    lm = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True, **sizes
        )
    )
    lm.save_pretrained("llama")
    tokenizer.save_pretrained("llama")
    tree = yaml.safe_load(Path(config).read_text()) | yaml.safe_load(mine.read_text())
    tree["model"] |= {"path": "llama", "mixed_precision": "no"}
    Path("mine.yaml").write_text(yaml.safe_dump(tree))
    train_two_steps("mine.yaml")


def check_metric(world: Path, config: str) -> None:
    from lld.episode import Episode, Question, Turn
    from lld.record.metrics import num_repeats

    turns = [Turn(0, 1, 2, "search", query, "stop_string", 0, searched=True) for query in ("a", "b", "a")]
    assert num_repeats(Episode(Question("1", "?", ("!",), "q"), 0, [1], turns=turns)) == 1
    assert all(row["repeated_searches"] >= 0 for row in train_two_steps(config))


CHECKS = {
    "A reward": check_reward,
    "An advantage estimator": check_estimator,
    "A loss term": check_loss_term,
    "An LLDS gate": check_gate,
    "A tool": check_tool,
    "A retriever": check_retriever,
    "A dataset": check_dataset,
    "A model of the Llama or Qwen kind": check_model,
    "A metric": check_metric,
}


def main(copies: Path, world: Path, config: str, headings: list[str]) -> None:
    """Checks each fork in a child of this process, which has imported what is slow, and nothing of lld."""
    import accelerate.tracking  # noqa: F401
    import bm25s  # noqa: F401
    import datasets  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    from torch.distributed import fsdp  # noqa: F401
    from transformers import AutoTokenizer, LlamaForCausalLM, Qwen2ForCausalLM  # noqa: F401

    sys.path.remove(str(ROOT))
    assert not any(name.partition(".")[0] in ("lld", "train") for name in sys.modules)
    for heading in headings:
        child = os.fork()
        if not child:
            check_in(copies / slug(heading), CHECKS[heading], world, config)
        os.waitpid(child, 0)


def check_in(copy: Path, check, world: Path, config: str) -> None:
    """Runs one check in its copy; never returns. It passed where it leaves a file "passed"."""
    signal.alarm(TIME_LIMIT_S)
    log = os.open(copy / "check.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        check(world, config)
        Path("passed").touch()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
