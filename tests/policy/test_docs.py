"""Documentation cannot rot: each link, path, command and environment name that a page mentions exists."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import lru_cache

from .options import command_line, environment, subcommands
from .tree import ROOT, Finding, assert_clean, files, make_targets, read, texts, tracked

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"\.?\w[\w.*<>{},-]*(/[\w.*<>{},-]+)+/?")
MAKE = re.compile(r"(?:^|[\s`;&(])make ([a-z][a-z-]*)\b", re.MULTILINE)
COMMAND = re.compile(r"(?:^|[\s`;&(])(?<!import )zerokern ([a-z]+)\b", re.MULTILINE)
ENVIRONMENT = re.compile(r"\bZEROKERN_[A-Z_]+\b")
PLACEHOLDER = re.compile(r"<[^>]*>|\{[^}]*\}")

# Places of one machine, and hosts that only an installer should know. No pattern finds itself.
MACHINE = re.compile(r"(?<![\w.~-])/(?:tmp|work|root|home)(?![\w-])")
HOST = re.compile(
    r"(?:python)hosted\.org|download\.(?:pytorch)\.org|-index-(?:url)|--index-(?:url)|--find-(?:links)|file:(?://)"
)


@lru_cache(maxsize=1)
def known() -> dict[str, frozenset[str]]:
    folders = {"/".join(path.split("/")[:n]) for path in tracked() for n in range(1, path.count("/") + 1)}
    return {
        "paths": frozenset(tracked()) | folders,
        "targets": frozenset(make_targets()),
        "commands": frozenset(subcommands(command_line())),
        "environment": frozenset(environment()),
    }


def code(text: str) -> str:
    """The code of a page: its spans and its fenced blocks, one per line."""
    return "\n".join(FENCE.findall(text) + SPAN.findall(FENCE.sub("", text)))


def line_of(text: str, part: str) -> int:
    return text[: max(text.find(part), 0)].count("\n") + 1


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text), flags=re.MULTILINE)}


def broken_links(path: str, text: str) -> list[str]:
    broken = []
    for link in LINK.findall(FENCE.sub("", text)):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        page = (ROOT / path).parent / target
        headings = anchors(page.read_text(encoding="utf-8") if page.suffix == ".md" and page.is_file() else text)
        if not page.exists() or (anchor and anchor not in headings):
            broken.append(link)
    return broken


def lost_paths(text: str, paths: frozenset[str]) -> list[str]:
    """Paths of code spans that begin at a folder of this repository and lead nowhere; <op> stands for any name."""
    tops = {path.split("/")[0] for path in paths}
    lost = []
    for span in SPAN.findall(FENCE.sub("", text)):
        if not PATH.fullmatch(span) or span.split("/")[0] not in tops:
            continue
        pattern = PLACEHOLDER.sub("*", span.rstrip("/"))
        if not any(fnmatchcase(path, pattern) for path in paths):
            lost.append(span)
    return lost


def rot(path: str, text: str, known: dict[str, frozenset[str]]) -> list[Finding]:
    said = code(text)
    gone = [(link, "leads nowhere") for link in broken_links(path, text)]
    gone += [(span, "is no path of this repository") for span in lost_paths(text, known["paths"])]
    gone += [(f"make {t}", "is no target") for t in MAKE.findall(said) if t not in known["targets"]]
    gone += [(f"zerokern {c}", "is no command") for c in COMMAND.findall(said) if c not in known["commands"]]
    gone += [(name, "is read nowhere") for name in ENVIRONMENT.findall(text) if name not in known["environment"]]
    return [Finding(path, line_of(text, what), f"{what} {says}") for what, says in dict.fromkeys(gone)]


def of_one_machine(path: str, text: str) -> list[Finding]:
    found = MACHINE.findall(text) + HOST.findall(text)
    return [Finding(path, line_of(text, part), f"{part} exists on one machine only") for part in found]


PAGES = files(".md")


def test_pages_say_what_is() -> None:
    assert_clean([finding for path in PAGES for finding in rot(path, read(path), known())])


def test_every_environment_name_is_documented() -> None:
    pages = "\n".join(read(path) for path in PAGES)
    assert [name for name in environment() if name not in pages] == []


def test_every_folder_of_sources_has_a_page() -> None:
    layers = "kernels memory io comm schedule zero optim checkpoint activations parallel building interop debug".split()
    wanted = {
        f"{folder}/README.md" for folder in ("cpu", "bench", "examples", "tests", *map("zerokern/{}".format, layers))
    }
    assert sorted(wanted - set(PAGES)) == []


def test_no_file_speaks_of_one_machine() -> None:
    assert_clean([finding for path in texts() for finding in of_one_machine(path, read(path))])


def test_rot_is_found() -> None:
    here = {
        "paths": frozenset({"cpu", "cpu/adam", "cpu/adam/adam.inl.h", "tests/kernels/test_adam.py"}),
        "targets": frozenset({"test"}),
        "commands": frozenset({"info"}),
        "environment": frozenset({"ZEROKERN_THREADS"}),
    }
    sound = "# A b\n[x](#a-b) `cpu/<op>/` `tests/kernels/test_*.py` `a/b` `make test` `zerokern info` ZEROKERN_THREADS"
    assert rot("README.md", sound, here) == []
    rotten = "\n[x](no.md)\n`cpu/lion/`\n```\nmake tets\nzerokern imfo\n```\nZEROKERN_TRHEADS"
    found = [str(finding) for finding in rot("README.md", rotten, here)]
    assert found == [
        "README.md:2: no.md leads nowhere",
        "README.md:3: cpu/lion/ is no path of this repository",
        "README.md:5: make tets is no target",
        "README.md:6: zerokern imfo is no command",
        "README.md:8: ZEROKERN_TRHEADS is read nowhere",
    ]


def test_a_place_of_one_machine_is_found() -> None:
    for text in ("cd {}tmp/x", "'{}root'", "({}home/me)"):
        assert len(of_one_machine("a.md", text.format("/"))) == 1
    assert len(of_one_machine("a.md", "pip install --index-" + "url=x")) == 1
    for text in ("a/work/b", "framework/home", "https://www.apache.org/licenses/", "/homes"):
        assert of_one_machine("a.md", text) == []
