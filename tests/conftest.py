"""Small real things shared by the tests: a byte-level BPE tokenizer, a random Qwen2 policy, a search over
made-up passages."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # tests start several processes on few cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

import fcntl
import shutil
import signal
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("LLD_CACHE", tempfile.mkdtemp(prefix="lld-tests-"))

import pytest
import torch

# A shell's background job is started with it ignored, and would hand that down
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
sys.path.insert(0, str(ROOT))

# What takes longest comes first, so that no worker is left alone with it at the end.
# test_train makes the world that test_survive, test_sharding and test_faults wait for.
LONG_FILES = ("test_train", "test_index", "test_survive", "test_sharding", "test_faults", "test_cuda_paths")

TEXTS = [
    "<think> I need to find it. </think> <search> who wrote it </search>",
    '<information>Doc 1(Title: "Ada") Ada was born in Arden.</information>',
    (
        "<answer> Beijing </answer> Answer the given question. You must conduct reasoning inside <think> and "
        "</think> first"
    ),
    (
        "My previous action is invalid. If I want to search, I should put the query between <search> and "
        "</search>."
    ),
] * 50


def pytest_configure(config):
    config.option.loadscopereorder = False  # xdist would order files by their number of tests


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def make_tokenizer(vocab_size: int = 400, chat: bool = False):
    """A byte-level BPE tokenizer, trained on a few sentences so that stop strings end inside tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    if chat:
        tokenizer.chat_template = "{% for m in messages %}user: {{ m['content'] }}{% endfor %} assistant: "
    return tokenizer


def make_lm(
    tokenizer,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    seed: int = 0,
    scale: float = 8.0,
    vocab_size: int | None = None,
):
    """A random Qwen2 whose logits are sharpened by `scale`, so that greedy choices are not near-ties."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    lm = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        lm.lm_head.weight.mul_(scale)
    return lm


def play(lm, tokenizer, questions, search, cfg):
    """Two episodes of each question, as the config samples them; with kept ids if it trains those."""
    from lld.rollout import Budgets, open_engine, rollout

    return rollout(
        open_engine(lm, tokenizer, cfg.rollout, cfg.rollout, keep_ids=cfg.loss.support == "kept"),
        tokenizer,
        questions,
        search,
        Budgets.of(cfg.rollout),
        num_samples=2,
        seed=0,
        step=0,
        overlap_search=False,
    )


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def lm(tokenizer):
    return make_lm(tokenizer)


@pytest.fixture(scope="session")
def questions():
    from lld.episode import Question

    return [Question(f"test/{i}", f"who wrote book number {i}?", (f"writer {i}",), "test") for i in range(12)]


@pytest.fixture(scope="session")
def search():
    from lld.protocol import Passage

    return lambda queries: [
        [
            Passage(str(r), f'"Title {r}"\nThe text about {query[:20]} number {r}.', 1.0 / (r + 1))
            for r in range(3)
        ]
        for query in queries
    ]


@pytest.fixture(scope="session")
def first_run(tmp_path_factory) -> Path:
    """A finished run "whole" of tests/test_train.py and its world, made once for all workers."""
    from test_train import run, write_config

    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # each worker has a folder of its own in it
    folder = base / "first_run"
    with open(base / "first_run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "whole.txt").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            done = run(write_config(folder, "whole"), 'run.trackers=["tensorboard"]')
            assert done.returncode == 0, done.stderr[-3000:]
            (folder / "whole.txt").write_text(done.stderr + done.stdout)
    return folder


@pytest.fixture(scope="module")
def folder(first_run, tmp_path_factory) -> Path:
    """A folder for the runs of one file of tests, with its own copy of the world."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(first_run / "world", folder / "world")
    return folder
