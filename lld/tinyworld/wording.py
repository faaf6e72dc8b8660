"""Free wording for the thoughts of the tiny world: words that follow one another like those of a language."""

import math
import random
from itertools import accumulate

from lld import config
from lld.tinyworld.templates import split_words, template_words
from lld.tinyworld.world import Entity, invent_words

NUM_CLASSES = 8  # of words; a word's class decides which words are frequent after it


def zipf_weights(num_words: int, entropy: float) -> list[float]:
    """Probabilities proportional to rank^-s (Zipf), with s such that they have `entropy` nats.

    entropy: above 0 and below log(num_words), which s = 0 would give.
    """
    low, high = 0.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        weights = [rank**-middle for rank in range(1, num_words + 1)]
        total = sum(weights)
        found = -sum(w / total * math.log(w / total) for w in weights if w)
        low, high = (middle, high) if found > entropy else (low, middle)
    return [weight / total for weight in weights]


class Wording:
    """A chain of words: each is drawn by Zipf's law, over ranks that depend on the class of the one before.

    So a word that is rare after one word is frequent after another, and after any word the next one has the
    same entropy. It is a pure function of `cfg` and of the names of the world, which it does not use.
    """

    def __init__(self, cfg: config.TinyWorld, world: list[Entity]):
        rng = random.Random(f"wording {cfg.seed}")
        taken = set(template_words()).union(*(split_words(entity.title) for entity in world))
        self.words = [word.lower() for word in invent_words(rng, cfg.num_words, taken)]
        self.orders = [rng.sample(range(cfg.num_words), cfg.num_words) for _ in range(NUM_CLASSES)]
        self.weights = zipf_weights(cfg.num_words, cfg.word_entropy)
        self.sums = list(accumulate(self.weights))
        self.mean_length, self.spread = cfg.thought_words, cfg.thought_spread

    def draw(self, rng: random.Random) -> str:
        """A thought of `thought_words` words, up to `thought_spread` more or less, all lengths alike.

        With a spread the end of a thought is a choice, as in a language. The end gets likelier with every
        word, so that no nucleus cuts it for good.
        """
        num_words = self.mean_length + rng.randint(-self.spread, self.spread)
        drawn, group = [], 0
        for _ in range(num_words):
            [word] = rng.choices(self.orders[group], cum_weights=self.sums)
            drawn.append(self.words[word])
            group = word % NUM_CLASSES
        return " ".join(drawn)
