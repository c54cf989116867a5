"""Records in the bytes of a ledger that SQLite refuses: found by their form, believed by their hashes alone.

The form is SQLite's (sqlite.org/fileformat2.html, sections 1.6 and 2.1): a record is a header of varints, the size of
each column, and then the columns. Ours ends in two texts of 64 bytes, whose sizes are four bytes that no UTF-8 text
holds, so records are found although the pages around them are damaged.
"""

from __future__ import annotations

from collections.abc import Iterator

from sweeps.store import chain
from sweeps.store.chain import Record

_TWO_HASHES = b"\x81\x0d\x81\x0d"
_HEADER_SIZES = range(9, 16)  # its own size, the seq's (0), those of kind, key and body, and the two hashes
_MIN_PAGE, _USUAL_PAGE, _MAX_PAGE = 512, 4096, 65536  # bytes


def rows(content: bytes) -> list[Record]:
    """Everything in the bytes of a ledger, or of its journal, that has a record's form; nothing of it is proven."""
    page = int.from_bytes(content[16:18], "big")
    page = page if _MIN_PAGE <= page <= _MAX_PAGE and page & (page - 1) == 0 else _USUAL_PAGE
    found: list[Record] = []
    at = content.find(_TWO_HASHES)
    while at >= 0:
        found += _rows_at(content, at, page)
        at = content.find(_TWO_HASHES, at + 1)
    return found


def longest_chain(found: list[Record]) -> list[Record]:
    """The records that follow each other from the first on, each proven by its hash, as far as they are there."""
    followers: dict[str, list[Record]] = {}
    for row in found:
        followers.setdefault(row.prev_hash, []).append(row)
    records: list[Record] = []
    head = chain.GENESIS
    while proven := [record for row in followers.get(head, []) if (record := _proven(row, len(records)))]:
        # Two, where a write was cut short and another took its place: the one that was gone on with.
        records.append(next((record for record in proven if record.hash in followers), proven[0]))
        head = records[-1].hash
    return records


def intact(found: list[Record]) -> dict[int, Record]:
    """Every record that its own hash proves, whatever became of its neighbours, by place in the chain."""
    return {row.seq: row for row in found if _proven(row, row.seq)}


def _proven(row: Record, seq: int) -> Record | None:
    """The record that a row is at a place in the chain; None if it is not the one its hash names."""
    record = chain.link(seq, row.kind, row.key, row.text, row.prev_hash)
    return record if record.hash == row.hash else None


def _rows_at(content: bytes, at: int, page: int) -> Iterator[Record]:
    """The rows whose header ends in the two sizes at `at`: one, where there is any."""
    for size in _HEADER_SIZES:
        begin = at + len(_TWO_HASHES) - size
        if begin < 1 or content[begin] != size or content[begin + 1] != 0:
            continue
        sizes = [(number - 13) // 2 for number in _varints(content[begin + 2 : at]) if number >= 13 and number % 2]
        if len(sizes) != 3:
            continue
        sizes += [len(chain.GENESIS)] * 2
        payload, texts = _payload(content, begin, size + sum(sizes), page)[size:], list[str]()
        for length in sizes:
            texts.append(payload[:length].decode(errors="replace"))
            payload = payload[length:]
        kind, key, text, prev_hash, digest = texts
        yield Record(
            seq=_number_before(content, begin), kind=kind, key=key, text=text, prev_hash=prev_hash, hash=digest
        )


def _varints(data: bytes) -> Iterator[int]:
    """SQLite's numbers: seven bits a byte, the highest first, the last one's top bit clear."""
    value = 0
    for byte in data:
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            yield value
            value = 0


def _number_before(content: bytes, end: int) -> int:
    """The varint that ends at `end`: a record's place in the chain, which stands before its header."""
    begin = end - 1
    while begin > 0 and end - begin < 9 and content[begin - 1] >= 0x80:
        begin -= 1
    return next(_varints(content[begin:end]), -1)


def _payload(content: bytes, begin: int, size: int, page: int) -> bytes:
    """`size` bytes from `begin`, of which a long record has most on overflow pages; fewer if they are not there."""
    most_local, least_local = page - 35, (page - 12) * 32 // 255 - 23
    local = size
    if size > most_local:
        local = least_local + (size - least_local) % (page - 4)
        local = local if local <= most_local else least_local
    payload, next_page = content[begin : begin + local], content[begin + local : begin + local + 4]
    while len(payload) < size:
        start = (int.from_bytes(next_page, "big") - 1) * page
        if start < 0 or start + 4 >= len(content):
            break
        next_page = content[start : start + 4]
        payload += content[start + 4 : start + 4 + min(page - 4, size - len(payload))]
    return payload
