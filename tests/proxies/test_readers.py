import gzip
import tracemalloc

import pyarrow as pa
import pytest
from corpus_cases import READING, compressed, contents, jsonl, parquet

from proxies.data import text_readers
from proxies.data.documents import ReaderOptions, recognise
from proxies.data.tokens import DataError


def refusal(path, reading=READING):
    with pytest.raises(DataError) as caught:
        contents(path, reading)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_jsonl_gives_a_document_per_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "one"}\n\n \r\n{"id": 5, "text": "zw\\u00f6lf\\n"}\r\n{"text": '
        b'null}\n{"text": ""}'
    )
    assert contents(path) == [b"one", "zwölf\n".encode(), b"", b""]
    path.write_bytes(b"\n\n\n" + jsonl(["a"], "content"))
    assert contents(path, ReaderOptions(text_key="content", vocab_size=1, end_id=None)) == [b"a"]
    path.write_bytes(b"")
    assert contents(path) == []


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 3: not JSON"),
        ('{"text": NaN}', "line 3: must be an object with a string `text`"),
        (
            '{"body": "a", "n": 1}',
            "line 3: must be an object with a string `text` (strings are under body; --text-key",
        ),
        ('{"text": "a", "text": "b"}', "line 3: the key `text` appears twice"),
        ('[{"text": "a"}]', "line 3 begins a JSON array"),
        ("5", "line 3 is 5: must be an object"),
        ('{"text": 5}', "line 3: must be an object with a string"),
        (
            '{"text": "\\ud83d"}',
            "line 3: `text` holds bytes that are not UTF-8, or half a surrogate pair",
        ),
        (b'{"text": "\xff"}', "line 3: `text` holds bytes that are not UTF-8"),
        (b'{"\xff": "a"}', "line 3: must be an object with a string `text` (strings are under"),
        (b'"\xff"', "line 3 is"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    content = b'{"text": "one"}\n\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n"
    path = compressed(tmp_path / "a.jsonl.zst", content, "zstd")
    assert f"{path} {message}" in refusal(path)


@pytest.mark.parametrize("cut", [0.05, 0.99])
def test_a_compressed_file_that_is_cut_or_damaged_is_refused(tmp_path, cut):
    whole = jsonl([f"text number {i * i}" for i in range(3000)])
    for path in (
        compressed(tmp_path / "a.jsonl.zst", whole, "zstd"),
        compressed(tmp_path / "a.jsonl.gz", whole, "gzip"),
        compressed(tmp_path / "a.txt.zst", whole, "zstd"),
    ):
        content = path.read_bytes()
        place = int(len(content) * cut)
        path.write_bytes(content[:place])
        assert "cannot be read beyond byte" in refusal(path) and "Truncated" in refusal(path)
    gz = tmp_path / "a.jsonl.gz"
    gz.write_bytes(gzip.compress(whole)[:100] + bytes(200) + gzip.compress(whole)[300:])
    assert "a.jsonl.gz" in refusal(gz)


def test_a_huge_text_is_cut_after_lines_and_nothing_is_lost(tmp_path):
    path = tmp_path / "a.txt"
    text = "".join(f"line {i} of many\n" for i in range(150_000)).encode()
    path.write_bytes(text)
    pieces = contents(path)
    assert b"".join(pieces) == text and len(pieces) > 8
    assert all(
        len(piece) <= text_readers.MAX_PIECE_BYTES and piece.endswith(b"\n") for piece in pieces
    )
    assert contents(compressed(tmp_path / "a.txt.zst", text, "zstd")) == pieces
    path.write_text(wide := "a" + "€𝄞" * 200_000)  # no line ends here: cut between characters
    assert "".join(piece.decode() for piece in contents(path)) == wide


@pytest.mark.parametrize(("codec", "suffix"), [("zstd", "zst"), ("gzip", "gz")])
def test_compressed_files_of_several_parts_are_read_whole(tmp_path, codec, suffix):
    one, other = (
        compressed(tmp_path / f"{i}.jsonl.{suffix}", jsonl([f"text {i}"] * 3), codec)
        for i in (1, 2)
    )
    one.write_bytes(one.read_bytes() + other.read_bytes())
    assert contents(one) == [b"text 1"] * 3 + [b"text 2"] * 3


def test_memory_does_not_grow_with_the_file(tmp_path):
    """A mutation that reads the file whole needs 30 MB and more."""
    path = tmp_path / "a.jsonl"
    line = jsonl(["x" * 1000])
    path.write_bytes(line * 30_000)
    file = recognise(path)
    tracemalloc.start()
    count = sum(1 for _ in text_readers.read_jsonl(file, READING))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 30_000 and peak < 2**22


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_gives_a_document_per_row(tmp_path, kind):
    texts = ["one", None, "zwölf", ""] * 200
    given = [t.encode() if t is not None and kind == pa.binary() else t for t in texts]
    path = parquet(tmp_path / "a.parquet", given, kind=kind)
    assert contents(path) == [b"one", b"", "zwölf".encode(), b""] * 200


def test_parquet_that_is_not_as_wanted_is_refused(tmp_path):
    path = parquet(tmp_path / "a.parquet", ["a", "b"], "content")
    assert "has no column 'text': name one of content with --text-key" in refusal(path)
    id_key = ReaderOptions(text_key="id", vocab_size=1, end_id=None)
    assert "column 'id' holds int64, not text: name one of content with --text-key" in refusal(
        path, id_key
    )
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert "cannot be read as parquet" in refusal(path)
    path.write_bytes(b"PAR1")
    assert "cannot be read as parquet" in refusal(path)
    parquet(path, [])
    assert contents(path) == []


def test_what_nobody_asked_for_may_hold_what_json_has_not(tmp_path):
    path = tmp_path / "a.jsonl"
    members = (
        '"score": NaN',
        '"score": 1e400',
        '"a": 1, "a": 2',
        '"n": ' + 5000 * "9",
        '"m": {"text": 1, "text": 2}',
    )
    members += (
        '"d": ' + 2000 * "[" + 2000 * "]",
        '"d": ' + 3000 * '{"]": [' + '"[["' + 3000 * "]}",
    )
    path.write_text("".join(f'{{{member}, "text": "t{i}"}}\n' for i, member in enumerate(members)))
    assert contents(path) == [b"t0", b"t1", b"t2", b"t3", b"t4", b"t5", b"t6"]
    path.write_bytes(b'{"text": "a", "note": "\xff"}\n')
    assert contents(path) == [b"a"]


@pytest.mark.parametrize(
    ("deep", "message"),
    [
        (2000 * "[" + 2000 * "]", "must be an object with a string"),
        (2000 * "[" + 1990 * "]", "not JSON"),
        (2000 * "[" + 1999 * "]" + "}", "not JSON"),
        (2000 * "[" + r'"\"' + 2000 * "]", "not JSON"),
    ],
)
def test_a_deep_text_is_refused_as_any_other_that_is_no_string(tmp_path, deep, message):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": {deep}}}\n')
    assert message in refusal(path)


@pytest.mark.parametrize(
    "text", ['[{"text": "a"}, {"text": "b"}]', '[\n  {"text": "a"},\n  {"text": "b"}\n]']
)
def test_an_array_of_json_is_called_one(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    message = refusal(tmp_path / "a.json")
    assert "begins a JSON array" in message and "jq -c" in message


def test_nested_columns_are_named_with_those_that_hold_texts(tmp_path):
    chat = [[{"role": "user", "content": "hi"}]]
    table = pa.table({"messages": chat, "text": [["a", "b"]], "content": ["c"]})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    message = refusal(tmp_path / "a.parquet")
    assert "column 'text' holds list<" in message and message.endswith(
        "name one of content with --text-key"
    )
    pa.parquet.write_table(table.select(["messages"]), tmp_path / "a.parquet")
    message = refusal(tmp_path / "a.parquet")
    assert "no column holds texts (messages (list<" in message
