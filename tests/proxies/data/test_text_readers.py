"""Tests of the readers of texts: plain text, JSON lines and Parquet, compressed or not."""

import gzip
import tracemalloc

import pyarrow as pa
import pytest
from corpus_cases import GPT2_OPTIONS, read_contents, to_jsonl, write_compressed, write_parquet

from forerun._proxies.data import text_readers
from forerun._proxies.data.documents import ReaderOptions, recognize_file
from forerun._proxies.data.tokens import DataError


def get_refusal(path, options=GPT2_OPTIONS):
    """Return the message with which a file is refused, which must name it."""
    with pytest.raises(DataError) as caught:
        read_contents(path, options)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_each_line_of_jsonl_is_a_document(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "one"}\n\n \r\n{"id": 5, "text": "zw\\u00f6lf\\n"}\r\n{"text": '
        b'null}\n{"text": ""}'
    )
    assert read_contents(path) == [b"one", "zwölf\n".encode(), b"", b""]
    path.write_bytes(b"\n\n\n" + to_jsonl(["a"], "content"))
    options = ReaderOptions(text_key="content", vocab_size=1, end_id=None)
    assert read_contents(path, options) == [b"a"]
    path.write_bytes(b"")
    assert read_contents(path) == []


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 3: not JSON"),
        ('{"text": NaN}', "line 3: must be an object with a string `text`"),
        (
            '{"body": "a", "n": 1}',
            "line 3: must be an object with a string `text` (strings are under body; --text-key",
        ),
        ('[{"text": "a"}]', "line 3 begins a JSON array"),
        ("5", "line 3: must be an object with a string `text` (it has no string"),
        ('{"text": 5}', "line 3: must be an object with a string"),
        (
            '{"text": "\\ud83d"}',
            "line 3: `text` holds bytes that are not UTF-8, or half a surrogate pair",
        ),
        (b'{"text": "\xff"}', "line 3: `text` holds bytes that are not UTF-8"),
        (b'{"\xff": "a"}', "line 3: must be an object with a string `text` (strings are under"),
        (b'"\xff"', "line 3: must be an object"),
    ],
)
def test_bad_line_is_named_with_its_number(tmp_path, line, message):
    content = b'{"text": "one"}\n\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n"
    path = write_compressed(tmp_path / "a.jsonl.zst", content, "zstd")
    assert f"{path} {message}" in get_refusal(path)


@pytest.mark.parametrize("kept_share", [0.05, 0.99])
def test_truncated_compressed_file_is_refused(tmp_path, kept_share):
    uncompressed = to_jsonl([f"text number {i * i}" for i in range(3000)])
    for path in (
        write_compressed(tmp_path / "a.jsonl.zst", uncompressed, "zstd"),
        write_compressed(tmp_path / "a.jsonl.gz", uncompressed, "gzip"),
        write_compressed(tmp_path / "a.txt.zst", uncompressed, "zstd"),
    ):
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * kept_share)])
        message = get_refusal(path)
        assert "cannot be read beyond byte" in message and "Truncated" in message


def test_compressed_file_with_bytes_of_zero_inside_is_refused(tmp_path):
    content = gzip.compress(to_jsonl([f"text number {i * i}" for i in range(3000)]))
    damaged = tmp_path / "a.jsonl.gz"
    damaged.write_bytes(content[:100] + bytes(200) + content[300:])
    assert get_refusal(damaged)


def test_large_text_is_cut_between_lines_without_loss(tmp_path):
    path = tmp_path / "a.txt"
    text = "".join(f"line {i} of many\n" for i in range(150_000)).encode()
    path.write_bytes(text)
    pieces = read_contents(path)
    assert b"".join(pieces) == text and len(pieces) >= len(text) // text_readers.MAX_PIECE_BYTES > 1
    for piece in pieces:
        assert len(piece) <= text_readers.MAX_PIECE_BYTES and piece.endswith(b"\n")
    assert read_contents(write_compressed(tmp_path / "a.txt.zst", text, "zstd")) == pieces

    # A text without line ends is cut between characters, not within one.
    single_line = "a" + "€𝄞" * 200_000
    path.write_text(single_line)
    assert "".join(piece.decode() for piece in read_contents(path)) == single_line


@pytest.mark.parametrize(("codec", "suffix"), [("zstd", "zst"), ("gzip", "gz")])
def test_all_parts_of_a_compressed_file_are_read(tmp_path, codec, suffix):
    """A compressed file may be several compressed files, one after another."""
    content = b""
    for i in (1, 2):
        part = tmp_path / f"{i}.jsonl.{suffix}"
        content += write_compressed(part, to_jsonl([f"text {i}"] * 3), codec).read_bytes()
    path = tmp_path / f"all.jsonl.{suffix}"
    path.write_bytes(content)
    assert read_contents(path) == [b"text 1"] * 3 + [b"text 2"] * 3


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    line = to_jsonl(["x" * 1000])
    path.write_bytes(line * 30_000)
    file = recognize_file(path)
    tracemalloc.start()
    count = sum(1 for _ in text_readers.read_jsonl(file, GPT2_OPTIONS))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    limit = 2**22
    assert path.stat().st_size > 7 * limit
    assert count == 30_000 and peak < limit


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_each_row_of_parquet_is_a_document(tmp_path, kind):
    texts = ["one", None, "zwölf", ""] * 200
    if kind == pa.binary():
        texts = [None if text is None else text.encode() for text in texts]
    path = write_parquet(tmp_path / "a.parquet", texts, kind=kind)
    assert read_contents(path) == [b"one", b"", "zwölf".encode(), b""] * 200


def test_parquet_without_texts_or_truncated_is_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["a", "b"], "content")
    assert "has no column 'text': name one of content with --text-key" in get_refusal(path)
    id_key = ReaderOptions(text_key="id", vocab_size=1, end_id=None)
    assert "column 'id' holds int64, not text: name one of content with --text-key" in get_refusal(
        path, id_key
    )
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert "cannot be read as parquet" in get_refusal(path)
    path.write_bytes(b"PAR1")
    assert "cannot be read as parquet" in get_refusal(path)
    write_parquet(path, [])
    assert read_contents(path) == []


def test_parquet_with_two_columns_of_one_name_is_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    message = get_refusal(tmp_path / "a.parquet")
    assert message.endswith("has 2 columns named 'text': rename or remove all but one")


def test_unused_members_may_be_invalid_json(tmp_path):
    """Only the text of a line is parsed strictly."""
    path = tmp_path / "a.jsonl"
    members = (
        # Values that strict JSON does not have, and keys that occur twice
        '"score": NaN',
        '"score": 1e400',
        '"a": 1, "a": 2',
        '"n": ' + 5000 * "9",
        '"m": {"text": 1, "text": 2}',
    )
    path.write_text("".join(f'{{{member}, "text": "t{i}"}}\n' for i, member in enumerate(members)))
    assert read_contents(path) == [b"t0", b"t1", b"t2", b"t3", b"t4"]
    path.write_bytes(b'{"text": "a", "note": "\xff"}\n')
    assert read_contents(path) == [b"a"]


def test_line_that_is_nested_too_deeply_for_python_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "note": ' + 10**5 * "[" + 10**5 * "]" + "}\n")
    assert "line 1: not JSON" in get_refusal(path)


@pytest.mark.parametrize(
    "text", ['[{"text": "a"}, {"text": "b"}]', '[\n  {"text": "a"},\n  {"text": "b"}\n]']
)
def test_json_array_is_refused_with_the_command_that_converts_it(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    message = get_refusal(tmp_path / "a.json")
    assert "begins a JSON array" in message and "jq -c" in message


def test_refusal_of_a_nested_column_names_the_columns_of_texts(tmp_path):
    chat = [[{"role": "user", "content": "hi"}]]
    table = pa.table({"messages": chat, "text": [["a", "b"]], "content": ["c"]})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    message = get_refusal(tmp_path / "a.parquet")
    assert "column 'text' holds list<" in message and message.endswith(
        "name one of content with --text-key"
    )
    pa.parquet.write_table(table.select(["messages"]), tmp_path / "a.parquet")
    message = get_refusal(tmp_path / "a.parquet")
    assert "no column holds texts (messages (list<" in message
