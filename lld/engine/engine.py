"""Sampling: slots, a KV cache that lives as long as an episode, continuous batching, stop strings.

The engine knows tokens and has never heard of search. Its contract:

    engine.add(key, prompt_ids, seeds, max_new_tokens)      # one sample a seed; the prompt is prefilled once
      for all of them
    engine.step() -> list[Stopped]                          # one token for every running slot
    engine.extend((key, sample), token_ids, max_new_tokens) # append an observation: only the new tokens are
      prefilled
    engine.release((key, sample))                           # frees the slot; a waiting sample takes it

A step is one forward pass of packed tokens: the last token of every running slot, prompts and observations
not yet read. Rows of the cache are kept in the order running, ready (something to read), parked (stopped,
nothing to do yet), so that a pass works on one contiguous block of rows and no keys are copied to make a
batch.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from lld.engine.decoder import Decoder, SlotCache, head_logits
from lld.engine.sampling import sample_tokens
from lld.engine.spans import Spans

PASS_TOKENS = 16384  # at most this many tokens in one pass, or one row that alone has more


@dataclass
class Stopped:
    """A turn that ended: its token ids, their log-probabilities and why ("stop_string", "eos" or
    "length")."""

    key: tuple
    token_ids: list[int]
    logprobs: list[float]
    reason: str


@dataclass
class Sequence:
    key: tuple
    generator: torch.Generator
    unread: list[int]  # tokens still to be fed to the model; the last sampled one always is
    state: int = 0  # RUNNING, READY, PARKED or FREE
    length: int = 0  # tokens whose keys and values are in the cache
    token_ids: list[int] = field(default_factory=list)  # of this turn
    logprobs: list[float] = field(default_factory=list)
    uniforms: list[int] = field(
        default_factory=list
    )  # one float64 a token of this turn, as the integer of the same bits


@dataclass
class Prompt:
    """A group's prompt; once its first sample has read it, its keys and values and the logits after it, for
    the others.
    """

    token_ids: list[int]
    state: torch.Tensor | None = None
    logits_V: torch.Tensor | None = None


RUNNING, READY, PARKED, FREE = 0, 1, 2, 3  # RUNNING: one token to read


def _state_to_read(sequence: Sequence) -> int:
    return READY if len(sequence.unread) > 1 else RUNNING


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
    ):
        """Samples from `lm`, any transformers decoder of the Llama/Qwen2/Qwen3 kind, whose weights it reads
        but never keeps.

        `max_tokens`: the longest that a sequence will become, if known; on a GPU the cache has that size from
        the start. With `cuda_graphs` on a GPU, where nothing is cast under autocast, steps without prompts
        and observations replay CUDA graphs; the weights must then stay where they are as long as the engine
        lives.
        """
        scaled = [
            name
            for name in ("logits_scaling", "logit_scale", "final_logit_softcapping", "use_sliding_window")
            if getattr(lm.config, name, None) not in (None, False, 1, 1.0)
        ]
        if scaled:
            raise ValueError(
                f"{lm.config.model_type} has {scaled[0]} = {getattr(lm.config, scaled[0])}, which engine and "
                "policy do not apply: use a plain Llama/Qwen kind of decoder"
            )
        other = set(getattr(lm.config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
        if other:
            raise ValueError(
                f"{lm.config.model_type} has {', '.join(sorted(other))} layers: "
                "the engine's cache holds full attention only"
            )
        self.lm, self.tokenizer, self.num_slots = lm, tokenizer, num_slots
        self.temperature, self.top_p = temperature, top_p
        self.stop_strings, self.eos_ids = stop_strings, frozenset(eos_ids)
        self.device, cache_dtype = lm.device, lm.dtype
        if torch.is_autocast_enabled(self.device.type):
            cache_dtype = torch.get_autocast_dtype(self.device.type)
        self.decoder = Decoder(lm)
        self.cache = SlotCache(lm.config, num_slots, self.device, cache_dtype, max_tokens)
        self.castless, self.graphs = lm.dtype == cache_dtype, None
        if cuda_graphs and self.device.type == "cuda" and self.decoder.direct and self.castless:
            from lld.engine.graphs import DecodeGraphs  # only a GPU has them

            self.graphs = DecodeGraphs(lm, self.decoder, self.cache)
        self.rows: list[Sequence] = []  # by cache row
        self.by_key: dict[tuple, Sequence] = {}
        self.prompts: dict[object, Prompt] = {}  # of groups with waiting samples
        self.waiting: list[tuple] = []  # (key, sample, seed, max_new_tokens) without a slot
        last = tuple(stop[-1] for stop in stop_strings)
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        # A stop string can only end in a token that contains its last character; only there is text looked
        # at. An
        # added token is its text and nothing else, so of these only those that can be the end of a stop
        # string.
        added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        ends = lambda text: any(
            stop.endswith(text[: i + 1]) or text[: i + 1].endswith(stop)
            for stop in stop_strings
            for i, char in enumerate(text)
            if char == stop[-1]
        )
        self.may_stop = frozenset(
            i
            for i, token in enumerate(tokens)
            if token and any(char in token for char in last) and (i not in added or ends(added[i]))
        )
        self.tail = 2 * max(map(len, stop_strings), default=0) + 8
        self.num_fed = 0  # tokens pushed through the model, padding excluded

    @property
    def num_running(self) -> int:
        return sum(sequence.state <= READY for sequence in self.rows)

    @property
    def num_free(self) -> int:
        return self.num_slots - sum(sequence.state != FREE for sequence in self.rows)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return self.num_running > 0 or (bool(self.waiting) and self.num_free > 0)

    def add(self, key, prompt_ids: list[int], seeds: list[int], max_new_tokens: int) -> None:
        assert prompt_ids and max_new_tokens > 0
        self.prompts[key] = Prompt(list(prompt_ids))
        self.waiting += [(key, sample, seed, max_new_tokens) for sample, seed in enumerate(seeds)]

    def extend(self, key: tuple, token_ids: list[int], max_new_tokens: int) -> None:
        sequence = self.by_key[key]
        assert sequence.state == PARKED and max_new_tokens > 0
        sequence.unread += token_ids
        sequence.state = _state_to_read(sequence)
        self._begin_turn(sequence, max_new_tokens)

    def release(self, key: tuple) -> None:
        sequence = self.by_key.pop(key)
        assert sequence.state == PARKED
        sequence.state = FREE

    def step(self) -> list[Stopped]:
        """One token for every running slot, and the first one for slots with something to read, in one
        pass."""
        assert not self.lm.training, "in training mode gradient checkpointing drops the cache"
        autocast = (
            torch.is_autocast_enabled(self.device.type) and self.castless
        )  # off, where everything is of one type already
        with torch.autocast(self.device.type, enabled=False) if autocast else nullcontext():
            with (
                torch.inference_mode() if self.decoder.direct else torch.no_grad()
            ):  # the former does less for every operation
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
        sequence.token_ids, sequence.logprobs = [], []
        sequence.uniforms = (
            torch.rand(max_new_tokens, generator=sequence.generator, dtype=torch.float64)
            .view(torch.int64)
            .tolist()
        )

    def _start(self, waiting: tuple) -> Sequence:
        key, sample, seed, max_new_tokens = waiting
        sequence = Sequence(
            (key, sample), torch.Generator().manual_seed(seed), list(self.prompts[key].token_ids)
        )
        sequence.state = _state_to_read(sequence)
        self._begin_turn(sequence, max_new_tokens)
        self.waiting.remove(waiting)
        self.by_key[sequence.key] = sequence
        self.rows.append(sequence)
        return sequence

    def _start_readers(self, starting: list[tuple]) -> None:
        """The first sample of every group whose prompt nobody has read or is about to read."""
        known = {sequence.key[0] for sequence in self.rows if sequence.state <= READY and not sequence.length}
        for waiting in list(starting):
            key = waiting[0]
            if self.prompts[key].state is None and key not in known:
                known.add(key)
                starting.remove(waiting)
                self._start(waiting)

    def _keep_prompts(self, reading: list[Sequence], logits_SV: torch.Tensor) -> None:
        """Keys and values of prompts just read whose other samples still wait."""
        missing = {key for key, *_ in self.waiting if self.prompts[key].state is None}
        for row, sequence in enumerate(reading):
            key = sequence.key[0]
            if key in missing and sequence.length == len(self.prompts[key].token_ids):
                self.prompts[key].state, self.prompts[key].logits_V = (
                    self.cache.state[:, :, row, : sequence.length].clone(),
                    logits_SV[row].clone(),
                )

    def _start_copies(self, starting: list[tuple]) -> tuple[list[Sequence], list[torch.Tensor]]:
        """Samples whose prompt has been read: they get a copy of its keys and values, and the logits after
        it.
        """
        ready, first = (
            [waiting for waiting in starting if self.prompts[waiting[0]].state is not None],
            len(self.rows),
        )
        copied = [self._start(waiting) for waiting in ready]
        for key in dict.fromkeys(key for key, *_ in ready):
            prompt, rows = (
                self.prompts[key],
                [first + i for i, waiting in enumerate(ready) if waiting[0] == key],
            )
            assert rows == list(range(rows[0], rows[-1] + 1)), "samples of a prompt wait one after the other"
            self.cache.state[:, :, rows[0] : rows[-1] + 1, : prompt.state.shape[2]] = prompt.state[:, :, None]
        for sequence in copied:
            sequence.state, sequence.length, sequence.unread = RUNNING, len(sequence.unread), []
        logits = [self.prompts[key].logits_V[None] for key, *_ in ready]
        still_waiting = {key for key, *_ in self.waiting}
        self.prompts = {key: prompt for key, prompt in self.prompts.items() if key in still_waiting}
        return copied, logits

    def _arrange(self) -> None:
        """Reorders rows to running, ready, parked, free, moving only those that stand in another's region,
        and forgets the free.
        """
        states = [sequence.state for sequence in self.rows]
        wanted = sorted(states)
        if states != wanted:
            holes = {state: [] for state in (RUNNING, READY, PARKED, FREE)}
            for row, (state, want) in enumerate(zip(states, wanted, strict=True)):
                if state != want:
                    holes[want].append(row)
            moves = [
                (row, holes[state].pop())
                for row, (state, want) in enumerate(zip(states, wanted, strict=True))
                if state != want
            ]
            rows = list(self.rows)
            for source, target in moves:
                rows[target] = self.rows[source]
            self.cache.move_rows(
                [
                    (source, target, self.rows[source].length)
                    for source, target in moves
                    if self.rows[source].length and states[source] != FREE
                ]
            )
            self.rows = rows
        while self.rows and self.rows[-1].state == FREE:
            self.rows.pop()

    def _next_pass(self) -> list[Sequence]:
        """Rows 0, 1, …: all that run, and those that have something to read as long as the pass has room."""
        chosen, num_tokens = [], 0
        for sequence in self.rows:
            num_tokens += len(sequence.unread)
            if sequence.state > READY or (chosen and num_tokens > PASS_TOKENS):
                break
            chosen.append(sequence)
        return chosen

    def _read(self, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """Feeds the unread tokens of `sequences`, which lie in cache rows 0, 1, …; the logits (R, V) after
        each, and the numbers (R,) to draw with.

        Everything the step tells the device goes there in one copy, which the host does not wait for.
        """
        counts = [len(sequence.unread) for sequence in sequences]
        one_each = max(counts) == 1
        if replay := self.graphs is not None and one_each:
            tokens, ends = self._fill_up(len(sequences))
        else:
            tokens = [token for sequence in sequences for token in sequence.unread]
            ends = [sequence.length + count for sequence, count in zip(sequences, counts, strict=True)]
        self.cache.reserve(max(ends))
        bits = [sequence.uniforms[len(sequence.token_ids)] for sequence in sequences]
        told = self._to_device([*tokens, *ends, *counts, *bits])
        tokens_N, ends_A, counts_R, bits_R = told.split([len(tokens), len(ends), len(counts), len(bits)])
        if replay:
            logits_RV = self.graphs(tokens_N, ends_A, max(ends[: len(sequences)]), len(sequences))
        else:
            dtype = self.cache.state.dtype
            if one_each:
                spans = Spans.one_each(ends_A, max(ends), dtype)
            else:
                spans = Spans(ends, counts, ends_A, counts_R, dtype)
            hidden_RC = self.decoder(tokens_N, spans, self.cache)
            logits_RV = head_logits(hidden_RC, self.lm.get_output_embeddings())
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.length += count
            sequence.state, sequence.unread = RUNNING, []
        self.num_fed += sum(counts)
        return logits_RV, bits_R.view(torch.float64)

    def _fill_up(self, num_rows: int) -> tuple[list[int], list[int]]:
        """One token of each row and the tokens in it with that one, for a CUDA graph of fixed shape; rows
        behind fill it up (see lld/engine/graphs.py).
        """
        from lld.engine.graphs import bucket

        filled = bucket(num_rows, self.num_slots)
        rows = self.rows[:filled]
        missing = filled - len(rows)
        tokens = [row.unread[0] if row.unread else 0 for row in rows] + [0] * missing
        return tokens, [row.length + 1 for row in rows] + [1] * missing

    def _to_device(self, numbers: list[int]) -> torch.Tensor:
        """From pinned memory, so that the host does not wait until everything before the copy is done."""
        told = torch.tensor(numbers)
        return told.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else told

    def _sample(
        self, sequences: list[Sequence], logits_SV: torch.Tensor, uniforms_S: torch.Tensor
    ) -> list[Stopped]:
        stopped = []
        drawn = sample_tokens(logits_SV, uniforms_S, self.temperature, self.top_p)
        for sequence, (token, logprob) in zip(sequences, drawn, strict=True):
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.unread = [token]
            if reason := self._stop_reason(sequence, token):
                sequence.state = PARKED
                stopped.append(Stopped(sequence.key, sequence.token_ids, sequence.logprobs, reason))
        return stopped

    def _stop_reason(self, sequence: Sequence, token: int) -> str | None:
        if token in self.eos_ids:
            return "eos"
        if token in self.may_stop:
            text = self.tokenizer.decode(
                sequence.token_ids[-self.tail :],
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
            if any(stop in text for stop in self.stop_strings):
                return "stop_string"
        return "length" if len(sequence.token_ids) == len(sequence.uniforms) else None
