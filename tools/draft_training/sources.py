"""Prompts made of what Debian's packages hold: manuals and other long texts, dictionaries, sayings, descriptions.

Owns: which packages, how their files are read, and the mixture. Does not know: models.

    documents and passages   python3.11-doc  perl-doc  git-doc  debian-reference-en  jargon-text  anarchism
    terms                    dict-foldoc
    topics                   wordnet-base: nouns that texts use
    sayings                  fortunes
    descriptions             the list of packages itself

Packages are downloaded by apt-get and unpacked, not installed.
"""

import gzip
import random
import re
import subprocess
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

from . import templates
from .prompts import Prompt, is_held_out

DOCUMENTS = {
    "python3.11-doc": "usr/share/doc/python3.11/html/_sources/**/*.txt",
    "perl-doc": "usr/share/perl/*/pod/perl*.pod",
    "git-doc": "usr/share/doc/git/**/*.txt",
    "debian-reference-en": "usr/share/debian-reference/*.txt.gz",
    "jargon-text": "usr/share/doc/jargon-text/jargon.txt.gz",
    "anarchism": "usr/share/doc/anarchism/markdown/sec*.md.gz",
}
PACKAGES = (*DOCUMENTS, "dict-foldoc", "wordnet-base", "fortunes")
SIZES = (36000, 4500, 18000, 4500, 9000, 9000)
"""Characters of documents, by turns: from a thousand tokens to eight thousand."""

MAX_CHARS = 6_000_000
"""Of one package."""

HELD_OUT_EVERY = 8
"""Of the longest documents."""

ASKED_SHARE, FOLLOWED_SHARE = 0.4, 0.25
"""Of documents that are asked about, rather than gone on with; of chats with a second turn."""


def fetch(folder: Path, packages: Sequence[str] = PACKAGES) -> list[str]:
    """Download and unpack packages into a folder each. Returns their files' names, which say the versions."""
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.glob("*.deb")):
        subprocess.run(["apt-get", "download", "-q", *packages], cwd=folder, check=True)
    for path in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(path), str(folder / path.name.partition("_")[0])], check=True)
    return sorted(path.name for path in folder.glob("*.deb"))


def make_prompts(folder: Path, num_chats: int, seed: int = 0) -> list[Prompt]:
    """folder: from `fetch`. In an order in which any beginning is a fair sample."""
    rng = random.Random(seed)
    documents = [prompt for package in DOCUMENTS for prompt in _documents(folder, package, rng)]
    passages = [passage for prompt in documents if not prompt.held_out for passage in _passages(prompt.text)]
    chats = _Chats(
        rng,
        topics=_topics(folder),
        terms=_terms(folder),
        quotes=_quotes(folder),
        programs=_programs(),
        passages=passages,
    )
    prompts = documents + [chats.one() for _ in range(num_chats)]
    rng.shuffle(prompts)
    written = [Prompt("chat", "chat, written", [text], held_out=True) for text in templates.WRITTEN]
    return written + prompts


class _Chats:
    """A mixture of forms of questions over topics, terms, passages and so on."""

    def __init__(
        self,
        rng: random.Random,
        *,
        topics: Sequence[str],
        terms: Sequence[str],
        quotes: Sequence[str],
        programs: Sequence[str],
        passages: Sequence[str],
    ) -> None:
        self._rng, self._topics, self._terms = rng, topics, terms
        self._kinds = [
            (0.50, templates.TOPIC, topics),
            (0.12, templates.TERM, terms),
            (0.20, templates.PASSAGE, passages),
            (0.08, templates.QUOTE, quotes),
            (0.06, templates.PROGRAM, programs),
            (0.04, templates.SUM, ("",)),
        ]

    def one(self) -> Prompt:
        rng = self._rng
        [(_, forms, things)] = rng.choices(self._kinds, [kind[0] for kind in self._kinds])
        thing, other = rng.choice(things), rng.choice(things)
        turn = rng.choice(forms).format(x=thing, y=other, p=thing, a=rng.randint(20, 999), b=rng.randint(2, 19))
        turns = [turn, rng.choice(templates.FOLLOW_UP)] if rng.random() < FOLLOWED_SHARE else [turn]
        # What is held out is held out in every form of question.
        return Prompt("chat", "chat", turns, held_out=is_held_out(thing or turn))


def _documents(folder: Path, package: str, rng: random.Random) -> Iterator[Prompt]:
    texts = [read_file(path) for path in sorted((folder / package).glob(DOCUMENTS[package]))]
    rng.shuffle(texts)
    paragraphs = re.split(r"\n\s*\n", "\n\n".join(texts)[:MAX_CHARS])
    parts: list[str] = []
    num_chars, num_long = 0, 0
    sizes = cycle(SIZES)
    size = next(sizes)
    for paragraph in paragraphs:
        parts.append(paragraph)
        num_chars += len(paragraph) + 2
        if num_chars < size:
            continue
        held_out = False
        if size == max(SIZES):
            num_long += 1
            held_out = num_long % HELD_OUT_EVERY == 0
        turns = [rng.choice(templates.ABOUT_DOCUMENT)] if rng.random() < ASKED_SHARE else []
        group = "document, asked" if turns else "document"
        yield Prompt("document", group, turns, "\n\n".join(parts), held_out)
        parts, num_chars, size = [], 0, next(sizes)


def _passages(text: str) -> list[str]:
    """Paragraphs of prose."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [part for part in paragraphs if 200 < len(part) < 1500 and part[0].isupper() and part.endswith(".")]


def _topics(folder: Path) -> list[str]:
    """Nouns that tagged texts have at least twice (cntlist: sense key, sense number, count)."""
    found: dict[str, int] = {}
    for line in read_file(folder / "wordnet-base/usr/share/wordnet/cntlist.rev").splitlines():
        key, _, count = line.split(" ")
        lemma, _, sense = key.partition("%")
        if sense.startswith("1:") and int(count) >= 2 and len(lemma) > 2:
            found[lemma.replace("_", " ")] = int(count)
    return sorted(found)


def _terms(folder: Path) -> list[str]:
    """Entries: lines that stand at the margin."""
    lines = read_file(folder / "dict-foldoc/usr/share/dictd/foldoc.dict.dz").splitlines()
    return sorted({line.strip() for line in lines[100:] if re.fullmatch(r"[A-Za-z][A-Za-z0-9 +/-]{2,40}", line)})


def _quotes(folder: Path) -> list[str]:
    files = (path for path in (folder / "fortunes/usr/share/games/fortunes").iterdir() if not path.suffix)
    quotes = (quote.strip() for path in sorted(files) for quote in read_file(path).split("\n%\n"))
    return [quote for quote in quotes if 40 < len(quote) < 600]


def _programs() -> list[str]:
    """One line for each package that is a program, as the list of packages has it."""
    listed = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^Package: (\S+)$(?:\n.+)*?\nDescription(?:-en)?: (.+)$", listed, re.MULTILINE)
    lines = (f"{name}: {description}" for name, description in found)
    return [line for line in lines if len(line) > 40 and not line.startswith(("lib", "python3-", "golang-", "node-"))]


def read_file(path: Path) -> str:
    """Of a text that may be packed."""
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix in (".gz", ".dz") else content).decode("utf-8", "replace")
