"""Records in the bytes of a ledger that SQLite refuses: found by their form, believed by their hashes alone.

The form is SQLite's (sqlite.org/fileformat2.html, sections 1.6 and 2.1): a record is a header of varints, the size of
each column, and then the columns. Ours ends in two texts of 64 bytes, whose sizes are four bytes that no UTF-8 text
holds, so records are found although the pages around them are damaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sweeps.store import chain
from sweeps.store.chain import Record

_TWO_HASHES = b"\x81\x0d\x81\x0d"
_HEADER_SIZES = range(9, 16)  # its own size, the seq's (0), those of kind, key and body, and the two hashes
_MIN_PAGE, _USUAL_PAGE, _MAX_PAGE = 512, 4096, 65536  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What stands in the place of a record; true only if its hash says so."""

    seq: int
    kind: str
    key: str
    text: str
    prev_hash: str
    hash: str

    def linked(self, seq: int) -> Record | None:
        """The record that this is at a place in the chain; None if it is not the one its hash names."""
        record = chain.link(seq, self.kind, self.key, self.text, self.prev_hash)
        return record if record.hash == self.hash else None


def rows(content: bytes) -> list[Row]:
    """Everything in the bytes of a ledger, or of its journal, that has a record's form, in the order of the bytes."""
    page = int.from_bytes(content[16:18], "big")
    page = page if _MIN_PAGE <= page <= _MAX_PAGE and page & (page - 1) == 0 else _USUAL_PAGE
    found: list[Row] = []
    at = content.find(_TWO_HASHES)
    while at >= 0:
        found += _rows_at(content, at, page)
        at = content.find(_TWO_HASHES, at + 1)
    return found


def longest_chain(found: list[Row]) -> list[Record]:
    """The records that follow each other from the first on, each proven by its hash, as far as they are there."""
    followers: dict[str, list[Row]] = {}
    for row in found:
        followers.setdefault(row.prev_hash, []).append(row)
    records: list[Record] = []
    head = chain.GENESIS
    while True:
        proven = [record for row in followers.get(head, []) if (record := row.linked(len(records)))]
        if not proven:
            return records
        # Two, where a write was cut short and another took its place: the one that was gone on with.
        records.append(next((record for record in proven if record.hash in followers), proven[0]))
        head = records[-1].hash


def intact(found: list[Row]) -> dict[int, Record]:
    """Every record that its own hash proves, whatever became of its neighbours, by place in the chain."""
    return {row.seq: record for row in found if (record := row.linked(row.seq))}


def _rows_at(content: bytes, at: int, page: int) -> Iterator[Row]:
    """The rows whose header ends in the two sizes at `at`: one, where there is any."""
    for size in _HEADER_SIZES:
        begin = at + len(_TWO_HASHES) - size
        if begin < 1 or content[begin] != size or content[begin + 1] != 0:
            continue
        sizes = _text_sizes(content[begin + 2 : at])
        payload = _payload(content, begin, size + sum(sizes) + 2 * len(chain.GENESIS), page) if len(sizes) == 3 else b""
        texts, start = [], size
        for length in (*sizes, len(chain.GENESIS), len(chain.GENESIS)):
            texts.append(payload[start : start + length].decode(errors="replace"))
            start += length
        if payload:
            kind, key, text, prev_hash, digest = texts
            yield Row(
                seq=_number_before(content, begin), kind=kind, key=key, text=text, prev_hash=prev_hash, hash=digest
            )


def _text_sizes(header: bytes) -> list[int]:
    """Bytes of the texts whose sizes these varints are; none if one is of no text."""
    sizes, value = [], 0
    for byte in header:
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            if value < 13 or value % 2 == 0:
                return []
            sizes.append((value - 13) // 2)
            value = 0
    return sizes


def _number_before(content: bytes, end: int) -> int:
    """The varint that ends at `end`: a record's place in the chain, which stands before its header."""
    begin = end - 1
    while begin > 0 and end - begin < 9 and content[begin - 1] >= 0x80:
        begin -= 1
    value = 0
    for byte in content[begin:end]:
        value = value << 7 | byte & 0x7F
    return value


def _payload(content: bytes, begin: int, size: int, page: int) -> bytes:
    """`size` bytes from `begin`, of which a long record has most on overflow pages; empty if they are not there."""
    most_local, least_local = page - 35, (page - 12) * 32 // 255 - 23
    local = size
    if size > most_local:
        local = least_local + (size - least_local) % (page - 4)
        local = local if local <= most_local else least_local
    payload, next_page = content[begin : begin + local], content[begin + local : begin + local + 4]
    while len(payload) < size:
        start = (int.from_bytes(next_page, "big") - 1) * page
        if start < 0 or start + 4 >= len(content):
            return b""
        next_page = content[start : start + 4]
        payload += content[start + 4 : start + 4 + min(page - 4, size - len(payload))]
    return payload
