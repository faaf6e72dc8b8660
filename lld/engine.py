"""Sampling: slots, a KV cache that lives as long as an episode, continuous batching, stop strings.

The engine knows tokens and has never heard of search. Its contract:

    engine.add(key, prompt_ids, seeds, max_new_tokens)      # one sample a seed; the prompt is prefilled once for all of them
    engine.step() -> list[Stopped]                          # one token for every running slot
    engine.extend((key, sample), token_ids, max_new_tokens) # append an observation: only the new tokens are prefilled
    engine.release((key, sample))                           # frees the slot; a waiting sample takes it

A step is one forward pass of packed tokens: the last token of every running slot, prompts and observations not yet read.
Rows of the cache are kept in the order running, ready (something to read), parked (stopped, nothing to do yet), so that a
pass works on one contiguous block of rows and no keys are copied to make a batch.
"""

from dataclasses import dataclass, field

import torch

from lld.attention import Spans
from lld.decoder import Decoder, SlotCache, head_logits
from lld.graphs import DecodeGraphs, bucket
from lld.sampling import sample_tokens

PASS_TOKENS = 16384  # at most this many tokens in one pass, or one row that alone has more


@dataclass
class Stopped:
    """A turn that ended: its token ids, their log-probabilities and why ("stop_string", "eos" or "length")."""

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
    uniforms: list[float] = field(default_factory=list)  # one a token of this turn


@dataclass
class Prompt:
    """A group's prompt; once its first sample has read it, its keys and values and the logits after it, for the others."""

    token_ids: list[int]
    state: torch.Tensor | None = None
    logits_V: torch.Tensor | None = None


RUNNING, READY, PARKED, FREE = 0, 1, 2, 3  # RUNNING: one token to read


def _state_to_read(sequence: Sequence) -> int:
    return READY if len(sequence.unread) > 1 else RUNNING


class Engine:
    def __init__(self, lm, tokenizer, *, num_slots: int, temperature: float, top_p: float, stop_strings: tuple[str, ...], eos_ids: tuple[int, ...], cuda_graphs: bool = False):
        """Samples from `lm`, any transformers decoder of the Llama/Qwen2/Qwen3 kind, whose weights it reads but never keeps.

        With `cuda_graphs` on a GPU, where nothing is cast under autocast, steps without prompts and observations replay CUDA graphs;
        the weights must then stay where they are as long as the engine lives.
        """
        scaled = [name for name in ("logits_scaling", "logit_scale", "final_logit_softcapping", "use_sliding_window") if getattr(lm.config, name, None) not in (None, False, 1, 1.0)]
        if scaled:
            raise ValueError(f"{lm.config.model_type} has {scaled[0]} = {getattr(lm.config, scaled[0])}, which engine and policy do not apply: use a plain Llama/Qwen kind of decoder")
        other = set(getattr(lm.config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
        if other:
            raise ValueError(f"{lm.config.model_type} has {', '.join(sorted(other))} layers: the engine's cache holds full attention only")
        self.lm, self.tokenizer, self.num_slots = lm, tokenizer, num_slots
        self.temperature, self.top_p, self.stop_strings, self.eos_ids = temperature, top_p, stop_strings, frozenset(eos_ids)
        self.device, self.dtype = lm.device, lm.dtype
        cache_dtype = torch.get_autocast_dtype(self.device.type) if torch.is_autocast_enabled(self.device.type) else self.dtype
        self.decoder, self.cache = Decoder(lm), SlotCache(lm.config, num_slots, self.device, cache_dtype)
        castless = not torch.is_autocast_enabled(self.device.type) or self.dtype == cache_dtype
        self.graphs = DecodeGraphs(lm, self.decoder, self.cache) if cuda_graphs and self.device.type == "cuda" and self.decoder.direct and castless else None
        self.rows: list[Sequence] = []  # by cache row
        self.by_key: dict[tuple, Sequence] = {}
        self.prompts: dict[object, Prompt] = {}  # of groups with waiting samples
        self.waiting: list[tuple] = []  # (key, sample, seed, max_new_tokens) without a slot
        last = tuple(stop[-1] for stop in stop_strings)
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        # A stop string can only end in a token that contains its last character; only there is text looked at.
        # An added token is its text and nothing else, so of these only those that can be the end of a stop string.
        added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        ends = lambda text: any(stop.endswith(text[: i + 1]) or text[: i + 1].endswith(stop) for stop in stop_strings for i, char in enumerate(text) if char == stop[-1])
        self.may_stop = frozenset(i for i, token in enumerate(tokens) if token and any(char in token for char in last) and (i not in added or ends(added[i])))
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
        """One token for every running slot, and the first one for slots with something to read, in one pass."""
        assert not self.lm.training, "in training mode gradient checkpointing drops the cache"
        with torch.inference_mode() if self.decoder.direct else torch.no_grad():  # the former does less for every operation
            return self._step()

    def _step(self) -> list[Stopped]:
        starting = self.waiting[: self.num_free]
        self._start_readers(starting)
        self._arrange()
        reading = self._next_pass()
        logits_SV = self._read(reading) if reading else None
        self._keep_prompts(reading, logits_SV)
        copied, copied_logits = self._start_copies(starting)
        if copied:
            logits_SV = torch.cat(([logits_SV] if reading else []) + copied_logits)
        return self._sample(reading + copied, logits_SV) if reading or copied else []

    def _begin_turn(self, sequence: Sequence, max_new_tokens: int) -> None:
        sequence.token_ids, sequence.logprobs = [], []
        sequence.uniforms = torch.rand(max_new_tokens, generator=sequence.generator, dtype=torch.float64).tolist()

    def _start(self, waiting: tuple) -> Sequence:
        key, sample, seed, max_new_tokens = waiting
        sequence = Sequence((key, sample), torch.Generator().manual_seed(seed), list(self.prompts[key].token_ids))
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
                self.prompts[key].state, self.prompts[key].logits_V = self.cache.state[:, :, row, : sequence.length].clone(), logits_SV[row].clone()

    def _start_copies(self, starting: list[tuple]) -> tuple[list[Sequence], list[torch.Tensor]]:
        """Samples whose prompt has been read: they get a copy of its keys and values, and the logits after it."""
        ready, first = [waiting for waiting in starting if self.prompts[waiting[0]].state is not None], len(self.rows)
        copied = [self._start(waiting) for waiting in ready]
        for key in dict.fromkeys(key for key, *_ in ready):
            prompt, rows = self.prompts[key], [first + i for i, waiting in enumerate(ready) if waiting[0] == key]
            self.cache.state[:, :, rows, : prompt.state.shape[2]] = prompt.state[:, :, None]
        for sequence in copied:
            sequence.state, sequence.length, sequence.unread = RUNNING, len(sequence.unread), []
        logits = [self.prompts[key].logits_V[None] for key, *_ in ready]
        still_waiting = {key for key, *_ in self.waiting}
        self.prompts = {key: prompt for key, prompt in self.prompts.items() if key in still_waiting}
        return copied, logits

    def _arrange(self) -> None:
        """Reorders rows to running, ready, parked, free, moving only those that stand in another's region, and forgets the free."""
        states = [sequence.state for sequence in self.rows]
        wanted = sorted(states)
        if states != wanted:
            holes = {state: [] for state in (RUNNING, READY, PARKED, FREE)}
            for row, (state, want) in enumerate(zip(states, wanted)):
                if state != want:
                    holes[want].append(row)
            moves = [(row, holes[state].pop()) for row, (state, want) in enumerate(zip(states, wanted)) if state != want]
            rows = list(self.rows)
            for source, target in moves:
                rows[target] = self.rows[source]
            self.cache.move_rows([(source, target, self.rows[source].length) for source, target in moves if self.rows[source].length and states[source] != FREE])
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

    def _read(self, sequences: list[Sequence]) -> torch.Tensor:
        """Feeds the unread tokens of `sequences`, which lie in cache rows 0, 1, …; returns the logits (R, V) after each."""
        counts = [len(sequence.unread) for sequence in sequences]
        if self.graphs and max(counts) == 1:
            logits_RV = self._replay(len(sequences))
        else:
            logits_RV = self._forward(sequences, counts)
        for sequence, count in zip(sequences, counts):
            sequence.length += count
            sequence.state, sequence.unread = RUNNING, []
        self.num_fed += sum(counts)
        return logits_RV

    def _replay(self, num_rows: int) -> torch.Tensor:
        """The same for rows with one token each, by a CUDA graph of their shape; rows behind them fill it up (see lld/graphs.py)."""
        filled = bucket(num_rows, self.num_slots)
        rows = self.rows[:filled]
        missing = filled - len(rows)
        ends = [row.length + 1 for row in rows] + [1] * missing
        self.cache.reserve(max(ends))
        return self.graphs([row.unread[0] if row.unread else 0 for row in rows] + [0] * missing, ends, num_rows)

    def _forward(self, sequences: list[Sequence], counts: list[int]) -> torch.Tensor:
        spans = Spans([sequence.length for sequence in sequences], counts, self.device, self.cache.state.dtype)
        self.cache.reserve(spans.length)
        hidden_RC = self.decoder(torch.tensor([token for s in sequences for token in s.unread], device=self.device), spans, self.cache)
        return head_logits(hidden_RC, self.lm.get_output_embeddings())

    def _sample(self, sequences: list[Sequence], logits_SV: torch.Tensor) -> list[Stopped]:
        uniforms_S = torch.tensor([s.uniforms[len(s.token_ids)] for s in sequences], dtype=torch.float64, device=self.device)
        token_S, logprob_S = sample_tokens(logits_SV, uniforms_S, self.temperature, self.top_p)
        stopped = []
        drawn_S2 = torch.stack([token_S.double(), logprob_S.double()], 1).tolist()  # the step's one wait for the device; ids are exact in float64
        for sequence, (token, logprob) in zip(sequences, drawn_S2):
            token = int(token)
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
            text = self.tokenizer.decode(sequence.token_ids[-self.tail :], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if any(stop in text for stop in self.stop_strings):
                return "stop_string"
        return "length" if len(sequence.token_ids) == len(sequence.uniforms) else None
