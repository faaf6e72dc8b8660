"""The tiny world's policy: a word-level tokenizer, a small Llama and its supervised warm start."""

import math
import random
import time
from collections.abc import Sequence

import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers
from torch.nn import functional as F
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lld import config
from lld.tinyworld.templates import split_words, template_words, word_splitter
from lld.tinyworld.world import Entity

BATCH_SIZE = 32
TIMED = 20  # steps of the warm start before it says how long the others take

TAGS = tuple(
    f"<{slash}{name}>" for name in ("think", "search", "answer", "information") for slash in ("", "/")
)
PAD, EOS, UNKNOWN, TURN = "<|endoftext|>", "<|im_end|>", "<unk>", "<|im_start|>"
# Keeps only the question of Search-R1's long prompt: the policy has learned the protocol, and 120 words would
# be most of a tiny episode.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ "
    "message['content'].split('Question: ')[-1].strip() }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(world: list[Entity], topk: int, words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A lower-casing word-level tokenizer over the world's words and the free `words` of thoughts.

    Tags are single tokens, and decoding never drops them. `topk`: passages of an observation.
    """
    names = sorted(set().union(*(split_words(entity.title) for entity in world)) - set(template_words()))
    frames = ['")'] + [f'doc {rank}(title: "' for rank in range(1, max(topk, 10) + 1)]
    vocabulary = dict.fromkeys([PAD, EOS, UNKNOWN, TURN, *TAGS, *frames, *template_words(), *names, *words])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = word_splitter()
    tokenizer.add_special_tokens(
        [AddedToken(word, normalized=False, special=True) for word in (PAD, EOS, UNKNOWN, TURN)]
    )
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def policy_shape(cfg: config.TinyWorld, tokenizer) -> LlamaConfig:
    """A Llama of `num_layers` and `hidden_size`; float32, tied embeddings, 4 heads on 2 key-value heads.

    Not Qwen2: transformers 5 silently opens any tokenizer beside a "qwen2" config as Qwen's byte-level one.
    """
    if cfg.hidden_size % 8:
        raise ValueError(
            f"tinyworld.hidden_size = {cfg.hidden_size}: must be a multiple of 8 (four heads of even width)"
        )
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=cfg.hidden_size,
        intermediate_size=2 * cfg.hidden_size,
        num_hidden_layers=cfg.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        dtype="float32",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def make_policy(cfg: config.TinyWorld, tokenizer) -> LlamaForCausalLM:
    """A randomly initialised policy of `policy_shape`."""
    shape = policy_shape(cfg, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)
        return LlamaForCausalLM(shape)


def _batches(lengths: list[int], num_steps: int, rng: random.Random):
    """Indices of `num_steps` batches, epoch after epoch.

    Rows of similar length share a batch, which keeps padding small.
    """
    pool = 50 * BATCH_SIZE
    num_done = 0
    while True:
        order = rng.sample(range(len(lengths)), len(lengths))
        batches = []
        for start in range(0, len(order), pool):
            near = sorted(order[start : start + pool], key=lengths.__getitem__)
            batches.extend(near[i : i + BATCH_SIZE] for i in range(0, len(near), BATCH_SIZE))
        rng.shuffle(batches)
        for batch in batches:
            if num_done == num_steps:
                return
            num_done += 1
            yield batch


def _learning_rate_factor(step: int, num_steps: int) -> float:
    """Linear warm-up over a tenth of the steps, 50 at most, then a cosine to 5 %."""
    num_warmup = min(50, max(1, num_steps // 10))
    cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return min(1.0, (step + 1) / num_warmup) * cosine


def warm_start(
    policy: LlamaForCausalLM, demonstrations: list[tuple[list[int], list[bool]]], num_steps: int, seed: int
) -> list[float]:
    """Supervised training in place; returns each step's loss in nats per weighted token.

    The policy's own tokens have weight 1, all others 0.3: predicting passages teaches attention heads to copy
    names. AdamW at 3e-3.
    """
    lengths = [len(ids) for ids, _ in demonstrations]
    longest = max(lengths)
    token_ids_NT = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in demonstrations])
    weights_NT = torch.tensor(
        [[1.0 if own else 0.3 for own in owns] + [0.0] * (longest - len(owns)) for _, owns in demonstrations]
    )
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _learning_rate_factor(step, num_steps)
    )
    batches = _batches(lengths, num_steps, random.Random(f"batches {seed}"))
    losses = []
    policy.train()
    began = time.monotonic()
    for rows in tqdm(batches, total=num_steps, desc="warm start", disable=None):
        if len(losses) == TIMED and num_steps > 2 * TIMED:
            left_s = (time.monotonic() - began) / TIMED * (num_steps - TIMED)
            tqdm.write(f"warm start: about {math.ceil(left_s / 60)} min, then the run begins")
        width = max(lengths[row] for row in rows)
        token_ids_BT = token_ids_NT[rows, :width]
        weights_BT = weights_NT[rows, :width]
        # No attention mask: causal attention never reaches the padding on the right.
        logits_BTV = policy(input_ids=token_ids_BT, use_cache=False).logits
        # Flat, which takes half the time of (B, V, T) on a CPU.
        logits_NV, weights_N = logits_BTV[:, :-1].flatten(0, 1), weights_BT[:, 1:].flatten()
        loss_N = F.cross_entropy(logits_NV, token_ids_BT[:, 1:].flatten(), reduction="none")
        loss = (loss_N * weights_N).sum() / weights_N.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    policy.eval()
    return losses
