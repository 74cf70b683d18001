"""Generates text with known answers from a seed: every answer follows from the words before it.

It returns training documents and held-out questions as lists of words. One word is one token, so
that every distance below is a number of tokens. The module uses no models, tensors or tokenizers.

A document is a sequence of statements, each closed by ``;``. Four tasks have an answer:

| task    | statement                                      | answer follows from                              |
|---------|------------------------------------------------|--------------------------------------------------|
| recall  | ``set river amber ;`` … ``get river amber ;``    | the one definition of the key                    |
| copy    | ``say q w e ;`` … ``echo q w e ;``               | the letters last said                            |
| sum     | ``4 7 + 2 5 = 0 7 2 ;``                          | the digits                                       |
| grammar | ``the dogs near the cat bark ;``                 | the first noun and its number, whatever follows  |

Where keys may be defined ``again``, there is a fifth task, ``latest``. Its statements are those of
recall, and its answer is the last value of the key.
"""

import heapq
import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path

PAD, BOS, EOS, UNKNOWN = SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
END, HUM, ECHO = ";", "um", ("echo",)
DIGITS = tuple("0123456789")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
KEYS = tuple(
    """river mountain forest valley desert island meadow canyon glacier harbor lagoon prairie tundra volcano waterfall
    beach bridge castle tower garden market temple palace village museum library theater station airport factory
    kitchen bedroom window door table chair lamp mirror carpet curtain pillow blanket clock candle basket bottle
    hammer needle ladder shovel rope anchor compass lantern wagon carriage bicycle rocket balloon ship train kite
    drum violin""".split()
)
VALUES = tuple(
    """amber azure beige black blue bronze brown coral crimson cyan gold gray green indigo ivory jade lemon lilac lime
    magenta maroon mauve mint navy olive orange peach pearl pink plum purple red rose ruby rust salmon scarlet silver
    tan teal turquoise violet white yellow apple banana cherry grape mango melon pear quince almond cashew walnut
    pepper ginger garlic onion carrot celery radish spinach turnip""".split()
)
VERB_OF = {  # plural forms; the singular noun drops the s, the singular verb takes it
    "dogs": "bark",
    "cats": "purr",
    "birds": "sing",
    "horses": "trot",
    "frogs": "croak",
    "lions": "roar",
    "ducks": "quack",
    "owls": "hoot",
    "snakes": "slither",
    "bears": "growl",
    "cows": "moo",
    "pigs": "grunt",
    "hens": "cluck",
    "goats": "bleat",
    "crows": "caw",
    "crickets": "chirp",
}
NOUNS = tuple(noun for plural in VERB_OF for noun in (plural[:-1], plural))
VERBS = tuple(verb for plural in VERB_OF.values() for verb in (plural + "s", plural))
ADJECTIVES = tuple("old young big small quick lazy happy quiet".split())
PREPOSITIONS = tuple("near behind above beside beyond under".split())
KEYWORDS = ("set", "get", "say", "echo", "the", "+", "=", "bye", HUM, END)
# a word's index is its token id
VOCABULARY = (
    SPECIALS
    + KEYWORDS
    + DIGITS
    + LETTERS
    + KEYS
    + VALUES
    + NOUNS
    + VERBS
    + ADJECTIVES
    + PREPOSITIONS
)

DISTANCES = {
    "recall": (16, 32, 64, 128, 192, 256, 384),
    "copy": (16, 32, 64, 128, 192, 256, 384),
    "grammar": (16, 32, 64, 128),
    "sum": (6,),
}
LATEST = {"latest": (16, 32, 64, 128, 192, 256, 384)}


@dataclass(frozen=True, order=True)
class Statement:
    """Words that end in a known answer; nothing in ``ask`` is predictable in general, all of
    ``answer`` is."""

    ask: tuple[str, ...]
    answer: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """Greedy decoding after ``prompt`` must give ``answer``.

    ``prompt`` leaves out ``<bos>``, which the tokenizer adds.  ``distance`` counts the tokens from
    the word that decides the first answer token (for a sum: the first digit) to that token.
    """

    task: str
    distance: int
    prompt: str
    answer: str


def addition(rng: random.Random, held_out: bool = False) -> Statement:
    """Two numbers below 100; one pair in eight never occurs in training and is what ``held_out``
    draws."""
    while True:
        a, b = rng.randrange(100), rng.randrange(100)
        if ((3 * a + 5 * b) % 8 == 0) == held_out:
            return Statement((*f"{a:02}", "+", *f"{b:02}", "="), tuple(f"{a + b:03}"))


def sentence(rng: random.Random, distance: int) -> Statement:
    """A subject, phrases of 3 or 4 words that only distract, and the subject's verb ``distance`` (≥
    7) words on."""
    subject, gap = rng.choice(NOUNS), distance - 1
    # phrases with an adjective
    longer = gap % 3 + 3 * rng.randint(0, (gap - 4 * (gap % 3)) // 12)
    sizes = [4] * longer + [3] * ((gap - 4 * longer) // 3)
    rng.shuffle(sizes)
    words = ["the", subject]
    for size in sizes:
        words += [
            rng.choice(PREPOSITIONS),
            "the",
            *rng.sample(ADJECTIVES, size - 3),
            rng.choice(NOUNS),
        ]
    return Statement(tuple(words), (VERBS[NOUNS.index(subject)],))


def pair(rng: random.Random, key: str) -> tuple[Statement, Statement]:
    """The definition of a key, and its question."""
    value = rng.choice(VALUES)
    return Statement(("set", key, value)), Statement(("get", key), (value,))


def string(rng: random.Random) -> tuple[Statement, Statement]:
    """A few letters to say, and the request to echo them."""
    letters = tuple(rng.sample(LETTERS, rng.randint(4, 12)))
    return Statement(("say", *letters)), Statement(ECHO, letters)


class Speaker:
    """Writes a document and remembers which definitions still wait for their question.

    Every ``set`` and ``say`` draws how many words later its answer is asked, evenly up to the
    ``horizon``, so that long distances are common.  A key is defined once per document and at most
    one string is waiting: every answer is unambiguous.  ``words`` is the document so far,
    ``answers`` says of each word whether it belongs to an answer. ``again`` is the share of
    definitions that give a new value to a key that has one; then the last value is the answer.
    """

    def __init__(
        self, rng: random.Random, horizon: int, strings: bool = True, again: float = 0
    ):
        self.rng, self.horizon, self.strings, self.again = rng, horizon, strings, again
        self.words, self.answers = [BOS], [False]
        self.keys = rng.sample(KEYS, len(KEYS))  # not yet defined
        self.latest: dict[str, str] = {}  # the value of every defined key
        # a heap of (due position, question)
        self.waiting: list[tuple[int, Statement]] = []

    def write(self, statement: Statement) -> None:
        if statement.ask[0] == "get":
            statement = replace(statement, answer=(self.latest[statement.ask[1]],))
        if statement.ask[0] == "set":
            self.latest[statement.ask[1]] = statement.ask[2]
        self.words += [*statement.ask, *statement.answer, END]
        self.answers += (
            [False] * len(statement.ask) + [True] * len(statement.answer) + [False]
        )

    def write_until(self, end: int) -> None:
        """Fill the document to exactly ``end`` words; where a statement does not fit, hum one word
        and go on."""
        while (position := len(self.words)) < end:
            due = self.waiting and self.waiting[0][0] <= position
            statement, question = (self.waiting[0][1], None) if due else self._invent()
            if position + len(statement.ask) + len(statement.answer) + 1 > end:
                self.words.append(HUM)
                self.answers.append(False)
                continue
            if due:
                heapq.heappop(self.waiting)
            if question:
                wait = int(max(0, self.horizon - position) * self.rng.random())
                heapq.heappush(self.waiting, (position + wait, question))
            self.write(statement)

    def _invent(self) -> tuple[Statement, Statement | None]:
        """A new statement and the question, if any, that it makes answerable."""
        kind = self.rng.choices(("recall", "copy", "grammar", "sum"), (12, 2, 2, 2))[0]
        if (
            kind == "recall"
            and self.latest
            and self.again
            and self.rng.random() < self.again
        ):
            return pair(self.rng, self.rng.choice(list(self.latest)))
        if kind == "recall" and self.keys:
            return pair(self.rng, self.keys.pop())
        if (
            kind == "copy"
            and self.strings
            and all(question.ask != ECHO for _, question in self.waiting)
        ):
            return string(self.rng)
        if kind == "grammar":
            return sentence(self.rng, 7 + int(125 * self.rng.random() ** 4)), None
        return addition(self.rng), None


def document(
    rng: random.Random, length: int, again: float = 0
) -> tuple[list[str], list[bool]]:
    """One training text of exactly ``length`` ≥ 16 words, ``<bos>`` to ``<eos>``, and which words
    are answers."""
    speaker = Speaker(rng, horizon=length, again=again)
    # in parts, so that humming is met everywhere
    while len(speaker.words) < length - 3:
        speaker.write_until(min(length - 3, len(speaker.words) + rng.randint(10, 200)))
    return [*speaker.words, "bye", END, EOS], [*speaker.answers, False, True, True]


def repetition(rng: random.Random, length: int) -> tuple[list[str], list[bool]]:
    """A warm-up text of ``length`` words: strings of random words, each said twice; the second time
    is an answer."""
    words, answers = [BOS], [False]
    while len(words) < length:
        said = rng.sample(VOCABULARY[len(SPECIALS) :], rng.randint(2, 40))
        words += said + said
        answers += [False] * (len(said) + 1) + [True] * (len(said) - 1)
    return words[:length], answers[:length]


def question(rng: random.Random, task: str, distance: int) -> Question:
    """One held-out question, at most 500 tokens with ``<bos>``, behind an unrelated text of random
    length."""
    speaker = Speaker(rng, horizon=512, strings=False, again=0.5 * (task in LATEST))
    key = speaker.keys.pop() if task in LATEST else None
    if key:  # an earlier value, of which the text between knows nothing
        speaker.write(pair(rng, key)[0])
        speaker.latest.clear()
    speaker.write_until(len(speaker.words) + rng.randint(0, min(100, 490 - distance)))
    if task == "sum":
        item = addition(rng, held_out=True)
    elif task == "grammar":
        item = sentence(rng, distance)
    else:
        told, item = (
            string(rng) if task == "copy" else pair(rng, key or speaker.keys.pop())
        )
        speaker.write(told)
        speaker.latest.pop(key, None)
        speaker.write_until(len(speaker.words) + distance - len(told.ask) - 1)
    return Question(
        task, distance, " ".join([*speaker.words[1:], *item.ask]), " ".join(item.answer)
    )


def questions(seed: int, per_cell: int, distances: dict = DISTANCES) -> list[Question]:
    """``per_cell`` questions for every task and distance; the same seed always gives the same
    list."""
    rng = random.Random(f"questions {seed}")
    return [
        question(rng, task, d)
        for task, ds in distances.items()
        for d in ds
        for _ in range(per_cell)
    ]


def held_out(distances: dict = DISTANCES) -> list[Question]:
    """The questions committed in ``tasks/heldout.jsonl``, or of ``LATEST`` those in
    ``tasks/latest.jsonl``."""
    return questions(seed=2, per_cell=3, distances=distances)


def main() -> None:
    """Write the files of ``tasks`` again."""
    for name, distances in (("heldout", DISTANCES), ("latest", LATEST)):
        lines = [json.dumps(asdict(item)) + "\n" for item in held_out(distances)]
        (Path(__file__).parent / "tasks" / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
