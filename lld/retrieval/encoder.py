"""A text encoder: prefixes, pooling, and unit vectors of queries and passages."""

import json
import re
import threading
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer

# Longer texts are cut at CHARACTERS_A_TOKEN x max_tokens before tokenization; WordPiece accepts words of up
# to 100 letters.
CHARACTERS_A_TOKEN = 128
# Fixed cost of a forward pass, in tokens: reading the weights (measured), kernel launches (estimated).
PASS_TOKENS = {"cpu": 32, "cuda": 2048}


def model_name(name: str) -> str:
    """The last part of a hub name or folder; of a folder in the hub's cache, the last part of the hub name.

    >>> model_name("hub/models--intfloat--e5-base-v2/snapshots/f52bf8e")
    'e5-base-v2'
    """
    *_, above, among, last = ("", "", "", *Path(name).parts)
    cached = above.startswith("models--") and among == "snapshots"
    return above.split("--")[-1] if cached else last


def encoder_style(name: str) -> dict[str, str]:
    """The prefixes and pooling of an encoder, from its `model_name`.

    Returns {"query": prefix, "passage": prefix, "pooling": "mean" | "cls"}. With "e5" as a word of the name:
    "query: " / "passage: ", mean. With "bge": an instruction before queries, CLS. Any other: no prefix, mean.
    These are Search-R1's rules. `1_Pooling/config.json` in a local folder overrides the pooling; ValueError
    if it names a pooling other than mean and CLS.
    """
    words = re.split(r"[^a-z0-9]+", model_name(name).lower())
    style = {"query": "", "passage": "", "pooling": "mean"}
    if "e5" in words:
        style |= {"query": "query: ", "passage": "passage: "}
    elif "bge" in words:
        style |= {"query": "Represent this sentence for searching relevant passages: ", "pooling": "cls"}
    pooling_file = Path(name) / "1_Pooling" / "config.json"
    if pooling_file.is_file():
        try:
            options = json.loads(pooling_file.read_text())
            modes = [
                key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
                for key, on in options.items()
                if on is True and key.startswith("pooling_mode_")
            ]
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{pooling_file} is damaged ({error}): fetch the encoder again") from None
        # sentence-transformers >= 6 writes a single name.
        mode = options.get("pooling_mode") or "+".join(modes)
        if mode not in ("mean", "cls"):
            raise ValueError(
                f"{pooling_file} asks for {mode!r} pooling: use an encoder with mean or cls pooling"
            )
        style["pooling"] = mode
    return style


def cut_batches(lengths: list[int], most: int, pass_tokens: int) -> list[tuple[int, int]]:
    """Cuts ascending `lengths` into batches [start, end) of at most `most` texts, at the lowest cost.

    The cost of a batch is its tokens with padding, plus `pass_tokens`.

    >>> cut_batches([5, 5, 6, 40], 16, 8)
    [(0, 3), (3, 4)]
    """
    costs, starts = np.zeros(len(lengths) + 1, np.int64), [0] * (len(lengths) + 1)
    for end, longest in enumerate(lengths, start=1):
        first = max(0, end - most)
        of_start = costs[first:end] + longest * np.arange(end - first, 0, -1)
        starts[end] = first + int(of_start.argmin())
        costs[end] = of_start.min() + pass_tokens
    batches, end = [], len(lengths)
    while end:
        batches.append((starts[end], end))
        end = starts[end]
    return batches[::-1]


def encoder_device(device: str | None) -> torch.device:
    """The device with its index.

    Without one, "cuda" would mean GPU 0 in every thread that has set no device, such as those of a pool.
    """
    if (device or "cuda") == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device or "cpu")


def most_tokens(model) -> float:
    """The longest text that a model has positions for, in tokens; inf if its config does not say."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if not positions or positions < 0:
        return float("inf")
    # RoBERTa's kind counts from the row after its padding.
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return positions if padding is None else positions - padding - 1


class Encoder:
    """A text encoder from a hub name or folder: fp16 on a GPU, fp32 on the CPU; thread-safe.

    Each process uses its current GPU; under `accelerate launch` every process has its own. A max_tokens of
    None means 256, or what the model can read if that is less; more than that is a ValueError.
    """

    def __init__(self, name: str, max_tokens: int | None = None, device: str | None = None):
        self.name, self.style = name, encoder_style(name)
        self.device = encoder_device(device)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name)
            shape = AutoConfig.from_pretrained(name)
            # The file may name an attention kernel on the hub here, which would download and run code.
            shape._attn_implementation = None
            self.model = AutoModel.from_pretrained(
                name, config=shape, dtype=torch.float16 if self.device.type == "cuda" else torch.float32
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"cannot load the encoder {name!r}: give retriever.encoder a hub name or a folder with "
                f"model and tokenizer ({error})"
            ) from None
        most = most_tokens(self.model)
        self.max_tokens = int(min(256, most)) if max_tokens is None else max_tokens
        if self.max_tokens > most:
            raise ValueError(
                f"max_tokens = {max_tokens} is more than the {most} tokens that the encoder {name!r} has "
                f"positions for: build with --max-tokens {most} or less"
            )
        self.model.to(self.device).eval()
        self.dim = self.model.config.hidden_size
        # A fast tokenizer raises "Already borrowed" if two threads use it at once.
        self.lock = threading.Lock()

    @torch.inference_mode()
    def encode(self, texts: list[str], kind: str, batch_size: int = 256, progress=None) -> torch.Tensor:
        """Unit vectors (Q, D), float32 on the CPU, in the order of `texts`.

        kind: "query" or "passage". Texts are truncated at `max_tokens`. Texts of similar length share a batch
        of at most `batch_size`, so that there is little padding. The same texts and `batch_size` give the
        same batches, hence the same bits. `progress(n)` is called after every n texts.
        """
        most = CHARACTERS_A_TOKEN * self.max_tokens
        with self.lock:
            tokens = (
                self.tokenizer(
                    [self.style[kind] + text[:most] for text in texts],
                    truncation=True,
                    max_length=self.max_tokens,
                )
                if texts
                else {}
            )
        order = sorted(range(len(texts)), key=lambda row: (len(tokens["input_ids"][row]), row))
        vectors_QD = torch.empty(len(texts), self.dim)
        for start, end in cut_batches(
            [len(tokens["input_ids"][row]) for row in order], batch_size, PASS_TOKENS[self.device.type]
        ):
            rows = order[start:end]
            with self.lock:
                padded = self.tokenizer.pad(
                    {name: [ids[row] for row in rows] for name, ids in tokens.items()}, return_tensors="pt"
                ).to(self.device)
            # A rollout that searches in its own thread may run under autocast.
            with torch.autocast(self.device.type, enabled=False):
                hidden_QTD = self.model(**padded).last_hidden_state.float()
            if self.style["pooling"] == "cls":
                pooled_QD = hidden_QTD[:, 0]
            else:
                mask_QT1 = padded["attention_mask"].unsqueeze(-1)
                pooled_QD = (hidden_QTD * mask_QT1).sum(1) / mask_QT1.sum(1)
            vectors_QD[rows] = torch.nn.functional.normalize(pooled_QD, dim=-1).cpu()
            if progress is not None:
                progress(len(rows))
        return vectors_QD
