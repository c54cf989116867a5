"""Parquet in object stores: pyarrow's own S3 client against a stand-in server; what is refused
before it is asked.
"""

import io
import sys
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3_stand_in import Server

from proxies.data.corpus import tokenize
from proxies.data.remote import find_remote
from proxies.data.tokens import DataError, TokenStore

TEXTS = [f"document {number} of some words" for number in range(40)]


def parquet(texts, column="text"):
    content = io.BytesIO()
    pq.write_table(pa.table({column: texts}), content)
    return content.getvalue()


@pytest.fixture
def server(monkeypatch):
    for name, value in (
        ("ACCESS_KEY_ID", "t"),
        ("SECRET_ACCESS_KEY", "t"),
        ("EC2_METADATA_DISABLED", "true"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    found = Server(
        "bucket",
        {
            "data/a.parquet": parquet(TEXTS[:20]),
            "data/sub/b.parquet": parquet(TEXTS[20:]),
            "data/readme.txt": b"x",
            "cut.parquet": parquet(TEXTS)[:-20],
            "other/c.csv": b"a,b",
        },
    )
    yield found
    found.close()


def uri(server, path):
    return f"s3://bucket/{path}?scheme=http&endpoint_override={server.endpoint}&region=us-east-1"


def test_a_folder_of_a_store_is_the_corpus_of_its_files(tmp_path, server):
    source = tmp_path / "texts"
    source.mkdir()
    (source / "a.parquet").write_bytes(parquet(TEXTS[:20]))
    (source / "b.parquet").write_bytes(parquet(TEXTS[20:]))
    here = tokenize([source], tmp_path / "here", validation_fraction=0.3)
    there = tokenize([uri(server, "data")], tmp_path / "there", validation_fraction=0.3)
    assert there.data_id == here.data_id
    assert [(one.suffix, one.num_files) for one in there.not_read] == [(".txt", 1)]
    assert TokenStore(tmp_path / "there").manifest.num_documents == 40
    assert any("sub/b.parquet" in line and line.startswith("GET") for line in server.asked)


def test_a_single_file_may_be_named_and_mixed(tmp_path, server):
    sources = {"one": [uri(server, "data/a.parquet")], "two": [uri(server, "data/sub/b.parquet")]}
    manifest = tokenize(sources, tmp_path / "mixed", validation_fraction=0.3)
    assert [source.name for source in manifest.sources] == ["one", "two"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nothing", "no .parquet file is there"),
        ("other", "1 other"),
        ("cut.parquet", "cannot be read as parquet"),
    ],
)
def test_what_holds_no_corpus_is_named_by_its_uri(tmp_path, server, path, said):
    with pytest.raises(DataError, match=said) as caught:
        tokenize([uri(server, path)], tmp_path / "out")
    assert f"s3://bucket/{path}" in str(caught.value)


@pytest.mark.parametrize("given", ["https://host/a.parquet", "ftp://host/a.parquet"])
def test_another_scheme_is_refused_by_name(given):
    with pytest.raises(DataError, match="hf://, s3://, gs://"):
        find_remote(given)


def test_a_password_in_a_uri_is_refused_and_not_repeated():
    with pytest.raises(DataError, match="password") as caught:
        find_remote("s3://key:sesame@bucket/data")
    assert "sesame" not in str(caught.value)


def test_the_hub_goes_through_its_own_file_system(tmp_path, monkeypatch):
    """Its client is a stand-in: fsspec's file system in memory."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe("/datasets/someone/texts/data/a.parquet", parquet(TEXTS))
    monkeypatch.setitem(
        sys.modules, "huggingface_hub", types.SimpleNamespace(HfFileSystem=lambda: memory)
    )
    manifest = tokenize(
        ["hf://datasets/someone/texts/data"], tmp_path / "hub", validation_fraction=0.3
    )
    assert manifest.num_documents == 40


class Broken:
    """A client's own exception, which is none of Python's."""

    class FailureError(Exception):
        pass

    protocol = "broken"

    def __getattr__(self, name):
        def fail(*_, **__):
            raise self.FailureError("the hub is away\nfor long")

        return fail


def test_a_hub_that_cannot_be_reached_is_bad_input(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfFileSystem=Broken))
    with pytest.raises(DataError, match=r"hf://datasets/a/b cannot be .*: the hub is away$"):
        find_remote("hf://datasets/a/b")


def test_without_its_client_the_hub_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match="pip install huggingface_hub"):
        find_remote("hf://datasets/someone/texts")
