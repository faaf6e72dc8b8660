"""Sampling: slots, a KV cache that lives as long as an episode, continuous batching, stop strings.

The engine knows tokens and has never heard of search. Its contract:

    engine.add(key, prompt_ids, seeds, max_new_tokens)      # one sample a seed; the prompt is prefilled once for all of them
    engine.step() -> list[Stopped]                          # one token for every running slot
    engine.extend((key, sample), token_ids, max_new_tokens) # append an observation: only the new tokens are prefilled
    engine.release((key, sample))                           # frees the slot; a waiting sample takes it

Rows of the cache are kept in the order running, ready (an observation to prefill), parked (stopped, nothing to do yet),
so that every forward pass works on one contiguous block of rows and nothing is copied to make a batch.
"""

from dataclasses import dataclass, field

import torch

LENGTH_BUCKET = 64  # the cache grows, and attention reads it, in steps of this many tokens
PREFILL_TOKENS = 16384  # at most this many tokens (padding included) in one prefill pass


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
    length: int  # tokens whose keys and values are in the cache
    unread: list[int] = field(default_factory=list)  # tokens still to be fed to the model; the last sampled one always is
    token_ids: list[int] = field(default_factory=list)  # of this turn
    logprobs: list[float] = field(default_factory=list)
    uniforms: list[float] = field(default_factory=list)  # one a token of this turn
    state: int = 0  # RUNNING, READY or PARKED


RUNNING, READY, PARKED = 0, 1, 2


class SlotCache:
    """Keys and values of all slots in one tensor (layers, 2, S, H, T, D); what transformers calls `past_key_values`.

    `view(first, positions_RN)` says which rows the next forward pass is about and at which positions its N tokens a row
    lie; `update` then writes there and returns those rows up to the longest.
    """

    def __init__(self, config, num_slots: int, device, dtype):
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # Zeros, because masked keys still enter the softmax as 0 * value and must be finite.
        self.state = torch.zeros(config.num_hidden_layers, 2, num_slots, heads, LENGTH_BUCKET, dim, device=device, dtype=dtype)

    def reserve(self, length: int) -> None:
        """Makes room for `length` tokens a row."""
        missing = length - self.state.shape[4]
        if missing > 0:
            missing = -(-max(missing, self.state.shape[4] // 2) // LENGTH_BUCKET) * LENGTH_BUCKET
            self.state = torch.nn.functional.pad(self.state, (0, 0, 0, missing))

    def view(self, first: int, positions_RN: torch.Tensor) -> torch.Tensor:
        """Selects rows [first, first + R) and returns their attention mask (R, 1, N, T)."""
        rows, longest = positions_RN.shape[0], int(positions_RN.max()) + 1
        self.reserve(longest)
        length = min(-(-longest // LENGTH_BUCKET) * LENGTH_BUCKET, self.state.shape[4])
        self.window = self.state[:, :, first : first + rows, :, :length]
        self.rows_R1 = torch.arange(rows, device=self.state.device)[:, None]
        self.positions_RN = positions_RN
        return torch.arange(length, device=self.state.device) <= positions_RN[:, None, :, None]

    def update(self, keys_RHND, values_RHND, layer_idx, *_args, **_kwargs):
        keys, values = self.window[layer_idx]
        # Advanced indices on both sides of a slice put the indexed axes first: (R, N, H, D).
        keys[self.rows_R1, :, self.positions_RN] = keys_RHND.transpose(1, 2).to(keys.dtype)
        values[self.rows_R1, :, self.positions_RN] = values_RHND.transpose(1, 2).to(values.dtype)
        return keys, values

    def copy_rows(self, targets: list[int], source: "SlotCache", sources: list[int], length: int) -> None:
        self.reserve(length)
        self.state[:, :, targets, :, :length] = source.state[:, :, sources, :, :length]

    # transformers asks these of a cache; the mask and positions it would derive from them are always given.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def sample_tokens(logits_SV: torch.Tensor, uniforms_S: torch.Tensor, temperature: float, top_p: float):
    """One token a row by inverse CDF, and its log-probability under the very distribution it was drawn from.

    One uniform number a token, taken from the episode's own generator, makes a draw independent of how rows are batched.
    temperature 0 takes the argmax and records its log-probability at temperature 1. top_p < 1 keeps the smallest set of
    likeliest tokens whose probability reaches top_p, and renormalises. Shapes: (S, V), (S,) -> (S,) int64, (S,) float32.
    """
    logits_SV = logits_SV.float()
    if temperature == 0:
        token_S = logits_SV.argmax(-1)
        return token_S, logits_SV.log_softmax(-1).gather(-1, token_S[:, None])[:, 0]
    if temperature != 1:
        logits_SV = logits_SV / temperature
    logprobs_SV = logits_SV.log_softmax(-1)
    if top_p < 1:
        sorted_SV, order_SV = logprobs_SV.sort(descending=True, stable=True)
        before_SV = sorted_SV.exp().cumsum(-1) - sorted_SV.exp()
        sorted_SV = sorted_SV.masked_fill(before_SV >= top_p, -torch.inf).log_softmax(-1)
        logprobs_SV = torch.empty_like(sorted_SV).scatter_(-1, order_SV, sorted_SV)
    # float64: a float32 running sum over a vocabulary of 150k drifts by more than the tail's probabilities.
    cdf_SV = logprobs_SV.exp().cumsum(-1, dtype=torch.float64)
    token_S = torch.searchsorted(cdf_SV, uniforms_S.to(cdf_SV)[:, None] * cdf_SV[:, -1:], right=True)[:, 0]
    token_S = torch.where(token_S < logits_SV.shape[-1], token_S, logprobs_SV.argmax(-1))
    return token_S, logprobs_SV.gather(-1, token_S[:, None])[:, 0]


class Engine:
    def __init__(self, lm, tokenizer, *, num_slots: int, temperature: float, top_p: float, stop_strings: tuple[str, ...], eos_ids: tuple[int, ...]):
        """Samples from `lm`, any transformers decoder of the Llama/Qwen2/Qwen3 kind, whose weights it reads but never keeps."""
        scaled = [name for name in ("logits_scaling", "logit_scale", "final_logit_softcapping", "use_sliding_window") if getattr(lm.config, name, None) not in (None, False, 1, 1.0)]
        if scaled:
            raise ValueError(f"{lm.config.model_type} has {scaled[0]} = {getattr(lm.config, scaled[0])}, which engine and policy do not apply: use a plain Llama/Qwen kind of decoder")
        other = set(getattr(lm.config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
        if other:
            raise ValueError(f"{lm.config.model_type} has {', '.join(sorted(other))} layers: the engine's cache holds full attention only")
        self.lm, self.tokenizer, self.num_slots = lm, tokenizer, num_slots
        self.temperature, self.top_p, self.stop_strings, self.eos_ids = temperature, top_p, stop_strings, frozenset(eos_ids)
        self.device, self.dtype = lm.device, lm.dtype
        self.cache = self._new_cache(num_slots)
        self.rows: list[Sequence] = []  # by cache row
        self.by_key: dict[tuple, Sequence] = {}
        self.prompts: dict = {}  # key -> prompt ids, or (cache, row, length, logits) once prefilled
        self.waiting: list[tuple] = []  # (key, sample, seed, max_new_tokens) without a slot
        last = tuple(stop[-1] for stop in stop_strings)
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        # A stop string can only end in a token that contains its last character; only there is text looked at.
        self.may_stop = frozenset(i for i, token in enumerate(tokens) if token and any(char in token for char in last))
        self.tail = 2 * max(map(len, stop_strings), default=0) + 8
        self.num_fed = 0  # tokens pushed through the model, padding excluded

    def _new_cache(self, num_slots: int) -> SlotCache:
        dtype = torch.get_autocast_dtype(self.device.type) if torch.is_autocast_enabled(self.device.type) else self.dtype
        return SlotCache(self.lm.config, num_slots, self.device, dtype)

    @property
    def num_running(self) -> int:
        return sum(sequence.state != PARKED for sequence in self.rows)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return self.num_running > 0 or (bool(self.waiting) and len(self.rows) < self.num_slots)

    def add(self, key, prompt_ids: list[int], seeds: list[int], max_new_tokens: int) -> None:
        assert prompt_ids and max_new_tokens > 0
        self.prompts[key] = list(prompt_ids)
        self.waiting += [(key, sample, seed, max_new_tokens) for sample, seed in enumerate(seeds)]

    def extend(self, key: tuple, token_ids: list[int], max_new_tokens: int) -> None:
        sequence = self.by_key[key]
        assert sequence.state == PARKED and max_new_tokens > 0
        sequence.unread += token_ids
        sequence.state = READY
        self._begin_turn(sequence, max_new_tokens)

    def release(self, key: tuple) -> None:
        sequence = self.by_key.pop(key)
        assert sequence.state == PARKED
        hole = self.rows.index(sequence)
        last = self.rows.pop()
        if last is not sequence:
            self.cache.copy_rows([hole], self.cache, [len(self.rows)], last.length)
            self.rows[hole] = last

    @torch.no_grad()
    def step(self) -> list[Stopped]:
        """One token for every running slot; slots with something to prefill go first, in a pass of their own."""
        assert not self.lm.training, "in training mode gradient checkpointing drops the cache"
        stopped = []
        if self.waiting and len(self.rows) < self.num_slots:
            stopped += self._start_waiting()
        self._arrange()
        num_running = sum(sequence.state == RUNNING for sequence in self.rows)
        ready = [sequence for sequence in self.rows if sequence.state == READY]
        if ready:
            logits = self._read(self.cache, num_running, ready)
            for sequence in ready:
                sequence.state = RUNNING
            stopped += self._sample(ready, logits)
        elif num_running:
            running = self.rows[:num_running]
            stopped += self._sample(running, self._read(self.cache, 0, running))
        return stopped

    def _begin_turn(self, sequence: Sequence, max_new_tokens: int) -> None:
        sequence.token_ids, sequence.logprobs = [], []
        sequence.uniforms = torch.rand(max_new_tokens, generator=sequence.generator, dtype=torch.float64).tolist()

    def _start_waiting(self) -> list[Stopped]:
        """Gives free slots to waiting samples: prefills prompts not seen yet, copies their keys and values to each sample."""
        free = self.num_slots - len(self.rows)
        starting, self.waiting = self.waiting[:free], self.waiting[free:]
        fresh = [key for key in dict.fromkeys(key for key, *_ in starting) if isinstance(self.prompts[key], list)]
        for some in _chunks(fresh, [len(self.prompts[key]) for key in fresh], PREFILL_TOKENS):
            cache = self._new_cache(len(some))
            sequences = [Sequence((), None, 0, self.prompts[key]) for key in some]
            logits = self._read(cache, 0, sequences)
            for row, key in enumerate(some):
                self.prompts[key] = (cache, row, sequences[row].length, logits[row])
        started = []
        for key, sample, seed, max_new_tokens in starting:
            sequence = Sequence((key, sample), torch.Generator().manual_seed(seed), self.prompts[key][2], state=RUNNING)
            self._begin_turn(sequence, max_new_tokens)
            self.by_key[sequence.key] = sequence
            started.append(sequence)
        by_cache: dict = {}
        for row, sequence in enumerate(started, start=len(self.rows)):
            cache, source, length, _ = self.prompts[sequence.key[0]]
            by_cache.setdefault(id(cache), (cache, []))[1].append((row, source, length))
        for cache, copies in by_cache.values():
            rows, sources, lengths = zip(*copies)
            self.cache.copy_rows(list(rows), cache, list(sources), max(lengths))
        self.rows += started
        logits = torch.stack([self.prompts[sequence.key[0]][3] for sequence in started])
        still_waiting = {key for key, *_ in self.waiting}
        self.prompts = {key: prompt for key, prompt in self.prompts.items() if key in still_waiting}
        return self._sample(started, logits)

    def _arrange(self) -> None:
        """Reorders rows to running, ready, parked, moving only those that stand in another's region."""
        states = [sequence.state for sequence in self.rows]
        wanted = sorted(states)
        if states == wanted:
            return
        holes = {state: [] for state in (RUNNING, READY, PARKED)}
        for row, (state, want) in enumerate(zip(states, wanted)):
            if state != want:
                holes[want].append(row)
        moves = [(row, holes[state].pop()) for row, (state, want) in enumerate(zip(states, wanted)) if state != want]
        rows = list(self.rows)
        for source, target in moves:
            rows[target] = self.rows[source]
        self.cache.copy_rows([t for _, t in moves], self.cache, [s for s, _ in moves], max(self.rows[s].length for s, _ in moves))
        self.rows = rows

    def _read(self, cache: SlotCache, first: int, sequences: list[Sequence]) -> torch.Tensor:
        """Feeds the unread tokens of `sequences`, which lie in cache rows first, first + 1, …; returns the logits (R, V) after each."""
        logits, done = [], 0
        for some in _chunks(sequences, [len(s.unread) for s in sequences], PREFILL_TOKENS):
            counts = [len(sequence.unread) for sequence in some]
            width = max(counts)
            # Padding repeats the last token at positions to come; the real tokens there overwrite it before anyone may look.
            token_ids_RN = torch.tensor([s.unread + s.unread[-1:] * (width - n) for s, n in zip(some, counts)], device=self.device)
            starts_R1 = torch.tensor([[sequence.length] for sequence in some], device=self.device)
            positions_RN = starts_R1 + torch.arange(width, device=self.device)
            mask = cache.view(first + done, positions_RN)
            hidden_RNC = self.lm.base_model(token_ids_RN, attention_mask=mask, position_ids=positions_RN, past_key_values=cache, use_cache=True).last_hidden_state
            last_R = torch.tensor(counts, device=self.device) - 1
            logits.append(self.lm.get_output_embeddings()(hidden_RNC[torch.arange(len(some), device=self.device), last_R]))
            for sequence, count in zip(some, counts):
                sequence.length += count
                sequence.unread = []
            self.num_fed += sum(counts)
            done += len(some)
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _sample(self, sequences: list[Sequence], logits_SV: torch.Tensor) -> list[Stopped]:
        uniforms_S = torch.tensor([s.uniforms[len(s.token_ids)] for s in sequences], dtype=torch.float64, device=self.device)
        token_S, logprob_S = sample_tokens(logits_SV, uniforms_S, self.temperature, self.top_p)
        stopped = []
        for sequence, token, logprob in zip(sequences, token_S.tolist(), logprob_S.tolist()):
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


def _chunks(items: list, widths: list[int], budget: int):
    """Consecutive runs of `items` whose padded size (rows x widest) stays within `budget`; an oversized item goes alone."""
    run, widest = [], 0
    for item, width in zip(items, widths):
        if run and (len(run) + 1) * max(widest, width) > budget:
            yield run
            run, widest = [], 0
        run.append(item)
        widest = max(widest, width)
    if run:
        yield run
