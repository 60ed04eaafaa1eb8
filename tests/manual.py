"""A reference manual of a language that does not exist, generated: real enough for every test.

Nothing of the interpreter is read: its own pages have other words in each version of Python. The
text has headings, wrapped paragraphs, lists, examples of code, frequent and rare words (as often as
in English), and topics of 200 to 30,000 characters. It depends on `SEED` alone.
"""

import random
import textwrap

SEED = 20
NUM_TOPICS = 80

WORDS = {
    "noun": """
argument attribute block buffer call class clause constant context counter cursor descriptor
digit entry error event exception expression field file filter flag frame function generator
group handle header identifier index input instance interface item iterator key label layer
level line list loop machine mapping marker member message method module name namespace node
number object operand operator option order output package parameter parser pattern place
pointer point process program property queue range record reference result rule scope sequence
session set signature slice slot space stack state statement step stream string structure suffix
table target task text thread token tree tuple type unit user value variable vector version view
window word zone
""",
    "verb": """
accepts adds applies assigns binds builds calls changes checks clears closes collects compares
contains converts copies counts creates defines deletes describes divides evaluates executes
finds follows gives holds ignores imports includes joins keeps leaves loads locks makes marks
moves needs opens orders passes prints produces raises reads records refers rejects removes
repeats replaces requires resolves returns searches selects sends sets shares shows sorts splits
starts stops stores takes tests updates uses visits waits wraps writes
""",
    "adjective": """
abstract additional available basic binary bound built-in cached common complete complex
constant current deep default direct empty equal exact explicit external final first fixed
global hidden immutable implicit inner internal large last lazy left local long lower missing
mutable nested new null numeric old optional ordered outer parallel plain positional previous
private public qualified relative reserved right safe shallow short signed similar simple single
small special standard static strict temporary unique unsigned upper useful valid virtual weak
whole
""",
    "syllable": """
ba cor da del en far gi hal in jo kel lu mar nim or pra qui ren sol tam ul ver wis xan yor zet
""",
    "adverb": """
again always also exactly explicitly first immediately later never normally often once only
quickly rarely silently then therefore usually
""",
}
SENTENCES = (
    "The {adjective} {noun} {verb} the {noun} of the {noun}, and the {noun} {verb} it {adverb}.",
    "If the {noun} is {adjective}, the {noun} {verb} a {adjective} {noun}; otherwise, that {noun} "
    "{verb} the {term} of its {noun}.",
    "It is {adverb} possible to have a {adjective} {noun} that {verb} the {noun} with {term}.",
    "Each {noun} {verb} its own {noun} (see {term}).",
    "When a {adjective} {noun} is given, it {verb} the {noun} for which the {noun} \"{term}\" was "
    "{adjective}.",
    "To {term} a {noun}, the {noun} must be {adjective}: for example, {number} of the {noun}s.",
    "Changed in version {number}.{digit}: the {noun} {verb} {adjective} {noun}s.",
    "Note that this {noun} doesn't have a {term}, and that {term} {adverb} {verb} it.",
)  # fmt: skip
EXAMPLES = (
    "def {term}({noun}, {noun}={number}):\n    if {noun}:\n        return {noun}.{term}({digit})",
    ">>> {term} = [{noun}({number}), {noun}[{digit}:]]\n>>> {term}\n<{noun} {number}>",
    'class {term}:\n    """A {adjective} {noun}."""\n\n    {noun} = "{term}"',
    "{noun}_{noun} ::= {noun} ({noun} {noun})* | '{term}'",
)


class _Writer:
    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        self.words = {kind: words.split() for kind, words in WORDS.items()}
        for words in self.words.values():
            self.chance.shuffle(words)
        self.terms = [self._term() for _ in range(30)]

    def _term(self) -> str:
        word = "".join(
            self.chance.choice(self.words["syllable"]) for _ in range(self.chance.randint(2, 4))
        )
        return word + self.chance.choice(("", "", "er", "s", "_id", "ing", "()", "é"))

    def fill(self, template: str) -> str:
        parts = []
        for part in template.replace("{", "\0").replace("}", "\0").split("\0"):
            if part in self.words:  # a few words of a kind are frequent, as in every text
                words = self.words[part]
                parts.append(words[int(len(words) * self.chance.random() ** 2.5)])
            elif part == "term":
                parts.append(self.chance.choice(self.terms))
            elif part in ("number", "digit"):
                parts.append(str(self.chance.randrange(10 if part == "digit" else 3000)))
            else:
                parts.append(part)
        return "".join(parts)

    def paragraph(self) -> str:
        kind = self.chance.random()
        if kind < 0.12:
            return textwrap.indent(self.fill(self.chance.choice(EXAMPLES)), "   ")
        count = self.chance.choice((1, 1, 2, 2, 3, 4, 7))
        text = " ".join(self.fill(self.chance.choice(SENTENCES)) for _ in range(count))
        mark = "* " if kind < 0.25 else ""
        return textwrap.fill(text, 70, initial_indent=mark, subsequent_indent=" " * len(mark))

    def page(self, heading: str) -> str:
        count = int(2 + 120 * self.chance.random() ** 5)
        parts = [f"{heading.capitalize()}\n{'*' * len(heading)}"]
        return "\n\n".join(parts + [self.paragraph() for _ in range(count)]) + "\n"


def generate_topics(number: int, seed: int = SEED) -> dict[str, str]:
    """Return {name: page}, sorted; the same for the same arguments on every Python."""
    heading = _Writer(seed).fill
    names = sorted({heading("{noun}-{term}-{number}") for _ in range(2 * number)})[:number]
    return {name: _Writer(seed * 1000 + place).page(name) for place, name in enumerate(names)}


topics = generate_topics(NUM_TOPICS)
