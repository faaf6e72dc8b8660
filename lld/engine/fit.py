"""Whether a model fits its tokenizer, the rollout's lengths, and the passes of trainer and engine."""

from collections.abc import Sequence

import torch

from lld.engine.decoder import Decoder, SlotCache
from lld.engine.spans import SingleSpans, Spans
from lld.model import attention
from lld.model.joined import KINDS

LENGTHS = (14, 9)  # tokens of the rows that are tried
ENDS = [-7, -5, -4, -3, -2, -1]  # the tokens of a row after which the engine's passes end


def check_fit(lm, tokenizer, max_episode_tokens: int) -> None:
    """Raises ValueError if the model has fewer tokens than the tokenizer, or too short a context.

    Also beyond a sliding window of all layers (Mistral, Phi-3), which engine and policy do not apply, and
    beyond the length at which longrope's angles change, as they would for all rows that share a pass; if the
    engine cannot shape its cache; if experts are drawn at random; and if a model that is not of `KINDS` fails
    `check_passes`.
    """
    vocabulary = lm.get_input_embeddings().num_embeddings
    if len(tokenizer) > vocabulary:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens but the model embeds {vocabulary}: they are not of "
            "the same model"
        )
    config = lm.config
    rope = getattr(config, "rope_parameters", None) or {}
    same = rope.get("rope_type") == "longrope" and rope.get("original_max_position_embeddings")
    slides = not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None)
    for limit, what in (
        (getattr(config, "max_position_embeddings", None), "the model's context of"),
        (same, "the length at which the model's rotary angles change (longrope),"),
        (slides, "the model's sliding window, which is not applied here, of"),
    ):
        if limit and max_episode_tokens > limit:
            raise ValueError(f"rollout.max_episode_tokens = {max_episode_tokens} exceeds {what} {limit}")
    if getattr(config, "num_key_value_heads", None) is None:
        raise ValueError(
            f"{config.model_type}'s config.json has no num_key_value_heads, which gives the engine's cache "
            "its shape: use a plain Llama/Qwen kind of decoder"
        )
    if config.model_type == "phimoe":
        raise ValueError(
            "phimoe draws its experts at random in training: use another mixture, such as Qwen3's"
        )
    if config.model_type not in KINDS:
        check_passes(lm)


@torch.no_grad()
def check_passes(lm) -> None:
    """Tries the trainer's pass over packed rows, and the engine's over rows whose past is in its cache.

    Raises ValueError if they are not what transformers' eager attention makes of each row alone. So with
    models that do their own attention (nemotron, stablelm), whose rows would see each other, and with those
    that do more with the cache than to store keys and values (diffllama).
    """
    rows = [torch.arange(length, device=lm.device) % lm.config.vocab_size for length in LENGTHS]
    training, read = lm.training, "packed rows"
    lm.eval()
    try:
        lm.set_attn_implementation("eager")
        alone = [lm.base_model(row[None], use_cache=False).last_hidden_state[0] for row in rows]
        lm.set_attn_implementation(attention.NAME)
        gap = _gap(_packed(lm, rows), alone)
        if gap < 0.1:
            read = "rows in a cache"
            gap = _gap(_cached(lm, rows), [states_NC[ENDS] for states_NC in alone])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a forward pass makes of arguments that it does not know
        raise _unfit(lm, read, f"{type(error).__name__}: {error}") from None
    finally:
        lm.set_attn_implementation(attention.NAME)
        lm.train(training)
    if not gap < 0.1:
        raise _unfit(lm, read, f"its last hidden states differ by {gap:.0%}")


def _packed(lm, rows: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Each row's last hidden states (N, C) from one pass over all rows, as the trainer computes them."""
    positions_N = torch.cat([torch.arange(len(row), device=lm.device) for row in rows])
    lengths = attention.row_lengths(torch.tensor(LENGTHS, device=lm.device))
    inputs = {"position_ids": positions_N[None], "row_lengths": lengths, "use_cache": False}
    return lm.base_model(torch.cat(rows)[None], **inputs).last_hidden_state[0].split(LENGTHS)


def _cached(lm, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each row's last hidden states at `ENDS`: the engine reads the rows up to there, one after the other."""
    decoder, cache = Decoder(lm), SlotCache(lm.config, len(rows), lm.device, lm.dtype)
    states, begins = [], [0] * len(rows)
    for end in ENDS:
        ends = [len(row) + end + 1 for row in rows]
        parts = [row[begin:stop] for row, begin, stop in zip(rows, begins, ends, strict=True)]
        counts = [len(part) for part in parts]
        ends_R, counts_R = torch.tensor([ends, counts], device=lm.device)
        if max(counts) == 1:
            spans = SingleSpans(ends_R, max(ends), lm.dtype)
        else:
            spans = Spans(ends, counts, ends_R, counts_R, lm.dtype)
        states.append(decoder(torch.cat(parts), spans, cache))
        begins = ends
    return list(torch.stack(states, 1))


def _gap(states: Sequence[torch.Tensor], alone: list[torch.Tensor]) -> float:
    """The largest of the rows' relative errors; a row's is the median of its tokens.

    In half precision single tokens may be routed to other experts.
    """
    gaps = [(a - b).norm(dim=1) / b.norm(dim=1).clamp(min=1e-6) for a, b in zip(states, alone, strict=True)]
    return max(float(gap.median()) for gap in gaps)


def _unfit(lm, read: str, why: str) -> ValueError:
    return ValueError(
        f"{lm.config.model_type} does not compute {read} as it does each row alone ({why}): use a decoder "
        "whose attention transformers can replace, such as Llama, Qwen or Mistral"
    )
