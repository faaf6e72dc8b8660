"""Building: memory at 60k and 1M passages, three kills, start-up.

    python tests/bench/retrieval_build.py --work /somewhere/with/3GB [--num 60000 1000000]

Passages are the first 24 words of those of ../shared, again and again with new ids. The encoder is a random
one-layer BERT of 64 dimensions on 16 tokens a passage: memory and resuming do not depend on the encoder, and
a real one would take hours here. "peak own" is the largest anonymous memory of the process (what cannot be
given back; pages of mapped files can), sampled every 20 ms. The build of the smallest size is also killed
(SIGKILL) at three random moments and resumed each time.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

OPEN = """
import sys, time
from lld.config import Retriever
from lld.retrieval import backends as retrieval
encoder, load = retrieval.Encoder, []
def timed(*args):
    began = time.perf_counter(); made = encoder(*args); load.append(time.perf_counter() - began); return made
retrieval.Encoder = timed
began = time.perf_counter()
index, corpus, encoder, backend = sys.argv[1:5]
options = Retriever(url=None, index=index, corpus=corpus, encoder=encoder, backend=backend, device="cpu")
retriever = retrieval.open_retriever(options)
print(time.perf_counter() - began - load[0])
"""


def own_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def run(command: list[str], env: dict, kill_after_s: float | None = None) -> tuple[float, int]:
    """Seconds and peak of own memory; killed after so many seconds."""
    process, began, peak = (
        subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.DEVNULL),
        time.perf_counter(),
        0,
    )
    while process.poll() is None:
        peak = max(peak, own_bytes(process.pid))
        if kill_after_s is not None and time.perf_counter() - began > kill_after_s:
            process.kill()
        time.sleep(0.02)
    assert kill_after_s is not None or process.returncode == 0, command
    return time.perf_counter() - began, peak


def digest(folder: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            whole.update(str(path.relative_to(folder)).encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:16]


def main() -> None:
    import gzip

    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", required=True)
    parser.add_argument("--num", type=int, nargs="+", default=[60_000, 1_000_000])
    args = parser.parse_args()
    work = Path(args.work)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    texts = [
        " ".join(json.loads(line)["contents"].split(" ")[:24])
        for line in gzip.open(ROOT.parent / "shared" / "data" / "corpus.jsonl.gz")
    ]
    counted = {}
    for text in texts:
        for word in text.split():
            counted[word] = counted.get(word, 0) + 1
    backend = Tokenizer(
        models.WordLevel(
            {
                word: i
                for i, word in enumerate(
                    ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted(counted, key=counted.get)[-5000:]]
                )
            },
            unk_token="[UNK]",
        )
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(work / "encoder")
    BertModel(
        BertConfig(
            vocab_size=5004,
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=64,
            max_position_embeddings=64,
        )
    ).save_pretrained(work / "encoder")
    env = os.environ | {"LLD_CACHE": str(work / "cache")}
    print(
        "| passages | corpus MB | build s | peak own MB | killed at s | resumed to the same bits | "
        "start-up s, first (reads the jsonl) | start-up s, faiss | torch |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for num in args.num:
        corpus, name = work / f"{num}.jsonl", str(work / f"index-{num}")
        with corpus.open("w") as file:
            for number in range(num):
                file.write(json.dumps({"id": str(number), "contents": texts[number % len(texts)]}) + "\n")

        def command(out):
            return [
                sys.executable,
                "-m",
                "lld.retrieval",
                "build",
                "--corpus",
                str(corpus),
                "--out",
                out,
                "--encoder",
                str(work / "encoder"),
                "--max-tokens",
                "16",
                "--batch-size",
                "256",
                "--shard-rows",
                "4096",
            ]

        seconds, peak = run(command(name), env)
        kills, same = [], ""
        if num == min(args.num):
            draw, base_s = (
                random.Random(0),
                run([sys.executable, "-c", "import lld.retrieval.backends"], env)[0],
            )
            for _ in range(3):
                kills.append(base_s + draw.random() * 0.3 * (seconds - base_s))
                run(command(name + "-killed"), env, kills[-1])
            left = len(list(Path(f"{name}-killed.partial").glob("vectors/*.npy")))
            run(command(name + "-killed"), env)
            same = (
                f"{digest(Path(name)) == digest(Path(name + '-killed'))} ({left} of {-(-num // 4096)} "
                "shards were left)"
            )

        def opening(backend, env):
            return float(
                subprocess.run(
                    [sys.executable, "-c", OPEN, name, str(corpus), str(work / "encoder"), backend],
                    cwd=ROOT,
                    env=env,
                    stderr=subprocess.DEVNULL,
                    capture_output=False,
                    stdout=subprocess.PIPE,
                    check=True,
                ).stdout
            )

        first_s = opening("faiss", env | {"LLD_CACHE": str(work / "cache2")})
        shutil.rmtree(work / "cache2", ignore_errors=True)
        print(
            f"| {num:,} | {corpus.stat().st_size / 1e6:.0f} | {seconds:.0f} | {peak / 1e6:.0f} | "
            f"{', '.join(f'{second:.1f}' for second in kills)} | {same} | {first_s:.2f} | "
            f"{opening('faiss', env):.2f} | {opening('torch', env):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
