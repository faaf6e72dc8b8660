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
from lld.decoder import Decoder

LENGTH_BUCKET = 256  # the cache grows in steps of this many tokens
PASS_TOKENS = 16384  # at most this many tokens in one pass, or one row that alone has more
TOP = 1024  # top-p sorts this many tokens of a row, and all of them where these do not hold the nucleus
BLOCK = 512  # tokens summed at once when a long row is searched


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


class SlotCache:
    """Keys and values of all slots in one tensor (layers, 2, S, T, H, D); what transformers calls `past_key_values`.

    `spans` says which rows and positions the tokens of the present pass belong to.
    """

    def __init__(self, config, num_slots: int, device, dtype):
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape, self.options = (config.num_hidden_layers, 2, num_slots, heads, dim), dict(device=device, dtype=dtype)
        self.state = self._allocate(LENGTH_BUCKET)

    def _allocate(self, length: int) -> torch.Tensor:
        *outer, heads, dim = self.shape
        # Zeros, because masked keys still enter the softmax as 0 * value and must be finite. In memory a head's tokens are
        # neighbours on a CPU, whose attention takes 4 times longer otherwise; a GPU's varlen kernel asks for whole tokens.
        if self.options["device"].type == "cuda":
            return torch.zeros(*outer, length, heads, dim, **self.options)
        return torch.zeros(*outer, heads, length, dim, **self.options).transpose(3, 4)

    def reserve(self, length: int) -> None:
        """Makes room for `length` tokens a row."""
        old = self.state
        if length > old.shape[3]:
            self.state = self._allocate(-(-max(length, old.shape[3] * 3 // 2) // LENGTH_BUCKET) * LENGTH_BUCKET)
            self.state[:, :, :, : old.shape[3]] = old

    def write(self, layer: int, keys_NHD: torch.Tensor, values_NHD: torch.Tensor) -> torch.Tensor:
        """Stores the pass's tokens and returns keys and values (2, A, T, H, D) of its rows."""
        at = (self.spans.rows_N, self.spans.positions_N)
        for kept, new in zip(self.state[layer], (keys_NHD, values_NHD)):
            kept.index_put_(at, new.to(kept.dtype))
        return self.state[layer, :, : self.spans.num_rows]

    def update(self, keys_1HND, values_1HND, layer_idx, *_args, **_kwargs):
        return self.write(layer_idx, keys_1HND[0].transpose(0, 1), values_1HND[0].transpose(0, 1)).unbind()

    def move_rows(self, moves: list[tuple[int, int, int]]) -> None:
        """Copies (source, target, tokens) rows, all at once: a target may be another's source."""
        held = [self.state[:, :, source, :length].clone() for source, _, length in moves]
        for (_, target, length), row in zip(moves, held):
            self.state[:, :, target, :length] = row

    # transformers asks this of a cache; the mask and positions it would derive from it are always given.
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
    if top_p < 1:
        logits_SV = _nucleus(logits_SV, top_p)
    largest_S1 = logits_SV.amax(-1, keepdim=True)
    token_S, total_S = _invert_cdf((logits_SV - largest_S1).exp_(), uniforms_S)
    return token_S, (logits_SV.gather(-1, token_S[:, None]) - largest_S1)[:, 0] - total_S.log().float()


def _nucleus(logits_SV: torch.Tensor, top_p: float) -> torch.Tensor:
    """The logits of each row's nucleus, -inf elsewhere; sorts only the likeliest tokens where they hold it."""
    total_S1 = (logits_SV - logits_SV.amax(-1, keepdim=True)).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    for num in (TOP, logits_SV.shape[-1]):
        best_SK, order_SK = logits_SV.topk(min(num, logits_SV.shape[-1]))
        share_SK = (best_SK - best_SK[:, :1]).exp().double() / total_S1
        before_SK = share_SK.cumsum(-1) - share_SK
        if bool((before_SK[:, -1] >= top_p).all()):
            break
    return torch.full_like(logits_SV, -torch.inf).scatter_(-1, order_SK, best_SK.masked_fill(before_SK >= top_p, -torch.inf))


def _invert_cdf(weights_SV: torch.Tensor, uniforms_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first token of each row at which the running sum of weights exceeds its uniform number times their sum, and that sum.

    Sums are float64: in float32 that of a vocabulary of 150k drifts by more than the tail's probabilities. Long rows are
    searched in two steps, first the block of BLOCK tokens and then the token in it, which needs no running sum of all.
    """
    S, V = weights_SV.shape
    rows_S = torch.arange(S, device=weights_SV.device)
    blocks_SNB = torch.nn.functional.pad(weights_SV, (0, -V % BLOCK)).view(S, -1, BLOCK) if V > BLOCK else weights_SV[:, None]
    if blocks_SNB.shape[1] > 1:
        cdf_SN = blocks_SNB.sum(-1, dtype=torch.float64).cumsum(-1)
        total_S, target_S1 = cdf_SN[:, -1], uniforms_S.to(cdf_SN)[:, None] * cdf_SN[:, -1:]
        block_S = torch.searchsorted(cdf_SN, target_S1, right=True)[:, 0].clamp(max=cdf_SN.shape[1] - 1)
        inside_SB = blocks_SNB[rows_S, block_S].cumsum(-1, dtype=torch.float64)
        target_S1 = target_S1 - torch.nn.functional.pad(cdf_SN, (1, 0)).gather(1, block_S[:, None])
    else:
        inside_SB, block_S = weights_SV.cumsum(-1, dtype=torch.float64), 0
        total_S, target_S1 = inside_SB[:, -1], uniforms_S.to(inside_SB)[:, None] * inside_SB[:, -1:]
    token_S = (block_S * BLOCK + torch.searchsorted(inside_SB, target_S1, right=True)[:, 0].clamp(max=inside_SB.shape[1] - 1)).clamp(max=V - 1)
    met_S = weights_SV[rows_S, token_S] > 0
    if not bool(met_S.all()):  # the very end of the interval, or rounding: a token of no probability; take the likeliest
        token_S = torch.where(met_S, token_S, weights_SV.argmax(-1))
    return token_S, total_S


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
        cache_dtype = torch.get_autocast_dtype(self.device.type) if torch.is_autocast_enabled(self.device.type) else self.dtype
        self.decoder, self.cache = Decoder(lm), SlotCache(lm.config, num_slots, self.device, cache_dtype)
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
                self.prompts[key].state, self.prompts[key].logits_V = self.cache.state[:, :, row, : sequence.length].clone(), logits_SV[row]

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
        spans = Spans([sequence.length for sequence in sequences], counts, self.device, self.cache.state.dtype)
        self.cache.reserve(spans.length)
        hidden_RC = self.decoder(torch.tensor([token for s in sequences for token in s.unread], device=self.device), spans, self.cache)
        for sequence, count in zip(sequences, counts):
            sequence.length += count
            sequence.state, sequence.unread = RUNNING, []
        self.num_fed += sum(counts)
        return self.lm.get_output_embeddings()(hidden_RC)

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
