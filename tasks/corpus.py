"""Our own text: an invented country with towns, people, agencies and the prose about them.

Everything is drawn from a ``random.Random`` that the caller seeds, so the same seed gives the same
text on every machine. Knows no task, no question and no tokenizer: sizes are whitespace words.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence


def _split(text: str, separator: str | None = None) -> tuple[str, ...]:
    """Material is kept as running text, which is easier to read and to extend than lists."""
    return tuple(text.split(separator))


_TOWN_HEADS = _split(
    "Arden Bel Brack Calder Corra Dun Elder Fenn Gar Hallow Hest Ingle Jarrow Kel Lang Maren "
    "Mossel Norr Orla Pell Quarr Raven Selk Tarn Ulver Vint Wend Yarrow Zell Osk Bram Tolle",
)
_TOWN_TAILS = _split(
    "bridge brook by combe dale fell ferry field ford gate grove ham haven holt hurst mere "
    "moor ness port ridge stead stone thorpe ton water well wick worth",
)
_FIRST_NAMES = _split(
    "Abel Ada Agnes Alban Anselm Berta Bruno Carla Cedric Clara Dario Delia Edgar Elin Emil "
    "Enid Felix Flora Gideon Greta Hanna Hugo Ida Ivo Jonas Judith Kaspar Klara Leo Lydia Magnus "
    "Marta Nils Nora Oskar Petra Quentin Ruth Silas Thea Ulric Vera Walter Wilma Yvonne Zeno",
)
_LAST_NAMES = _split(
    "Abbott Alder Barrow Birch Castell Crane Dorn Drummond Ellery Faber Farrow Gaunt Harrow Hobb "
    "Ivers Jessop Keene Kestrel Lorne Marsh Merrin Nash Oakes Orme Pardoe Penrose Quill Rook "
    "Sable Stroud Tallis Thorn Ulm Vane Voss Weir Whitlock Wyatt Yates Zander",
)
_BODIES = ("Agency", "Board", "Bureau", "Commission", "Council", "Institute", "Office", "Service")
_FIELDS = _split(
    "Bridge Safety|Canal Works|Coastal Lights|Crop Insurance|Drinking Water|Fair Weights|"
    "Flood Defence|Forest Roads|Grain Storage|Harbour Pilots|Hill Farming|Land Records|"
    "Lighthouse Repair|Market Rents|Mine Closure|Night Trains|Peat Lands|Postal Savings|"
    "Public Archives|River Ferries|Rural Clinics|School Meals|Seed Exchange|Snow Clearance|"
    "Tidal Power|Town Libraries|Veteran Housing|Village Halls|Wind Mills|Wool Trade",
    "|",
)
_JOBS = _split(
    "archivist botanist bridge-builder cartographer chemist clockmaker engineer ferry-master "
    "geologist historian lawyer librarian physician postmaster printer surveyor teacher",
)
_GOODS = _split(
    "barley bells bricks candles cheese cider copper dyes glass honey lace lamps linen oats "
    "paper pottery rope salt slate soap tiles timber wax wool",
)
_RIVERS = _split("Ashel Brenn Cray Dovern Esk Faul Glim Hart Issel Lorn Mirr Orrin Pryde Sill Tave")
_MONTHS = _split(
    "January February March April May June July August September October November December",
)
_WORD_HEADS = _split(
    "amber apple barn bell birch bone brass brick cedar clay cloud coal copper corn dawn dew elm "
    "fern fire flax frost glass gold grain hay heath hill iron ivy lake lamp leaf marsh mill mint "
    "moon moss nut oak olive pearl pine plum rain reed river rose salt sand shell silver snow "
    "star stone storm straw thorn tide wheat willow wind wool",
)
_WORD_TAILS = _split(
    "bank basket bird bloom boat box bread cart cloth coat cup field fish gate hook house jar key "
    "knot lane light line mark mat path pot ring road roof room seed ship smith song spoon stool "
    "town tree vale ware weed work yard",
)
_SYLLABLES = _split("ba ce do fi ga hu jo ka lu me ni po qua ro su ta vi wo xe zu")

_FILLER = (
    "The council of {town} met in {month} and agreed to mend the road along the {river}.",
    "Most families there kept a small garden and sold {goods} on market days.",
    "A clerk named {person} wrote down the price of {goods} every week for {n} years.",
    "In {year} a hard winter closed the pass above {town} for {n} days.",
    "The {agency} sent two inspectors, who found the cellars dry and the accounts in order.",
    "Visitors remarked that the harbour smelled of {goods} and of fresh tar.",
    "Nobody could say who had planted the row of lime trees behind the mill.",
    "By {year} the number of workshops had fallen from {n} to barely half of that.",
    "The evening ferry to {town} was late, as it had been on most days that {month}.",
    "Older people still speak of the fair of {year}, when it rained from start to end.",
    "A letter from {person} praises the bread of the town and complains of its bells.",
    "The school took in {n} pupils that year, more than the hall had been built for.",
    "Its archive holds maps, tax rolls and a long quarrel over fishing in the {river}.",
    "After the flood the lower street was paved with {goods_mat} from the quarry at {town}.",
    "The {agency} asked for a second opinion before it paid for the new sluice.",
    "{person} argued that the toll was too high and that it fell on the wrong people.",
    "The choir sang in the square, and the shops stayed open until the lamps were lit.",
    "Trade in {goods} grew slowly at first and then more quickly after {year}.",
    "It took {n} carts to carry the old organ down to the river.",
    "Several letters were lost on the way, which explains the gaps in the record.",
    "The mayor kept bees and gave each new resident a jar of honey.",
    "In {month} the swifts come back, and the children count them from the bridge.",
    "A plan to join {town} and its neighbour under one office was dropped in {year}.",
    "The report gives no reason, but a note in the margin says that money was short.",
    "Two kinds of {goods} were made here, a plain one for use and a fine one for show.",
    "The station clock was known to run four minutes ahead of the one on the tower.",
    "{person} spent a whole {month} measuring the depth of the {river} with a knotted rope.",
    "Rents were paid in {goods} until well after {year}, and some said it was fairer.",
    "The library lends out tools as well as books, a habit that began during the strike.",
    "A fire in {year} spared the chapel but took the roofs of {n} houses.",
    "On clear days the hills beyond {town} can be seen from the upper windows.",
    "The bakers and the millers disagreed about weights, and the matter went to the {agency}.",
    "Work on the canal stopped each harvest, because the diggers went home to their fields.",
    "The painter {person} lived by the north gate and never finished a portrait on time.",
    "An inventory lists {n} ladders, nine buckets and one bell without a clapper.",
    "The road was longer than the map suggested, and the last mile was mostly mud.",
    "For a while the post came only on Tuesdays, carried by a man on a grey horse.",
    "The vote was close, and the losing side asked for the papers to be counted again.",
    "Rain gauges were set up in {year} and have been read every morning since.",
    "The {agency} later admitted that its first estimate had been too low.",
)
_MATERIALS = ("slate", "granite", "brick", "cobbles", "gravel")


class Corpus:
    """Draws names and prose. ``town``, ``person`` and ``agency`` never return a name twice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._used: set[str] = set()

    def town(self) -> str:
        return self._unique(lambda r: r.choice(_TOWN_HEADS) + r.choice(_TOWN_TAILS))

    def person(self) -> str:
        return self._unique(lambda r: f"{r.choice(_FIRST_NAMES)} {r.choice(_LAST_NAMES)}")

    def agency(self) -> str:
        return self._unique(lambda r: f"{r.choice(_BODIES)} of {r.choice(_FIELDS)}")

    def year(self) -> int:
        return self.rng.randint(1802, 1989)

    def job(self) -> str:
        return self.rng.choice(_JOBS)

    def goods(self) -> str:
        return self.rng.choice(_GOODS)

    def river(self) -> str:
        return self.rng.choice(_RIVERS)

    def month(self) -> str:
        return self.rng.choice(_MONTHS)

    def sentences(self) -> Iterator[str]:
        """An endless stream of filler sentences; no template comes twice within one round."""
        while True:
            for template in self.rng.sample(_FILLER, len(_FILLER)):
                yield template.format(
                    town=self.rng.choice(_TOWN_HEADS) + self.rng.choice(_TOWN_TAILS),
                    person=f"{self.rng.choice(_FIRST_NAMES)} {self.rng.choice(_LAST_NAMES)}",
                    agency=f"{self.rng.choice(_BODIES)} of {self.rng.choice(_FIELDS)}",
                    month=self.month(),
                    river=self.river(),
                    year=self.year(),
                    n=self.rng.randint(11, 99),
                    goods=self.goods(),
                    goods_mat=self.rng.choice(_MATERIALS),
                )

    def prose(self, words: int) -> str:
        """Filler of exactly ``words`` words (none for 0 or less); the last sentence may be cut."""
        parts: list[str] = []
        for sentence in self.sentences():
            if len(parts) >= words:
                break
            parts.extend(sentence.split())
        parts = parts[: max(words, 0)]
        if parts and not parts[-1].endswith("."):
            parts[-1] = parts[-1].rstrip(",") + "."
        return " ".join(parts)

    def _unique(self, draw: Callable[[random.Random], str]) -> str:
        for _ in range(10_000):
            name = draw(self.rng)
            if name not in self._used:
                self._used.add(name)
                return name
        raise RuntimeError(f"the corpus has run out of names after {len(self._used)}")


def fill_up(texts: Sequence[str], words: int, seed: str) -> list[str]:
    """Each text with prose behind it, so that all have ``words`` words together (or are as given).

    Every text draws from a stream of its own: one word more changes one text, not all that follow,
    which keeps the token count of the whole steady while a length is sought.
    """
    rooms = split_evenly(words - sum(count_words(text) for text in texts), len(texts))
    return [
        f"{text} {Corpus(random.Random(f'{seed}/{i}')).prose(room)}".rstrip()
        for i, (text, room) in enumerate(zip(texts, rooms, strict=True))
    ]


def compute_vocabulary() -> list[str]:
    """All compound words that lists are drawn from, each once, in a fixed order."""
    return sorted({head + tail for head in _WORD_HEADS for tail in _WORD_TAILS})


def draw_coded_word(rng: random.Random) -> str:
    """A word of no language, so that only its count in the text can make it an answer."""
    return "".join(rng.choices(_SYLLABLES, k=3))


def count_words(text: str) -> int:
    """Whitespace words, the unit that all sizes here are given in."""
    return len(text.split())


def split_evenly(total: int, parts: int) -> list[int]:
    """``total`` as ``parts`` integers that differ by at most one: 7 in 3 gives [3, 2, 2]."""
    small, rest = divmod(max(total, 0), parts)
    return [small + (i < rest) for i in range(parts)]
