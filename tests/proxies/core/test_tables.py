"""Tests of the reader of tables, which `forerun fit` and `forerun transfer` share.

A table may use a comma or a point as decimal sign, and several separators. Every such dialect must
give the same numbers, and a number that can be read in two ways is refused. Rows of runs that did
not finish are dropped. Tables may be text, JSON lines or Parquet, in files, pipes or memory.
"""

import json
import math
import os
import socket
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forerun._proxies.core.tables.columns import drop_unfinished_rows
from forerun._proxies.core.tables.numerals import parse_amount, read_numbers, to_number
from forerun._proxies.core.tables.table_files import (
    FormatError,
    TableError,
    read_cells,
    read_memory_table,
)
from forerun._scaling_fits.laws.table import read_runs as read_fit_table
from forerun._transfer.tables.table import read_runs as read_transfer_table

RUNS = [
    {"params": 53_300_000, "tokens": 500_000_000, "loss": 4.1474},
    {"params": 1_596_000, "tokens": 1_100_000_000, "loss": 3.5},
    {"params": 206_500_000, "tokens": 4_400_000_000, "loss": 0.1134},
]


def spell_number(value, *, thousands="", decimal=".", suffix=False):
    """Write a number in a dialect.

    Args:
        thousands: Separator of groups of three digits.
        decimal: Decimal sign.
        suffix: Whether millions are written with the suffix M.
    """
    if suffix and value >= 1e6:
        return f"{value / 1e6!r}M".replace(".", decimal)
    if value >= 1e3:
        return f"{value:,}".replace(",", thousands)
    return repr(value).replace(".", decimal)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("delimiter", "spelling"),
    [
        (",", {}),
        ("\t", {}),
        (";", {}),
        (",", {"suffix": True}),
        (";", {"suffix": True, "decimal": ","}),
        (",", {"thousands": ","}),
        (";", {"thousands": ","}),
        ("\t", {"thousands": ","}),
        (";", {"decimal": ","}),
        ("\t", {"decimal": ","}),
    ],
)
def test_every_dialect_reads_back_the_same_values(tmp_path, delimiter, spelling, line_end, seed):
    rng = np.random.default_rng(seed)
    runs = RUNS + [
        {
            "params": int(rng.integers(10**6, 10**10)) * 100,
            "tokens": int(rng.integers(10**6, 10**10)) * 100,
            "loss": round(float(rng.uniform(0.1, 9)), 5),
        }
        for _ in range(4)
    ]
    # The seed also chooses the encoding and whether all cells are quoted.
    encoding = ("utf-8", "utf-8-sig", "utf-16")[seed % 3]
    quotes_all = seed % 2 == 1
    rows = [[spell_number(value, **spelling) for value in run.values()] for run in runs]
    rows.insert(0, list(runs[0]))
    lines = []
    for row in rows:
        cells = [f'"{cell}"' if quotes_all or delimiter in cell else cell for cell in row]
        lines.append(delimiter.join(cells))
    path = tmp_path / "runs.csv"
    path.write_bytes((line_end.join(lines) + line_end).encode(encoding))
    table = read_fit_table(path)
    for name in ("params", "tokens", "loss"):
        expected = [run[name] for run in runs]
        assert getattr(table, name).tolist() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "readings"),
    [
        ("params;tokens;loss\n1e6;2e7;4,147\n2e6;2e7;3,849\n", ("4147", "4.147")),
        ("params\ttokens\tloss\n1,000\t2e7\t4.1\n2,000\t2e7\t3.8\n", ("1000", "1.000")),
        ('params,tokens,loss\n1e6,2e7,"4,147"\n', ("4147", "4.147")),
        ("params;tokens;loss\n1e6;2e7;4,1474\n2e6;2e7;1,234,567\n", ("4,1474", "no number")),
        ("params;tokens;loss\n53.300;2e7;4,1474\n", ("53.300", "thousands")),
    ],
)
def test_number_with_two_readings_is_refused_with_both(tmp_path, text, readings):
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(TableError) as caught:
        read_fit_table(tmp_path / "runs.csv")
    assert all(reading in str(caught.value) for reading in readings)


@pytest.mark.parametrize(
    "cell",
    [
        "1_00",
        "0x1F",
        "1e400",
        "5%",
        "1 00",
        "1'0000",
        "True",
        "true",
        "5Mi",
        "--5",
        "1.000.0",
        "1.000 000",
        "1,00,000",
    ],
)
def test_cell_that_is_not_a_number_is_refused(tmp_path, cell):
    (tmp_path / "runs.csv").write_text(f"params;tokens;loss\n{cell};2e7;3.1\n2e6;4e7;3.0\n")
    with pytest.raises(TableError, match="row 2, column 'params'"):
        read_fit_table(tmp_path / "runs.csv")


@pytest.mark.parametrize("separator", [" ", "\u00a0", "\u2009", "\u202f", "'", "\u2019", "_", "."])
def test_unambiguous_groups_of_three_digits_are_read(tmp_path, separator):
    """The number 53.300.000 in the same column proves that 950.000 is not 950."""
    params, tokens = (950_000, 53_300_000), (19_000_000, 1_066_000_000)
    rows = [
        [f"{count:,}".replace(",", separator) for count in run]
        for run in zip(params, tokens, strict=True)
    ]
    (tmp_path / "runs.csv").write_text(
        "params;tokens;loss\n" + "".join(f"{n};{d};3.1\n" for n, d in rows)
    )
    table = read_fit_table(tmp_path / "runs.csv")
    assert (tuple(table.params), tuple(table.tokens)) == (params, tokens)
    (tmp_path / "runs.tsv").write_text(f"width\tlr\tloss\n1{separator}024\t.1\t3\n512\t.1\t3.1\n")
    if separator != ".":  # 1.024 may be a fraction
        points = read_transfer_table(tmp_path / "runs.tsv").points
        assert {point.size for point in points} == {512, 1024}


def test_dot_that_may_separate_thousands_is_refused(tmp_path):
    """Dots separate thousands in one column, so a single dot in another column is ambiguous."""
    (tmp_path / "runs.csv").write_text(
        "params;tokens;loss\n53.300.000;1.066;3.1\n106.600.000;2.132;3.0\n"
    )
    with pytest.raises(TableError, match=r"column 'tokens': the dot of '1\.066'"):
        read_fit_table(tmp_path / "runs.csv")


@pytest.mark.parametrize(
    ("state", "is_kept", "num_warnings"),
    [
        ("NODE_FAIL", False, 0),
        ("BOOT_FAIL", False, 0),
        ("DEADLINE", False, 0),
        ("In Progress", False, 0),
        ("Crashed (OOM)", False, 0),
        ("CancelRequested", False, 0),
        ("TrialState.COMPLETE", True, 0),
        ("TERMINATED", True, 0),
        ("Succeeded", True, 0),
        ("inactive", True, 0),
        ("3", True, 1),
        ("stopped", True, 1),
    ],
)
def test_unfinished_states_drop_a_run_and_unknown_ones_warn(state, is_kept, num_warnings):
    rows = [{"params": n, "tokens": 20 * n, "loss": 3.1, "state": "finished"} for n in (1e6, 2e6)]
    rows.append({"params": 3e6, "tokens": 6e7, "loss": 9.0, "state": state})
    table = read_fit_table(read_memory_table(rows))
    assert (table.num_runs, len(table.dropped)) == ((3, 0) if is_kept else (2, 1))
    assert sum(repr(state) in warning for warning in table.warnings) == num_warnings
    runs = [{"width": width, "lr": 0.1, "loss": 3.1, "state": state} for width in (64, 128)]
    runs += [{"width": width, "lr": 0.2, "loss": 3.2, "state": "ok"} for width in (64, 128)]
    transfer_table = read_transfer_table(read_memory_table(runs))
    assert len(transfer_table.points) == (4 if is_kept else 2)
    assert sum(repr(state) in note for note in transfer_table.notes) == num_warnings


@pytest.mark.parametrize(
    "cell",
    [True, False, [3.1], {"value": 3.1}, "true", "crashed", None, 10**400, "1e400", "", "\u0663"],
)
def test_booleans_lists_and_objects_are_not_losses(tmp_path, cell):
    assert to_number(cell) is None
    good = {"params": 1e6, "tokens": 2e7, "loss": 3.1}
    with pytest.raises(TableError, match="row 1, column 'loss'"):
        read_fit_table(read_memory_table([good, good | {"loss": cell}]))
    (tmp_path / "runs.jsonl").write_text(
        "".join(json.dumps(good | {"loss": loss}) + "\n" for loss in (3.1, cell))
    )
    with pytest.raises(TableError, match="row 2, column 'loss'"):
        read_fit_table(tmp_path / "runs.jsonl")
    with pytest.raises(TableError, match="row 1, column loss"):
        read_transfer_table(
            read_memory_table([{"width": 64, "lr": 0.1, "loss": loss} for loss in (3.1, cell)])
        )
    if isinstance(cell, bool | list | dict):
        columns = {"params": [1e6, 2e6], "tokens": [2e7, 4e7], "loss": pa.array([cell, cell])}
        pq.write_table(pa.table(columns), tmp_path / "runs.parquet")
        with pytest.raises(TableError, match="row 2, column 'loss'"):
            read_fit_table(tmp_path / "runs.parquet")


def test_texts_of_numbers_and_amounts_are_parsed():
    texts = ("3.5", " NaN", "-Infinity", "1e-3", Decimal("2.5"))
    numbers = [to_number(text) for text in texts]
    assert numbers == pytest.approx([3.5, math.nan, -math.inf, 1e-3, 2.5], nan_ok=True)
    amounts = {"1.1B": 1.1e9, "53.3M": 53.3e6, "10k": 1e4, "2 T": 2e12, "5": 5.0}
    assert {text: parse_amount(text) for text in amounts} == amounts
    assert parse_amount("nanb") is None
    assert parse_amount("1e3k") is None
    assert read_numbers(["1.1B", "2"], "real", splits_at_commas=True).values == [None, 2.0]


def test_rows_without_a_finished_run_are_dropped_with_a_reason(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(
        '\n"params","tokens","loss","State",\n1e6,2e7,3.1,finished,\n,,,,\n\nparams,tokens,loss,State,\n'
        "2e6,2e7,,crashed,\n2e6,2e7,3.0,running,\n2e6,3e7,nan,FINISHED,\n2e6,4e7,2.9,TrialState.COMPLETE,\n"
    )
    table = read_fit_table(path)
    assert table.loss.tolist() == [3.1, 2.9]
    reasons = {row.row: row.reason for row in table.dropped}
    assert list(reasons) == [4, 6, 7, 8, 9]
    assert "empty" in reasons[4] and "header" in reasons[6] and "nan" in reasons[9]
    assert "crashed" in reasons[7] and "running" in reasons[8]


def test_crashed_run_is_not_a_divergence_in_a_transfer_table(tmp_path):
    path = tmp_path / "sweep.csv"
    path.write_text(
        "width,lr,loss,state\n32,0.1,nan,crashed\n32,0.1,nan,finished\n64,0.1,2.5,finished\n"
    )
    table = read_transfer_table(path)
    assert [(point.size, point.loss_nats) for point in table.points] == [(64, 2.5), (32, None)]
    assert table.dropped[0][0] == 2 and "crashed" in table.dropped[0][1]
    path.write_text("width,lr,loss\n32,0.1,\n64,0.1,2.5\n")
    with pytest.raises(TableError, match=r"row 2, column loss.*only if the loss itself diverged"):
        read_transfer_table(path)
    path.write_text("width,lr,loss,state\n32,0.1,,failed\n")
    with pytest.raises(TableError, match="no run has finished"):
        read_transfer_table(path)


ROW_FORMATS = (
    "{}\t{}\t{}",
    "{},{},{}",
    "  {}   {}  {} ",
    "| {} | {} | {} |",
    "{}|{}|{}",
    "{};{};{}",
)


@pytest.mark.parametrize("row_format", ROW_FORMATS)
@pytest.mark.parametrize("suffix", [".txt", ".csv", ".md"])
def test_separator_is_detected_from_the_content(tmp_path, row_format, suffix):
    rows = [("params", "tokens", "loss"), ("1e6", "20M", "3.25"), ("2e6", "40M", "3.0")]
    lines = [row_format.format(*row) for row in rows]
    # A table with bars is a Markdown table, which has a line below its header.
    if "|" in row_format:
        lines.insert(1, row_format.format(":--", "---", "--:"))
    path = tmp_path / f"runs{suffix}"
    path.write_text("\n".join(lines) + "\n")
    table = read_fit_table(path)
    assert (table.params.tolist(), table.tokens.tolist()) == ([1e6, 2e6], [2e7, 4e7])
    assert table.loss.tolist() == [3.25, 3.0]


def test_text_before_a_markdown_table_is_refused(tmp_path):
    (tmp_path / "runs.md").write_text(
        "# My runs\n\n| params | tokens | loss |\n|---|---|---|\n| 1e6 | 2e7 | 3.1 |\n"
    )
    with pytest.raises(FormatError, match="Markdown table: keep the lines of the table"):
        read_fit_table(tmp_path / "runs.md")


def test_spaces_separate_cells_only_if_no_cell_is_empty(tmp_path):
    path = tmp_path / "runs.txt"
    path.write_text("# params tokens loss\n1e6 2e7 3.1\n\n2e6 4e7 3.0\n")  # as NumPy writes it
    assert read_fit_table(path).lines == (2, 4)
    path.write_text("params tokens loss\n1e6 2e7 3.1\n2e6 3.0\n")
    with pytest.raises(FormatError, match="row 3 has 2"):
        read_fit_table(path)
    path.write_text("params tokens loss\n" + "1e6 2e7 3.1\n" * 1500 + "2e6 3.0\n")
    with pytest.raises(TableError, match="row 1502 has 2 cells: must have 3"):
        read_fit_table(path)


@pytest.mark.parametrize("suffix", [".ndjson", ".txt", ".jsonl"])
def test_json_lines_are_read_from_files_with_any_suffix(tmp_path, suffix):
    path = tmp_path / f"runs{suffix}"
    rows = [
        {"params": 1e6, "tokens": 2e7, "loss": 3.1},
        {"params": 2e6, "tokens": 4e7, "loss": 3.0},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_fit_table(path).loss.tolist() == [3.1, 3.0]
    path.write_text(json.dumps(rows, indent=1))
    with pytest.raises(FormatError, match=r"JSON array.*jq"):
        read_fit_table(path)


def test_unreadable_cells_of_unused_columns_do_not_matter(tmp_path):
    (tmp_path / "runs.csv").write_text(
        f"params,tokens,loss,config\n1e6,2e7,3.1,{'x' * 200_000}\n2e6,4e7,3.0,\n"
    )
    assert read_fit_table(tmp_path / "runs.csv").num_runs == 2
    unusual_values = (
        "9" * 5000,
        "1e400",
        "NaN",
        '1, "x": 2',
    )
    rows = [
        f'{{"params": 1e6, "x": {value}, "tokens": 2e7, "loss": {i + 1}}}'
        for i, value in enumerate(unusual_values)
    ]
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(rows))
    assert read_fit_table(path).loss.tolist() == [1, 2, 3, 4]

    # The same values in a column that is used. One of them names a second column, which becomes a
    # second `tokens`.
    for value in unusual_values:
        tokens = value.replace("x", "tokens")
        bad_row = f'{{"params": 1e6, "tokens": {tokens}, "loss": 3}}'
        path.write_text("\n".join([*rows, bad_row]))
        with pytest.raises(TableError, match="row 5, column 'tokens'"):
            read_fit_table(path)


def test_row_that_is_nested_too_deeply_for_python_is_refused(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text("[" * 10**5 + "]" * 10**5 + "\n")
    with pytest.raises(FormatError, match="begins a JSON array"):
        read_fit_table(path)
    path.write_text('{"x": ' + "[" * 10**5 + "]" * 10**5 + "}\n")
    with pytest.raises(TableError, match="row 1 is not JSON"):
        read_fit_table(path)


def test_column_that_python_cannot_represent_matters_only_if_used(tmp_path):
    columns = {"params": [1e6, 2e6], "tokens": [2e7, 4e7], "loss": [3.1, 3.0]}
    # Python's datetime ends at the year 9999.
    dates = pa.array([2**40, 2**40], type=pa.int64()).cast(pa.timestamp("s"))
    offsets = pa.array([0, 1, 2], pa.int32()).buffers()[1]
    not_utf8 = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"\xff\xff"))
    table = pa.table({**columns, "date": dates, "note": not_utf8})
    pq.write_table(table, tmp_path / "runs.parquet")
    assert read_fit_table(tmp_path / "runs.parquet").num_runs == 2
    assert read_fit_table(read_memory_table(pa.table({**columns, "date": dates}))).num_runs == 2
    with pytest.raises(TableError, match="row 2, column 'date': 'unreadable timestamp"):
        read_fit_table(tmp_path / "runs.parquet", columns={"tokens": "date"})


@pytest.mark.parametrize(
    ("column", "finished", "unfinished", "unclear"),
    [
        (
            "finished",
            (True, "true", "Yes", 1, "1.0"),
            (False, "FALSE", "no", 0, "0"),
            (None, "", "maybe", 0.5),
        ),
        ("crashed", (False, "false", "0"), (True, "T", 1.0), (None, "once", 2)),
        (
            "exit_code",
            (0, "0", 0.0, "0:0"),
            (1, "137", -9, "1:0", "0:9"),
            (None, "", True, "none", 0.5),
        ),
        ("ExitCode", ("0",), ("2",), ("?",)),
    ],
)
def test_flag_or_exit_code_decides_whether_a_run_finished(column, finished, unfinished, unclear):
    def read_states(states):
        rows = [
            {"params": 1e6 * (i + 1), "tokens": 2e7, "loss": 3.1, column: state}
            for i, state in enumerate(states)
        ]
        return read_fit_table(read_memory_table(rows))

    num_finished, num_rows = len(finished), len(finished) + len(unfinished)
    table = read_states([*finished, *unfinished])
    assert [row.row for row in table.dropped] == list(range(num_finished, num_rows))
    assert column in table.dropped[0].reason
    assert table.num_runs == num_finished and not table.warnings
    for state in unclear:
        with pytest.raises(TableError, match=f"row {num_finished}, column '{column}'"):
            read_states([*finished, state])
    # A column of dates is no column of states.
    table = read_states(["2026-01-01", "2026-01-02"])
    assert table.num_runs == 2
    assert any(f"'{column}'" in warning for warning in table.warnings)


def test_every_column_of_states_counts_in_fit_and_transfer_tables():
    rows = []
    for width in (64, 128):
        for rate in (0.1, 0.2):
            sizes = {"width": width, "params": width * 1e4, "tokens": 2e7}
            rows.append({**sizes, "lr": rate, "loss": 3.0, "finished": "true"})
    rows.append(rows[0] | {"finished": "false", "loss": None})
    rows.append(rows[0] | {"finished": "", "State": "running"})
    assert [row.row for row in read_fit_table(read_memory_table(rows)).dropped] == [4, 5]
    assert [row for row, _ in read_transfer_table(read_memory_table(rows)).dropped] == [4, 5]
    rows[0]["finished"] = "perhaps"
    with pytest.raises(
        TableError, match="row 0, column 'finished': 'perhaps': must be true or false"
    ):
        read_transfer_table(read_memory_table(rows))


def test_state_may_be_followed_by_details():
    table = read_memory_table([{"state": "CANCELLED by 1000"}])
    assert drop_unfinished_rows(table, {"state": "state"}).rows == []


def test_message_shows_three_of_many_bad_cells(tmp_path):
    (tmp_path / "runs.csv").write_text("params,tokens,loss\n" + "x,1e7,3\n" * 40)
    with pytest.raises(TableError) as caught:
        read_fit_table(tmp_path / "runs.csv")
    assert len(caught.value.problems) == 40
    assert str(caught.value).count("column 'params'") == 3 and "40 bad cells" in str(caught.value)


def _make_pipe(path):
    os.mkfifo(path)


def _make_socket(path):
    # The name stays after the socket is closed.
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize(("make", "kind"), [(_make_pipe, "pipe"), (_make_socket, "socket")])
def test_pipe_and_socket_are_refused_by_their_kind(tmp_path, monkeypatch, make, kind):
    # The path of a socket has a limit of about 100 characters, so use a relative one.
    monkeypatch.chdir(tmp_path)
    make("runs.csv")
    with pytest.raises(FormatError, match=f"it is a {kind}"):
        read_cells(tmp_path / "runs.csv")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("name", ["-", "/dev/fd/{}"])
def test_table_is_read_from_stdin_or_a_descriptor(tmp_path, kind, name):
    columns = {"params": [1e6, 2e6], "tokens": [2e7, 4e7], "loss": [3.1, 3.0]}
    if kind == "parquet":
        pq.write_table(pa.table(columns), tmp_path / "runs")
    elif kind == "jsonl":
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        (tmp_path / "runs").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        (tmp_path / "runs").write_text("params,tokens,loss\n1e6,2e7,3.1\n2e6,4e7,3.0\n")
    reader, writer = os.pipe()
    os.write(writer, (tmp_path / "runs").read_bytes())
    os.close(writer)
    script = (
        "import sys; from forerun._scaling_fits.laws.table import read_runs; "
        "print(read_runs(sys.argv[1]).loss.tolist())"
    )
    source = name.format(reader)
    process = subprocess.run(
        [sys.executable, "-c", script, source],
        stdin=reader,
        pass_fds=[reader],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(reader)
    assert process.stdout.strip() == "[3.1, 3.0]", process.stderr


def test_device_is_refused():
    descriptor = os.open("/dev/zero", os.O_RDONLY)
    try:
        with pytest.raises(FormatError, match="it is a device"):
            read_cells(Path(f"/dev/fd/{descriptor}"))
    finally:
        os.close(descriptor)
