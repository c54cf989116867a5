"""Sources of public scaling runs, and their download.

`datasets.py` imports this module: `make data` fetches the files, and `make data FROM=DIR` takes
them from a folder.

A source is a few files of a public repository at one commit. `benchmarks/data.sha256` lists the
files with their digests, in the format of `sha256sum`; a file is used only if its digest is the
listed one. The files go to `benchmarks/data/`, which git ignores: they are no part of this project.
Files of a repository that states no licence must not be passed on.
"""

from __future__ import annotations

import functools
import hashlib
import os
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from forerun._proxies.core.plain_files import open_plain, read_plain

FOLDER = Path(__file__).parents[1] / "data"
MANIFEST = Path(__file__).parents[1] / "data.sha256"
NO_LICENCE = "none stated: to look at, not to pass on"
MAX_FILE_BYTES = 2**25
"""Size above which files of the folder DIR are skipped; the largest listed file has 4 MiB."""

_HOST = "https://raw.githubusercontent.com"
_TIMEOUT_SECONDS = 30

Reader = Callable[[str, str], bytes]
"""Returns the content of a file, given its address and its digest; raises OSError if it cannot."""


@functools.cache
def read_manifest(path: Path = MANIFEST) -> Mapping[str, Mapping[str, str]]:
    """Return the digests of all sources' files: source name to path in the repository to sha256."""
    sources: dict[str, dict[str, str]] = {}
    for line in path.read_text(encoding="ascii").splitlines():
        digest, _, name = line.partition("  ")
        source_name, _, file_path = name.partition("/")
        sources.setdefault(source_name, {})[file_path] = digest
    return sources


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Files of one repository at one commit."""

    name: str
    """Name of the folder below `benchmarks/data/`, and of the entries in `data.sha256`."""
    repository: str
    commit: str
    licence: str
    is_inert: bool = True
    """False for files that Python could run while it reads them: they are stored as NAME.inert,
    which no library recognizes, and `inert_pickle` reads them."""
    digests: Mapping[str, str] | None = None
    """Digest of each file by its path in the repository; None for those of `data.sha256`."""

    @property
    def stated(self) -> str:
        """Repository and commit as text, as results and lists state them."""
        return f"{self.repository} {self.commit[:8]}"

    def list_files(self, folder: Path) -> list[tuple[str, Path, str]]:
        """Return each file's address, its place below `folder`, and its digest."""
        digests = read_manifest()[self.name] if self.digests is None else self.digests
        root = f"{_HOST}/{self.repository}/{self.commit}"
        files = []
        for path, digest in digests.items():
            name = Path(path).name
            stored_name = name if self.is_inert else f"{name.split('.')[0]}.inert"
            files.append(
                (f"{root}/{urllib.parse.quote(path)}", folder / self.name / stored_name, digest)
            )
        return files


SOURCES = (
    Source(
        name="chinchilla",
        repository="epoch-research/analyzing-chinchilla",
        commit="92258837425e1b5f2851d624287f0120583a3d0e",
        licence=NO_LICENCE,
    ),
    Source(
        name="steplaw",
        repository="step-law/steplaw",
        commit="32a8f4cc50247695fb56cc6c9117abdf67c97763",
        licence=NO_LICENCE,
    ),
    Source(
        name="loss_to_loss",
        repository="KempnerInstitute/loss-to-loss-notebooks",
        commit="457ce81a019019bc3981937c20a70c52f5fad436",
        licence=NO_LICENCE,
    ),
    Source(
        name="misfitting",
        repository="hadasah/scaling_laws",
        commit="1f3708c0a12df0effb0ee906b1da5f9f0ff4f4f1",
        licence=NO_LICENCE,
    ),
    Source(
        name="isoflops",
        repository="Open-Athena/scaling-law-analysis",
        commit="3e0656ee3dce1a2c89aa67691920f5eb9d30f0fc",
        licence=NO_LICENCE,
    ),
    Source(
        name="olmo_ladder",
        repository="allenai/OLMo-ladder",
        commit="67a3f440f787d020da35e3ca8eeae475fae754f5",
        licence="Apache-2.0",
    ),
    Source(
        name="open_lm",
        repository="mlfoundations/scaling",
        commit="a003c4913793ac2ae7ef87b28ecb562955d026d5",
        licence="MIT",
    ),
    Source(
        name="routing",
        repository="google-deepmind/scaling_laws_for_routing",
        commit="42da0c392b127df2c01fa7b705f72396050d05e5",
        licence="CC-BY-4.0",
    ),
    Source(
        name="quest",
        repository="IST-DASLab/QuEST",
        commit="c295afda142c03a89d2af04653881beccf459aa1",
        licence="MIT",
    ),
    Source(
        name="xlstm",
        repository="NX-AI/xlstm_scaling_laws",
        commit="604bb3062d3a7681bb33e467108cb0a6f81267fc",
        licence=NO_LICENCE,
        is_inert=False,
    ),
    Source(
        name="supercollapse",
        repository="shikaiqiu/supercollapse",
        commit="003336f61d167a47cbe8a356faac85759daacdff",
        licence=NO_LICENCE,
        is_inert=False,
    ),
    Source(
        name="openwebtext2",
        repository="formll/resolving-scaling-law-discrepancies",
        commit="0dc60d91b8a525858a3067fc9e4a46ff5374cc6f",
        licence="MIT",
        is_inert=False,
    ),
    Source(
        name="colpret",
        repository="IBM/ColPret",
        commit="16f23bbe054277ddc4afd07a972dd7cfbe3f48c3",
        licence="MIT",
    ),
    Source(
        name="mixing_laws",
        repository="yegcjs/mixinglaws",
        commit="8ad3e1244b53294ded55a96ae325f4112ce3bc63",
        licence=NO_LICENCE,
    ),
)


def find_source(name: str) -> Source:
    """Return the source of this name."""
    return next(source for source in SOURCES if source.name == name)


def compute_digest(content: bytes) -> str:
    """Return the sha256 of a file's content, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def is_here(source: Source, folder: Path = FOLDER) -> bool:
    """Return whether all files of a source are in place with the listed digests."""
    files = source.list_files(folder)
    return all(
        path.is_file() and compute_digest(path.read_bytes()) == digest for _, path, digest in files
    )


def read_url(url: str, digest: str) -> bytes:
    """Return the content of an address.

    Raises:
        OSError: The address cannot be reached.
    """
    del (
        digest
    )  # The reader that `index_folder` returns needs the digest; here an address is enough.
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
        content: bytes = answer.read()
    return content


def index_folder(folder: Path) -> Reader:
    """Return a reader that takes files from a folder and its subfolders by digest.

    The names of the files do not matter.

    Raises:
        OSError: The folder cannot be read.
    """
    os.scandir(folder).close()
    paths: dict[str, Path] = {}
    for parent, _, names in os.walk(folder):
        for path in (Path(parent) / name for name in names):
            if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
                paths.setdefault(_hash_file(path), path)

    def read_by_digest(url: str, digest: str) -> bytes:
        if digest not in paths:
            raise FileNotFoundError(f"no file below {folder} has its sha256 {digest}")
        return read_plain(paths[digest], MAX_FILE_BYTES)

    return read_by_digest


def _hash_file(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(source: Source, folder: Path = FOLDER, read: Reader = read_url) -> str | None:
    """Put all files of a source in place, or none of them.

    Returns:
        None if the files are in place, otherwise the problem.
    """
    if is_here(source, folder):
        return None
    contents: dict[Path, bytes] = {}
    for url, path, digest in source.list_files(folder):
        try:
            contents[path] = read(url, digest)
        except OSError as error:
            return f"{url} cannot be read: {error}"
        if compute_digest(contents[path]) != digest:
            return (
                f"{url} does not have the sha256 listed in {MANIFEST.name}; no file of "
                f"{source.name} is kept"
            )
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(content)
        partial.replace(path)
    return None
