"""The invented knowledge and the questions of the embedded world "lookup".

In: a seed. Out: 206 entities joined by 522 facts of 12 relations, and questions of one to three
hops, ``what is the R2 of the R1 of E ?``, in three splits that share no (entity, chain) pair. The
facts are the same for all splits; what is held out is the question. Stands in for the papers'
multi-hop search data where nothing may be downloaded.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from agentspec.tasks.hashing import ordered, stable_hash, uniform
from agentspec.types import Task

SPLITS = {"train": 0.72, "validation": 0.08, "test": 0.20}
HOP_WEIGHTS = {1: 0.35, 2: 0.40, 3: 0.25}

# A name's first word stands without a space before it wherever it occurs (the spaces belong to the
# words around it), so that a word tokenizer gives the same ids in a question and in an argument.
FIRST_NAMES = tuple(
    "mira kenji lena omar tove ravi ines bram yuki nadia pavel zora emil asha luca freya "
    "idris maud oskar selma".split()
)
LAST_NAMES = tuple(
    f" {name}"
    for name in "sol ota berg haddad lind rao costa vos mori petrov novak kane stahl mehta bruno "
    "dahl bello ward holm engel".split()
)
FILM_HEADS = tuple(
    "silent broken golden hidden winter paper distant burning hollow electric velvet "
    "crooked frozen scarlet wandering final".split()
)
FILM_TAILS = tuple(
    f" {name}"
    for name in "harbor river mirror garden signal empire letter orchard shadow circus voyage "
    "lantern bridge island choir desert".split()
)
COMPANY_HEADS = tuple(
    "orbit cobalt juniper atlas falcon ember quartz delta nimbus saffron tundra vector".split()
)
COMPANY_TAILS = (" labs", " works", " group", " trading")
CITIES = tuple(
    "arvend belmora cestin dravik elspor fenwick garnul hestia ilmarin jorvale kestrel lumina "
    "marovo nerith ostrel pellin quenby rostal sundra tarvos ulmen vestry wexham yarrow zelnik "
    "brayton coldor dunmere everly fallow".split()
)
COUNTRIES = tuple(
    "aldania borvia carsica doria estara feronia gallen hestor istria joravia kaltia "
    "lorvane".split()
)
LANGUAGES = tuple("aldish borvic carsi dorian estari feric gallic hestic istric kalt".split())

# relation: (its synonym, what it belongs to, what it leads to)
RELATIONS: dict[str, tuple[str, str, str]] = {
    "birthplace": ("hometown", "person", "city"),
    "employer": ("workplace", "person", "company"),
    "mentor": ("teacher", "person", "person"),
    "director": ("maker", "film", "person"),
    "star": ("lead", "film", "person"),
    "studio": ("producer", "film", "company"),
    "founder": ("creator", "company", "person"),
    "seat": ("headquarters", "company", "city"),
    "country": ("nation", "city", "country"),
    "mayor": ("head", "city", "person"),
    "capital": ("metropolis", "country", "city"),
    "language": ("tongue", "country", "language"),
}


@dataclasses.dataclass(frozen=True)
class Knowledge:
    """What is true, and how it can be found. Built once; shared by all episodes; never changed."""

    seed: int
    kinds: dict[str, str]  # entity -> person, film, ...
    facts: dict[tuple[str, str], str]  # (entity, relation) -> entity
    unindexed: frozenset[tuple[str, str]]  # facts that no search finds
    stubs: frozenset[str]  # entities whose page says nothing

    def relations_of(self, entity: str) -> list[str]:
        """The relations that the entity has a fact for, in the order of its page."""
        return [r for r, (_, kind, _) in RELATIONS.items() if kind == self.kinds[entity]]

    def chains(self, hops: int) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """All ``(entity, chain of relations, answer)`` with ``hops`` steps and no entity twice."""
        for entity in self.kinds:
            yield from self._walk(entity, (entity,), (), hops)

    def _walk(
        self, start: str, seen: tuple[str, ...], chain: tuple[str, ...], hops: int
    ) -> Iterator[tuple[str, tuple[str, ...], str]]:
        if len(chain) == hops:
            yield start, chain, seen[-1]
            return
        for relation in self.relations_of(seen[-1]):
            value = self.facts[seen[-1], relation]
            if value not in seen:
                yield from self._walk(start, (*seen, value), (*chain, relation), hops)


def build_knowledge(
    seed: int = 0, unindexed_share: float = 0.2, stub_share: float = 1 / 6
) -> Knowledge:
    """The knowledge of one seed. The shares are exact up to rounding.

    Raises ValueError for a share outside [0, 1].
    """
    for name, share in (("unindexed_share", unindexed_share), ("stub_share", stub_share)):
        if not 0 <= share <= 1:
            raise ValueError(f"build_knowledge: {name} is {share}; allowed is 0 to 1")
    people = [a + b for a in FIRST_NAMES for b in LAST_NAMES]
    films = [a + b for a in FILM_HEADS for b in FILM_TAILS]
    companies = [a + b for a in COMPANY_HEADS for b in COMPANY_TAILS]
    members = {
        "person": ordered(people, seed, "person")[:70],
        "film": ordered(films, seed, "film")[:60],
        "company": ordered(companies, seed, "company")[:24],
        "city": list(CITIES),
        "country": list(COUNTRIES),
        "language": list(LANGUAGES),
    }
    kinds = {entity: kind for kind, entities in members.items() for entity in entities}
    facts = {}
    for entity, kind in kinds.items():
        for relation, (_, subject, target) in RELATIONS.items():
            if subject == kind:
                others = [other for other in members[target] if other != entity]
                facts[entity, relation] = others[
                    stable_hash(seed, "fact", entity, relation) % len(others)
                ]
    pages = [entity for entity, kind in kinds.items() if kind != "language"]
    n_hidden, n_stubs = round(unindexed_share * len(facts)), round(stub_share * len(pages))
    return Knowledge(
        seed=seed,
        kinds=kinds,
        facts=facts,
        unindexed=frozenset(ordered(list(facts), seed, "unindexed")[:n_hidden]),
        stubs=frozenset(ordered(pages, seed, "stub")[:n_stubs]),
    )


def question_text(entity: str, words: tuple[str, ...]) -> str:
    """The question for a chain's relation words, first hop first."""
    return f"what is the {' of the '.join(reversed(words))} of {entity} ?"


def split_of(knowledge: Knowledge, entity: str, chain: tuple[str, ...]) -> str:
    """The split that a question belongs to, decided by its content alone."""
    point = uniform(knowledge.seed, "split", entity, chain)
    for split, share in SPLITS.items():
        point -= share
        if point < 0:
            return split
    return "test"


def build_tasks(knowledge: Knowledge, split: str) -> list[Task]:
    """The split's tasks, one-hop questions in both wordings, longer ones drawn to HOP_WEIGHTS.

    ``data`` holds ``question``, ``entity``, ``chain`` (first hop first), ``words`` (the relation
    word used for each hop) and ``answers`` (all right answers). Raises ValueError for an unknown
    split.
    """
    if split not in SPLITS:
        raise ValueError(f"lookup: split is {split!r}; allowed are {sorted(SPLITS)}")
    tasks: list[Task] = []
    n_single = 0
    for hops in (1, 2, 3):
        worded = []
        for entity, chain, answer in knowledge.chains(hops):
            if split_of(knowledge, entity, chain) == split:
                words = itertools.product(*((r, RELATIONS[r][0]) for r in chain))
                worded += [(entity, chain, answer, w) for w in words]
        if hops == 1:
            n_single = len(worded)
        keep = round(n_single * HOP_WEIGHTS[hops] / HOP_WEIGHTS[1])
        for entity, chain, answer, words_used in ordered(worded, knowledge.seed, "draw")[:keep]:
            data = {
                "question": question_text(entity, words_used),
                "entity": entity,
                "chain": list(chain),
                "words": list(words_used),
                "answers": [answer],
            }
            tasks.append(Task(f"lookup-{split}-{len(tasks)}", "lookup", data))
    return tasks
