"""The tiny world's fixed sentences, and how they are split into words."""

from tokenizers import Regex, pre_tokenizers

from lld import protocol

PASSAGES = {
    "person": (
        "{title} was born in {birthplace} and works for {employer}.",
        "The employer of {title} is {employer}, the birthplace {birthplace}.",
    ),
    "company": (
        "{title} has its base in {base} and was founded by {founder}.",
        "The founder of {title} is {founder}, its base {base}.",
    ),
    "city": (
        "{title} is a city in the country {country}.",
        "The city {title} lies in the country {country}.",
    ),
    "country": (
        "The capital of {title} is {capital} and its language {language}.",
        "{title} has the language {language} and the capital {capital}.",
    ),
}

QUESTIONS = {
    "birthplace": ("where was {} born?", "what is the birthplace of {}?"),
    "employer": ("who does {} work for?", "who is the employer of {}?"),
    "founder": ("who founded {}?", "who is the founder of {}?"),
    "base": ("where does {} have its base?", "in which city is the base of {}?"),
    "country": ("in which country is {}?", "what is the country of {}?"),
    "capital": ("what is the capital of {}?", "which city is the capital of {}?"),
    "language": ("what language is spoken in {}?", "what is the language of {}?"),
}

BRIDGES = {
    "birthplace": ("the birthplace of {}", "the city where {} was born"),
    "employer": ("the employer of {}", "the company that {} works for"),
    "founder": ("the founder of {}", "the person who founded {}"),
    "base": ("the base of {}", "the city where {} has its base"),
    "country": ("the country of {}",),
}

CITY_PREFIXES = ("Port", "New", "Lake", "Fort")
COMPANY_SUFFIXES = ("Motors", "Foods", "Press", "Mills")

# Thoughts of the demonstrations: before a search, after its result, before the next one, after a wrong query.
FIRST_THOUGHTS = ("i need the {relation} of {title}", "let me search the {relation} of {title}")
FOUND_THOUGHTS = ("the {relation} of {title} is {value}", "i found that the {relation} of {title} is {value}")
NEXT_THOUGHTS = (" so i need its {relation}", " and now its {relation}")
RETRY_THOUGHTS = ("this is not about {title} , try again", "i need the {relation} of {title} and not this")
FILLERS = tuple("well hmm maybe perhaps so then again okay really just still anyway now wait".split())


# A passage's prefix 'Doc 1(Title: "' is one token: split into words, it would be half of an observation.
_PIECE = Regex(r'doc \d+\(title: "|"\)|\w+|[^\w\s]')


def word_splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(_PIECE, "removed", invert=True)


def split_words(text: str) -> set[str]:
    return {word for word, _ in word_splitter().pre_tokenize_str(text.lower())}


def template_words() -> list[str]:
    """Every word of the fixed sentences, sorted."""
    groups = [*PASSAGES.values(), *QUESTIONS.values(), *BRIDGES.values()]
    groups += [FIRST_THOUGHTS, FOUND_THOUGHTS, NEXT_THOUGHTS, RETRY_THOUGHTS, FILLERS]
    groups += [CITY_PREFIXES, COMPANY_SUFFIXES]
    groups += [(protocol.defuse(protocol.INVALID_ACTION), "user", "assistant")]
    return sorted({word for sentences in groups for sentence in sentences for word in split_words(sentence)})
