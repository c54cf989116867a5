"""Tests of corpora from Parquet files in object stores.

pyarrow's S3 client talks to a local stand-in server. The client of the Hugging Face Hub is
replaced.
"""

import io
import sys
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3_stand_in import S3StandIn

from forerun._proxies.data.corpus import tokenize
from forerun._proxies.data.remote import list_remote
from forerun._proxies.data.tokens import DataError, TokenStore

TEXTS = [f"document {number} of some words" for number in range(40)]


def to_parquet(texts):
    """Return a Parquet file of texts as bytes."""
    content = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), content)
    return content.getvalue()


@pytest.fixture
def server(monkeypatch):
    """A server of one bucket with Parquet and other files."""
    for name, value in (
        ("ACCESS_KEY_ID", "t"),
        ("SECRET_ACCESS_KEY", "t"),
        ("EC2_METADATA_DISABLED", "true"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    server = S3StandIn(
        "bucket",
        {
            "data/a.parquet": to_parquet(TEXTS[:20]),
            "data/sub/b.parquet": to_parquet(TEXTS[20:]),
            "data/readme.txt": b"x",
            "cut.parquet": to_parquet(TEXTS)[:-20],
            "other/c.csv": b"a,b",
        },
    )
    yield server
    server.close()


def make_uri(server, path):
    """Return the URI of a path in the bucket."""
    return f"s3://bucket/{path}?scheme=http&endpoint_override={server.endpoint}&region=us-east-1"


def test_remote_folder_gives_the_same_corpus_as_local_files(tmp_path, server):
    source = tmp_path / "texts"
    source.mkdir()
    (source / "a.parquet").write_bytes(to_parquet(TEXTS[:20]))
    (source / "b.parquet").write_bytes(to_parquet(TEXTS[20:]))
    local = tokenize([source], tmp_path / "local", validation_fraction=0.3)
    remote = tokenize([make_uri(server, "data")], tmp_path / "remote", validation_fraction=0.3)
    assert remote.data_id == local.data_id
    assert [(kind.suffix, kind.num_files) for kind in remote.not_read] == [(".txt", 1)]
    assert TokenStore(tmp_path / "remote").manifest.num_documents == 40
    assert any("sub/b.parquet" in line and line.startswith("GET") for line in server.requests)


def test_single_remote_files_can_be_mixed(tmp_path, server):
    sources = {
        "first": [make_uri(server, "data/a.parquet")],
        "second": [make_uri(server, "data/sub/b.parquet")],
    }
    manifest = tokenize(sources, tmp_path / "mixed", validation_fraction=0.3)
    assert [source.name for source in manifest.sources] == ["first", "second"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nothing", "no .parquet file is there"),
        ("other", "1 other"),
        ("cut.parquet", "cannot be read as parquet"),
    ],
)
def test_remote_path_without_a_corpus_is_refused_with_its_uri(tmp_path, server, path, words):
    with pytest.raises(DataError, match=words) as caught:
        tokenize([make_uri(server, path)], tmp_path / "out")
    assert f"s3://bucket/{path}" in str(caught.value)


@pytest.mark.parametrize("uri", ["https://host/a.parquet", "ftp://host/a.parquet"])
def test_unknown_scheme_is_refused(uri):
    with pytest.raises(DataError, match="hf://, s3://, gs://"):
        list_remote(uri)


def test_password_in_a_uri_is_refused_and_not_repeated():
    with pytest.raises(DataError, match="password") as caught:
        list_remote("s3://key:sesame@bucket/data")
    assert "sesame" not in str(caught.value)


def test_hub_is_read_through_the_file_system_of_its_client(tmp_path, monkeypatch):
    """fsspec's file system in memory replaces the Hub."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe("/datasets/someone/texts/data/a.parquet", to_parquet(TEXTS))
    monkeypatch.setitem(
        sys.modules, "huggingface_hub", types.SimpleNamespace(HfFileSystem=lambda: memory)
    )
    manifest = tokenize(
        ["hf://datasets/someone/texts/data"], tmp_path / "hub", validation_fraction=0.3
    )
    assert manifest.num_documents == 40


class UnreachableFileSystem:
    """A file system that raises an error class of its own, not one of Python's."""

    class FailureError(Exception):
        pass

    protocol = "broken"

    def __getattr__(self, name):
        def fail(*_, **__):
            raise self.FailureError("the hub is away\nfor long")

        return fail


def test_unreachable_hub_is_bad_input(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "huggingface_hub", types.SimpleNamespace(HfFileSystem=UnreachableFileSystem)
    )
    with pytest.raises(DataError, match=r"hf://datasets/a/b cannot be .*: the hub is away$"):
        list_remote("hf://datasets/a/b")


def test_missing_client_of_the_hub_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match="pip install huggingface_hub"):
        list_remote("hf://datasets/someone/texts")
