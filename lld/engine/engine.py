"""Sampling: slots, a KV cache that lives as long as an episode, continuous batching, stop strings.

The engine works on tokens and knows nothing of search. Its contract:

    engine.add(group, prompt_ids, seeds, max_new_tokens)  # one sample per seed; the prompt is read once
    engine.step() -> list[Stopped]                        # one token for every running slot
    engine.extend(key, token_ids, max_new_tokens)         # append an observation; only its tokens are read
    engine.release(key)                                   # free the slot; a waiting sample takes it

`group` names a prompt, a key is (group, number of the sample).

A step is one forward pass of packed tokens: the last token of every running slot, and prompts and
observations not yet read. Rows of the cache are kept in the order running, ready (something to read), parked
(stopped, nothing to do yet), so that a pass works on one contiguous block of rows and no keys are copied to
make a batch.
"""

from array import array
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from lld.engine.decoder import Decoder, SlotCache, head_logits
from lld.engine.sampling import sample_tokens
from lld.engine.spans import SingleSpans, Spans

PASS_TOKENS = 16384  # maximum tokens of a pass; a single longer row is a pass of its own


# States of a sequence, in the order of their rows in the cache.
RUNNING = 0  # one unread token
READY = 1  # several unread tokens
PARKED = 2  # its turn has ended, no unread observation yet
FREE = 3  # released, its row may be reused


@dataclass
class Stopped:
    """A turn that ended: its token ids, their log-probabilities, and why it ended.

    With `keep_ids` also the ids that each token was drawn from, token by token, and how many they are.
    """

    key: tuple
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str = ""  # "stop_string", "eos" or "length"; "" before it has ended
    kept_ids: array = field(default_factory=lambda: array("i"))
    kept_counts: list[int] = field(default_factory=list)


@dataclass
class Sequence:
    key: tuple
    generator: torch.Generator
    unread: list[int]  # tokens not yet fed to the model, among them the last sampled one
    state: int = RUNNING
    length: int = 0  # tokens whose keys and values are in the cache
    turn: Stopped | None = None  # what this turn has sampled so far
    uniforms: list[int] = field(default_factory=list)  # to draw the turn's tokens with: bits of float64


@dataclass
class Prompt:
    """A group's prompt, and the result of its first sample's prefill, kept for the others."""

    token_ids: list[int]
    keys_values: torch.Tensor | None = None  # (layers, 2, T, H, D)
    logits_V: torch.Tensor | None = None  # after the last token


def _state_to_read(sequence: Sequence) -> int:
    return READY if len(sequence.unread) > 1 else RUNNING


def _check_model(config) -> None:
    """Raises ValueError for a model with operations that engine and policy do not apply."""
    for name in ("logits_scaling", "logit_scale", "final_logit_softcapping", "use_sliding_window"):
        value = getattr(config, name, None)
        if value not in (None, False, 1, 1.0):
            raise ValueError(
                f"{config.model_type} has {name} = {value}, which engine and policy do not apply: "
                "use a plain Llama/Qwen kind of decoder"
            )
    other = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if other:
        raise ValueError(
            f"{config.model_type} has {', '.join(sorted(other))} layers: "
            "the engine's cache holds full attention only"
        )


def _may_end(text: str, stop_strings: tuple[str, ...]) -> bool:
    """Whether a stop string can end within `text`, whatever precedes it."""
    for stop in stop_strings:
        for end, char in enumerate(text, start=1):
            if char == stop[-1] and (stop.endswith(text[:end]) or text[:end].endswith(stop)):
                return True
    return False


def tokens_that_may_stop(tokenizer, stop_strings: tuple[str, ...]) -> frozenset[int]:
    """The ids of all tokens in which a stop string can end; text is compared only after these.

    Such a token contains the stop string's last character. An added token stands for its own text alone, so
    only those are included in whose text a stop string can end.
    """
    last = tuple(stop[-1] for stop in stop_strings)
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
    found = []
    for i, token in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
        if (
            token
            and any(char in token for char in last)
            and (i not in added or _may_end(added[i], stop_strings))
        ):
            found.append(i)
    return frozenset(found)


class Engine:
    def __init__(
        self,
        lm,
        tokenizer,
        *,
        num_slots: int,
        temperature: float,
        top_p: float,
        stop_strings: tuple[str, ...],
        eos_ids: tuple[int, ...],
        cuda_graphs: bool = False,
        max_tokens: int | None = None,
        keep_ids: bool = False,
        min_p: float = 0.0,
        top_k: int = 0,
    ):
        """Samples from `lm`, a transformers decoder of the Llama/Qwen2/Qwen3 kind; copies no weights.

        max_tokens: the maximum length of a sequence, if known; on a GPU the cache has that size from the
        start. With `keep_ids`, turns list the ids that top_p, min_p and top_k left for each token. With
        `cuda_graphs`, on a GPU and without casts under autocast, steps without prompts and observations
        replay CUDA graphs. The weights must then stay at their addresses while the engine exists.
        """
        _check_model(lm.config)
        self.lm = lm
        self.tokenizer = tokenizer
        self.num_slots = num_slots
        self.sampling = (temperature, top_p, keep_ids, min_p, top_k)
        self.stop_strings = stop_strings
        self.eos_ids = frozenset(eos_ids)
        self.may_stop = tokens_that_may_stop(tokenizer, stop_strings)
        self.tail = 2 * max(map(len, stop_strings), default=0) + 8  # tokens decoded to look for a stop string
        self.device = lm.device
        cache_dtype = lm.dtype
        if torch.is_autocast_enabled(self.device.type):
            cache_dtype = torch.get_autocast_dtype(self.device.type)
        self.castless = lm.dtype == cache_dtype
        self.decoder = Decoder(lm)
        self.cache = SlotCache(lm.config, num_slots, self.device, cache_dtype, max_tokens)
        self.graphs = None
        if cuda_graphs and self.device.type == "cuda" and self.decoder.direct and self.castless:
            from lld.engine.graphs import DecodeGraphs  # only a GPU has them

            self.graphs = DecodeGraphs(lm, self.decoder, self.cache)
        self.rows: list[Sequence] = []  # by cache row
        self.by_key: dict[tuple, Sequence] = {}
        self.prompts: dict[object, Prompt] = {}  # of groups with queued samples
        self.waiting: list[tuple] = []  # (group, sample, seed, max_new_tokens) without a slot
        self.num_fed = 0  # tokens pushed through the model, padding excluded

    @property
    def num_active(self) -> int:
        """Slots with something to read or to sample."""
        return sum(sequence.state <= READY for sequence in self.rows)  # RUNNING or READY

    @property
    def num_free(self) -> int:
        return self.num_slots - sum(sequence.state != FREE for sequence in self.rows)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return self.num_active > 0 or (bool(self.waiting) and self.num_free > 0)

    def add(self, group, prompt_ids: list[int], seeds: list[int], max_new_tokens: int) -> None:
        """Queues one sample of `prompt_ids` per seed; their keys are (group, 0), (group, 1), ..."""
        assert prompt_ids and max_new_tokens > 0
        self.prompts[group] = Prompt(list(prompt_ids))
        self.waiting += [(group, sample, seed, max_new_tokens) for sample, seed in enumerate(seeds)]

    def extend(self, key: tuple, token_ids: list[int], max_new_tokens: int) -> None:
        """Appends tokens to a stopped sequence and begins its next turn."""
        sequence = self.by_key[key]
        assert sequence.state == PARKED and max_new_tokens > 0
        sequence.unread += token_ids
        sequence.state = _state_to_read(sequence)
        self._begin_turn(sequence, max_new_tokens)

    def release(self, key: tuple) -> None:
        """Ends a stopped sequence and frees its slot."""
        sequence = self.by_key.pop(key)
        assert sequence.state == PARKED
        sequence.state = FREE

    def step(self) -> list[Stopped]:
        """One forward pass; samples one token for every running slot."""
        assert not self.lm.training, "in training mode gradient checkpointing drops the cache"
        # Where everything has the same dtype already, autocast is pure overhead.
        leaves_autocast = self.castless and torch.is_autocast_enabled(self.device.type)
        autocast = torch.autocast(self.device.type, enabled=False) if leaves_autocast else nullcontext()
        # Inference mode has less overhead per operation.
        no_grad = torch.inference_mode() if self.decoder.direct else torch.no_grad()
        with autocast, no_grad:
            return self._step()

    def _step(self) -> list[Stopped]:
        starting = self.waiting[: self.num_free]
        self._start_readers(starting)
        self._arrange()
        reading = self._next_pass()
        logits_SV, uniforms_S = self._read(reading) if reading else (None, None)
        self._keep_prompts(reading, logits_SV)
        copied, copied_logits = self._start_copies(starting)
        if copied:
            logits_SV = torch.cat(([logits_SV] if reading else []) + copied_logits)
            copied_S = self._to_device([s.uniforms[0] for s in copied]).view(torch.float64)
            uniforms_S = torch.cat([uniforms_S, copied_S]) if reading else copied_S
        return self._sample(reading + copied, logits_SV, uniforms_S) if reading or copied else []

    def _begin_turn(self, sequence: Sequence, max_new_tokens: int) -> None:
        sequence.turn = Stopped(sequence.key)
        uniforms = torch.rand(max_new_tokens, generator=sequence.generator, dtype=torch.float64)
        sequence.uniforms = uniforms.view(torch.int64).tolist()

    def _start(self, waiting: tuple) -> Sequence:
        group, sample, seed, max_new_tokens = waiting
        generator = torch.Generator().manual_seed(seed)
        sequence = Sequence((group, sample), generator, list(self.prompts[group].token_ids))
        sequence.state = _state_to_read(sequence)
        self._begin_turn(sequence, max_new_tokens)
        self.waiting.remove(waiting)
        self.by_key[sequence.key] = sequence
        self.rows.append(sequence)
        return sequence

    def _start_readers(self, starting: list[tuple]) -> None:
        """Starts the first sample of every group whose prompt has neither been read nor is about to be."""
        known = {sequence.key[0] for sequence in self.rows if sequence.state <= READY and not sequence.length}
        for waiting in list(starting):
            group = waiting[0]
            if self.prompts[group].keys_values is None and group not in known:
                known.add(group)
                starting.remove(waiting)
                self._start(waiting)

    def _keep_prompts(self, reading: list[Sequence], logits_SV: torch.Tensor) -> None:
        """Keeps keys and values of prompts just read that queued samples still need."""
        missing = {group for group, *_ in self.waiting if self.prompts[group].keys_values is None}
        for row, sequence in enumerate(reading):
            group = sequence.key[0]
            if group in missing and sequence.length == len(self.prompts[group].token_ids):
                prompt = self.prompts[group]
                prompt.keys_values = self.cache.keys_values[:, :, row, : sequence.length].clone()
                prompt.logits_V = logits_SV[row].clone()

    def _start_copies(self, starting: list[tuple]) -> tuple[list[Sequence], list[torch.Tensor]]:
        """Starts samples whose prompt has been read, with a copy of its keys and values.

        Returns them and the logits (1, V) after the prompt of each.
        """
        ready = [waiting for waiting in starting if self.prompts[waiting[0]].keys_values is not None]
        groups = [group for group, *_ in ready]
        first = len(self.rows)
        copied = [self._start(waiting) for waiting in ready]
        for group in dict.fromkeys(groups):
            rows = [first + i for i, other in enumerate(groups) if other == group]
            assert rows == list(range(rows[0], rows[-1] + 1)), "samples of a prompt wait one after the other"
            kept = self.prompts[group].keys_values
            self.cache.keys_values[:, :, rows[0] : rows[-1] + 1, : kept.shape[2]] = kept[:, :, None]
        for sequence in copied:
            sequence.state = RUNNING
            sequence.length = len(sequence.unread)
            sequence.unread = []
        logits = [self.prompts[group].logits_V[None] for group in groups]
        still_waiting = {group for group, *_ in self.waiting}
        self.prompts = {group: prompt for group, prompt in self.prompts.items() if group in still_waiting}
        return copied, logits

    def _arrange(self) -> None:
        """Reorders rows to running, ready, parked, free, and drops the free ones.

        Only rows in another state's region move.
        """
        states = [sequence.state for sequence in self.rows]
        wanted = sorted(states)
        if states != wanted:
            misplaced = [row for row, state in enumerate(states) if state != wanted[row]]
            holes = {state: [] for state in (RUNNING, READY, PARKED, FREE)}
            for row in misplaced:
                holes[wanted[row]].append(row)
            moves = [(row, holes[states[row]].pop()) for row in misplaced]
            rows = list(self.rows)
            copies = []
            for source, target in moves:
                sequence = self.rows[source]
                rows[target] = sequence
                if sequence.length and states[source] != FREE:
                    copies.append((source, target, sequence.length))
            self.cache.move_rows(copies)
            self.rows = rows
        while self.rows and self.rows[-1].state == FREE:
            self.rows.pop()

    def _next_pass(self) -> list[Sequence]:
        """Rows 0, 1, ...: running ones, then ready ones, up to PASS_TOKENS tokens."""
        chosen, num_tokens = [], 0
        for sequence in self.rows:
            num_tokens += len(sequence.unread)
            if sequence.state > READY or (chosen and num_tokens > PASS_TOKENS):
                break
            chosen.append(sequence)
        return chosen

    def _read(self, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """Feeds the unread tokens of `sequences`, which are cache rows 0, 1, ...

        Returns the logits (R, V) after each, and the uniform numbers (R,) to draw with. All inputs of the
        step are sent to the device in one asynchronous copy.
        """
        counts = [len(sequence.unread) for sequence in sequences]
        replays = self.graphs is not None and max(counts) == 1
        if replays:
            tokens, ends = self._fill_up(len(sequences))
        else:
            tokens = [token for sequence in sequences for token in sequence.unread]
            ends = [sequence.length + count for sequence, count in zip(sequences, counts, strict=True)]
        self.cache.reserve(max(ends))
        bits = [sequence.uniforms[len(sequence.turn.token_ids)] for sequence in sequences]
        sent = self._to_device([*tokens, *ends, *counts, *bits])
        tokens_N, ends_A, counts_R, bits_R = sent.split([len(tokens), len(ends), len(counts), len(bits)])
        if replays:
            logits_RV = self.graphs(tokens_N, ends_A, max(ends[: len(sequences)]), len(sequences))
        else:
            dtype = self.cache.keys_values.dtype
            if max(counts) == 1:
                spans = SingleSpans(ends_A, max(ends), dtype)
            else:
                spans = Spans(ends, counts, ends_A, counts_R, dtype)
            hidden_RC = self.decoder(tokens_N, spans, self.cache)
            logits_RV = head_logits(hidden_RC, self.lm.get_output_embeddings())
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.length += count
            sequence.state = RUNNING
            sequence.unread = []
        self.num_fed += sum(counts)
        return logits_RV, bits_R.view(torch.float64)

    def _fill_up(self, num_rows: int) -> tuple[list[int], list[int]]:
        """Tokens and ends of a pass with one token a row, padded to a CUDA graph's fixed number of rows.

        The padding rows are those that come next in the cache (see lld/engine/graphs.py).
        """
        from lld.engine.graphs import bucket

        filled = bucket(num_rows, self.num_slots)
        rows = self.rows[:filled]
        missing = filled - len(rows)
        tokens = [row.unread[0] if row.unread else 0 for row in rows] + [0] * missing
        return tokens, [row.length + 1 for row in rows] + [1] * missing

    def _to_device(self, numbers: list[int]) -> torch.Tensor:
        """Copies from pinned memory, without blocking on the kernels queued before the copy."""
        numbers_N = torch.tensor(numbers)
        if self.device.type != "cuda":
            return numbers_N
        return numbers_N.pin_memory().to(self.device, non_blocking=True)

    def _sample(
        self, sequences: list[Sequence], logits_SV: torch.Tensor, uniforms_S: torch.Tensor
    ) -> list[Stopped]:
        stopped = []
        drawn = sample_tokens(logits_SV, uniforms_S, *self.sampling)
        for sequence, (token, logprob, *kept) in zip(sequences, drawn, strict=True):
            turn = sequence.turn
            turn.token_ids.append(token)
            turn.logprobs.append(logprob)
            for ids in kept:  # one with `keep_ids`, else none
                turn.kept_ids.frombytes(ids.numpy().tobytes())
                turn.kept_counts.append(len(ids))
            sequence.unread = [token]
            if reason := self._stop_reason(sequence, token):
                sequence.state, turn.reason = PARKED, reason
                stopped.append(turn)
        return stopped

    def _stop_reason(self, sequence: Sequence, token: int) -> str | None:
        if token in self.eos_ids:
            return "eos"
        if token in self.may_stop:
            text = self.tokenizer.decode(
                sequence.turn.token_ids[-self.tail :],
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
            if any(stop in text for stop in self.stop_strings):
                return "stop_string"
        return "length" if len(sequence.turn.token_ids) == len(sequence.uniforms) else None
