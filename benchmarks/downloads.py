"""Public results of scaling runs, fetched by whoever wants them: `make data`.

Each set is a few files of a public repository at one commit, checked against a digest written here before anything
of it is used. The files go to `benchmarks/data/`, which git ignores: nothing of them is part of this project, and sets
whose repository states no licence may be looked at by who fetches them, and not passed on.
"""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "data"
NO_LICENCE = "none stated: to look at, not to pass on"

_HOST = "https://raw.githubusercontent.com"
_TIMEOUT_SECONDS = 30

_OPEN_LM = {
    "c4_original": ("16.0", "16.0 32.0", "16.0 32.0", "16.0 32.0", "1.0 4.0"),
    "rw_original": ("16.0 32.0", "16.0 32.0", "16.0 32.0", "16.0 32.0", "1.0 16.0"),
}
_OPEN_LM_SHAPES = ("d=1024_l=24_h=8", "d=512_l=8_h=4", "d=576_l=24_h=8", "d=96_l=8_h=4")


def open_lm_paths(data: str) -> tuple[str, ...]:
    """Files of the runs on one data set in mlfoundations/scaling: four shapes at seven or eight lengths, 1B and 7B."""
    *longest, largest = _OPEN_LM[data]
    names = [
        f"{shape}-{length}"
        for shape, more in zip(_OPEN_LM_SHAPES, longest, strict=True)
        for length in ("0.25 0.5 1.0 2.0 4.0 8.0 " + more).split()
    ]
    names += [f"open_lm_1b-{length}" for length in largest.split()] + ["open_lm_7b-1.0"]
    return tuple(f"exp_data/models/{data}-{name}.json" for name in names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Files of one repository at one commit."""

    name: str
    """Of the folder below `benchmarks/data/`."""
    repository: str
    commit: str
    licence: str
    paths: tuple[str, ...]
    sha256: str
    """Of the files' sha256 digests in hexadecimal, joined in the order of `paths`."""

    @property
    def stated(self) -> str:
        """Where it comes from, in words."""
        return f"{self.repository} {self.commit[:8]}"

    def urls(self) -> tuple[str, ...]:
        """One address a path."""
        return tuple(f"{_HOST}/{self.repository}/{self.commit}/{urllib.parse.quote(path)}" for path in self.paths)

    def files(self, folder: Path) -> tuple[Path, ...]:
        """Where the files lie; by their last names, which differ within a source."""
        return tuple(folder / self.name / Path(path).name for path in self.paths)


SOURCES = (
    Source(
        name="chinchilla",
        repository="epoch-research/analyzing-chinchilla",
        commit="92258837425e1b5f2851d624287f0120583a3d0e",
        licence=NO_LICENCE,
        paths=("data/svg_extracted_data.csv",),
        sha256="2968aade8c90338a848b9881a1ea60f0bfd7fb65b524227cb46bf89a24ec6566",
    ),
    Source(
        name="steplaw",
        repository="step-law/steplaw",
        commit="32a8f4cc50247695fb56cc6c9117abdf67c97763",
        licence=NO_LICENCE,
        paths=("data/dense_lr_bs_loss.csv",),
        sha256="1690c4bb1d062972e976e1ef56fd049876d52120f8481dc564d79bb6e1298ca7",
    ),
    Source(
        name="loss_to_loss",
        repository="KempnerInstitute/loss-to-loss-notebooks",
        commit="457ce81a019019bc3981937c20a70c52f5fad436",
        licence=NO_LICENCE,
        paths=("data/sweep.csv",),
        sha256="a27424dabbdf4e13dfa604251667c731fcbe17a65084ffcf5f38756b8d2a0508",
    ),
    Source(
        name="misfitting",
        repository="hadasah/scaling_laws",
        commit="1f3708c0a12df0effb0ee906b1da5f9f0ff4f4f1",
        licence=NO_LICENCE,
        paths=("data/scaling_results_last_ckpt_only.csv",),
        sha256="8438b1412f657ed4767523eb3c7152849f57093b46869655fbfa7f882afbc012",
    ),
    Source(
        name="isoflops",
        repository="Open-Athena/scaling-law-analysis",
        commit="3e0656ee3dce1a2c89aa67691920f5eb9d30f0fc",
        licence=NO_LICENCE,
        paths=(
            "data/isoflops/extract/isoflops.csv",
            *(f"data/isoflops/extract/marin_202603/raw/isoflop-{data}.csv" for data in ("comma", "dclm", "nemotron")),
        ),
        sha256="fdf4e0b904ec85a1c65e8a9e6a5736e2a2673a1d11d25f01243ed7e6c8f8850a",
    ),
    Source(
        name="olmo_ladder",
        repository="allenai/OLMo-ladder",
        commit="67a3f440f787d020da35e3ca8eeae475fae754f5",
        licence="Apache-2.0",
        paths=tuple(
            f"src/scripts/paper/data/ladder-runs/{size}-{length}xC.csv"
            for size in ("190M", "370M", "760M", "1B", "3B")
            for length in ("0.5", "1", "2", "5", "10")
        ),
        sha256="edcb04a2476924a23a379d0a1c5d10f3880f9c93c749c686ee6b1179231046f7",
    ),
    Source(
        name="open_lm",
        repository="mlfoundations/scaling",
        commit="a003c4913793ac2ae7ef87b28ecb562955d026d5",
        licence="MIT",
        paths=open_lm_paths("c4_original") + open_lm_paths("rw_original"),
        sha256="ad6c00270bb3d5d809acb3ba18454eb0f3dfb5f40016b6603d773e3320a997bb",
    ),
)


def source(name: str) -> Source:
    """The source of this name."""
    return next(each for each in SOURCES if each.name == name)


def digest(files: list[bytes]) -> str:
    """What `Source.sha256` is of."""
    return hashlib.sha256("".join(hashlib.sha256(content).hexdigest() for content in files).encode()).hexdigest()


def is_here(each: Source, folder: Path = FOLDER) -> bool:
    """Whether all files of a source are there and as they should be."""
    files = each.files(folder)
    return all(path.is_file() for path in files) and digest([path.read_bytes() for path in files]) == each.sha256


def read_url(url: str) -> bytes:
    """The content of an address.

    Raises:
        OSError: it cannot be had.
    """
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
        content: bytes = answer.read()
    return content


def download(each: Source, folder: Path = FOLDER, read: Callable[[str], bytes] = read_url) -> str | None:
    """Put a source's files in place, all or none of them; None if that worked, else why it did not."""
    if is_here(each, folder):
        return None
    contents: list[bytes] = []
    for url in each.urls():
        try:
            contents.append(read(url))
        except (OSError, urllib.error.URLError) as error:
            return f"{url} cannot be reached: {error}"
    if digest(contents) != each.sha256:
        return f"{each.stated}: the files are not those of the digest written down; none is kept"
    for path, content in zip(each.files(folder), contents, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(content)
        partial.replace(path)
    return None
