"""One reader of tables: every dialect gives the same numbers, and a number with two readings is refused with both."""

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

from proxies.core.tables.columns import choose_columns, drop_unfinished, find_hyperparameter
from proxies.core.tables.numerals import parse_amount, read_numbers, to_number
from proxies.core.tables.table_files import FormatError, TableError, cells_of, read_cells
from scaling_fits.laws.table import read_runs as read_fit_table
from transfer.tables.table import read_runs as read_transfer_table

RUNS = [
    {"params": 53_300_000, "tokens": 500_000_000, "loss": 4.1474},
    {"params": 1_596_000, "tokens": 1_100_000_000, "loss": 3.5},
    {"params": 206_500_000, "tokens": 4_400_000_000, "loss": 0.1134},
]


def _spell(value, *, thousands="", decimal=".", suffix=False):
    if suffix and value >= 1e6:
        return f"{value / 1e6!r}M".replace(".", decimal)
    return f"{value:,}".replace(",", thousands) if value >= 1e3 else repr(value).replace(".", decimal)


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
    encoding = ("utf-8", "utf-8-sig", "utf-16")[seed % 3]
    rows = [list(runs[0])] + [[_spell(value, **spelling) for value in run.values()] for run in runs]
    quoted = [[f'"{cell}"' if delimiter in cell or seed % 2 else cell for cell in row] for row in rows]
    text = line_end.join(delimiter.join(row) for row in quoted) + line_end
    path = tmp_path / "runs.csv"
    path.write_bytes(text.encode(encoding))
    table = read_fit_table(path)
    for name in ("params", "tokens", "loss"):
        assert getattr(table, name).tolist() == pytest.approx([run[name] for run in runs], rel=1e-15)


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
def test_a_comma_with_two_readings_is_refused_with_both(tmp_path, text, readings):
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(TableError) as caught:
        read_fit_table(tmp_path / "runs.csv")
    assert all(reading in str(caught.value) for reading in readings)


@pytest.mark.parametrize("cell", [
    "1_00", "0x1F", "1e400", "5%", "1 00", "1'0000", "True", "true", "5Mi", "--5", "1.000.0", "1.000 000", "1,00,000",
])  # fmt: skip
def test_what_spells_no_number_is_a_bad_cell(tmp_path, cell):
    (tmp_path / "runs.csv").write_text(f"params;tokens;loss\n{cell};2e7;3.1\n2e6;4e7;3.0\n")
    with pytest.raises(TableError, match="row 2, column 'params'"):
        read_fit_table(tmp_path / "runs.csv")


@pytest.mark.parametrize("separator", [" ", "\u00a0", "\u2009", "\u202f", "'", "\u2019", "_", "."])
def test_groups_of_three_digits_with_one_reading_are_read(tmp_path, separator):
    """One table has 950.000 beside 53.300.000: the second proves that the first is no 950."""
    params, tokens = (950_000, 53_300_000), (19_000_000, 1_066_000_000)
    rows = [[f"{count:,}".replace(",", separator) for count in run] for run in zip(params, tokens, strict=True)]
    (tmp_path / "runs.csv").write_text("params;tokens;loss\n" + "".join(f"{n};{d};3.1\n" for n, d in rows))
    table = read_fit_table(tmp_path / "runs.csv")
    assert (tuple(table.params), tuple(table.tokens)) == (params, tokens)
    (tmp_path / "runs.tsv").write_text(f"width\tlr\tloss\n1{separator}024\t.1\t3\n512\t.1\t3.1\n")
    if separator != ".":  # 1.024 alone may be a fraction
        assert {point.size for point in read_transfer_table(tmp_path / "runs.tsv").points} == {512, 1024}


def test_a_dot_that_may_separate_thousands_is_refused(tmp_path):
    """Two dots in one column make a single dot of another one doubtful."""
    (tmp_path / "runs.csv").write_text("params;tokens;loss\n53.300.000;1.066;3.1\n106.600.000;2.132;3.0\n")
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
def test_a_state_is_known_or_warned_of(state, is_kept, num_warnings):
    rows = [{"params": n, "tokens": 20 * n, "loss": 3.1, "state": "finished"} for n in (1e6, 2e6)]
    rows.append({"params": 3e6, "tokens": 6e7, "loss": 9.0, "state": state})
    table = read_fit_table(cells_of(rows))
    assert (table.num_runs, len(table.dropped)) == ((3, 0) if is_kept else (2, 1))
    assert sum(repr(state) in warning for warning in table.warnings) == num_warnings
    runs = [{"width": width, "lr": 0.1, "loss": 3.1, "state": state} for width in (64, 128)]
    runs += [{"width": width, "lr": 0.2, "loss": 3.2, "state": "ok"} for width in (64, 128)]
    judged = read_transfer_table(cells_of(runs))
    assert (len(judged.points), sum(repr(state) in note for note in judged.notes)) == (
        4 if is_kept else 2,
        num_warnings,
    )


def test_planned_counts_are_taken_only_without_better_ones_and_said():
    names = ["params_target", "params_real", "tokens_target", "tokens_seen"]
    assert choose_columns(names, ("params", "tokens"), {}).columns == {"params": "params_real", "tokens": "tokens_seen"}
    choice = choose_columns(["params_target"], ("params",), {})
    assert choice.columns == {"params": "params_target"} and "planned" in choice.notes[0]
    optuna = ["number", "value", "datetime_start", "params_num_params", "user_attrs_tokens", "state"]
    assert choose_columns(optuna, ("params", "tokens", "loss"), {}).columns == {
        "params": "params_num_params", "tokens": "user_attrs_tokens", "loss": "value"
    }  # fmt: skip


@pytest.mark.parametrize(
    "cell", [True, False, [3.1], {"value": 3.1}, "true", "crashed", None, 10**400, "1e400", "", "\u0663"]
)
def test_booleans_lists_and_objects_are_no_losses(tmp_path, cell):
    assert to_number(cell) is None
    good = {"params": 1e6, "tokens": 2e7, "loss": 3.1}
    with pytest.raises(TableError, match="row 1, column 'loss'"):
        read_fit_table(cells_of([good, good | {"loss": cell}]))
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(good | {"loss": loss}) + "\n" for loss in (3.1, cell)))
    with pytest.raises(TableError, match="row 2, column 'loss'"):
        read_fit_table(tmp_path / "runs.jsonl")
    with pytest.raises(TableError, match="row 1, column loss"):
        read_transfer_table(cells_of([{"width": 64, "lr": 0.1, "loss": loss} for loss in (3.1, cell)]))
    if isinstance(cell, bool | list | dict):
        columns = {"params": [1e6, 2e6], "tokens": [2e7, 4e7], "loss": pa.array([cell, cell])}
        pq.write_table(pa.table(columns), tmp_path / "runs.parquet")
        with pytest.raises(TableError, match="row 2, column 'loss'"):
            read_fit_table(tmp_path / "runs.parquet")


def test_a_text_is_a_number_if_it_spells_one():
    texts = ("3.5", " NaN", "-Infinity", "1e-3", Decimal("2.5"))
    assert list(map(to_number, texts)) == pytest.approx([3.5, math.nan, -math.inf, 1e-3, 2.5], nan_ok=True)
    assert [parse_amount(text) for text in ("1.1B", "53.3M", "10k", "2 T", "5", "nanb", "1e3k")] == [
        1.1e9,
        53.3e6,
        1e4,
        2e12,
        5.0,
        None,
        None,
    ]
    assert read_numbers(["1.1B", "2"], "real", splits_at_commas=True).values == [None, 2.0]


def test_rows_that_hold_no_run_are_dropped_with_their_reason(tmp_path):
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


def test_in_a_transfer_table_a_crash_is_no_divergence(tmp_path):
    path = tmp_path / "sweep.csv"
    path.write_text("width,lr,loss,state\n32,0.1,nan,crashed\n32,0.1,nan,finished\n64,0.1,2.5,finished\n")
    table = read_transfer_table(path)
    assert [(point.size, point.loss_nats) for point in table.points] == [(64, 2.5), (32, None)]
    assert table.dropped[0][0] == 2 and "crashed" in table.dropped[0][1]
    path.write_text("width,lr,loss\n32,0.1,\n64,0.1,2.5\n")
    with pytest.raises(TableError, match=r"row 2, column loss.*only if the loss itself diverged"):
        read_transfer_table(path)
    path.write_text("width,lr,loss,state\n32,0.1,,failed\n")
    with pytest.raises(TableError, match="no run has finished"):
        read_transfer_table(path)


SPREADS = ("{}\t{}\t{}", "{},{},{}", "  {}   {}  {} ", "| {} | {} | {} |", "{}|{}|{}", "{};{};{}")


@pytest.mark.parametrize("form", SPREADS)
@pytest.mark.parametrize("suffix", [".txt", ".csv", ".md"])
def test_the_content_of_a_text_decides_what_separates_its_cells(tmp_path, form, suffix):
    rows = [("params", "tokens", "loss"), ("1e6", "20M", "3.25"), ("2e6", "40M", "3.0")]
    lines = [form.format(*row) for row in rows]
    if "|" in form:
        lines.insert(1, form.format(":--", "---", "--:"))
    path = tmp_path / f"runs{suffix}"
    path.write_text("\n".join(lines) + "\n")
    table = read_fit_table(path)
    assert (table.params.tolist(), table.tokens.tolist()) == ([1e6, 2e6], [2e7, 4e7])
    assert table.loss.tolist() == [3.25, 3.0]


def test_text_before_a_markdown_table_is_refused_by_name(tmp_path):
    (tmp_path / "runs.md").write_text("# My runs\n\n| params | tokens | loss |\n|---|---|---|\n| 1e6 | 2e7 | 3.1 |\n")
    with pytest.raises(FormatError, match="Markdown table: keep the lines of the table"):
        read_fit_table(tmp_path / "runs.md")


def test_spaces_separate_cells_only_if_none_can_be_empty(tmp_path):
    path = tmp_path / "runs.txt"
    path.write_text("# params tokens loss\n1e6 2e7 3.1\n\n2e6 4e7 3.0\n")  # as NumPy writes it
    assert read_fit_table(path).lines == (2, 4)
    path.write_text("params tokens loss\n1e6 2e7 3.1\n2e6 3.0\n")
    with pytest.raises(FormatError, match="2 in row 3"):
        read_fit_table(path)
    path.write_text("params tokens loss\n" + "1e6 2e7 3.1\n" * 1500 + "2e6 3.0\n")
    with pytest.raises(TableError, match="row 1502 has 2 cells: must have 3"):
        read_fit_table(path)


@pytest.mark.parametrize("suffix", [".ndjson", ".txt", ".jsonl"])
def test_json_lines_are_read_under_other_names(tmp_path, suffix):
    path = tmp_path / f"runs{suffix}"
    rows = [{"params": 1e6, "tokens": 2e7, "loss": 3.1}, {"params": 2e6, "tokens": 4e7, "loss": 3.0}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_fit_table(path).loss.tolist() == [3.1, 3.0]
    path.write_text(json.dumps(rows, indent=1))
    with pytest.raises(FormatError, match=r"JSON array.*jq"):
        read_fit_table(path)


def test_a_cell_that_nobody_asks_for_does_not_matter(tmp_path):
    (tmp_path / "runs.csv").write_text(f"params,tokens,loss,config\n1e6,2e7,3.1,{'x' * 200_000}\n2e6,4e7,3.0,\n")
    assert read_fit_table(tmp_path / "runs.csv").num_runs == 2
    odd = ("[" * 2000 + "]" * 2000, '{"a":' * 3000 + "1" + "}" * 3000, "9" * 5000, "1e400", "NaN", '1, "x": 2')
    rows = [f'{{"params": 1e6, "x": {value}, "tokens": 2e7, "loss": {i + 1}}}' for i, value in enumerate(odd)]
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(rows))
    assert read_fit_table(path).loss.tolist() == [1, 2, 3, 4, 5, 6]
    for value in odd:
        path.write_text("\n".join([*rows, f'{{"params": 1e6, "tokens": {value.replace("x", "tokens")}, "loss": 3}}']))
        with pytest.raises(TableError, match="row 7, column 'tokens'"):
            read_fit_table(path)


def test_a_column_that_python_cannot_hold_matters_only_if_asked_for(tmp_path):
    columns = {"params": [1e6, 2e6], "tokens": [2e7, 4e7], "loss": [3.1, 3.0]}
    late = pa.array([2**40, 2**40], type=pa.int64()).cast(pa.timestamp("s"))
    no_utf8 = pa.StringArray.from_buffers(2, pa.array([0, 1, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xff"))
    pq.write_table(pa.table({**columns, "date": late, "note": no_utf8}), tmp_path / "runs.parquet")
    assert read_fit_table(tmp_path / "runs.parquet").num_runs == 2
    assert read_fit_table(cells_of(pa.table({**columns, "date": late}))).num_runs == 2
    with pytest.raises(TableError, match="row 2, column 'date': 'unreadable timestamp"):
        read_fit_table(tmp_path / "runs.parquet", columns={"tokens": "date"})


@pytest.mark.parametrize(
    ("column", "kept", "left_out", "unclear"),
    [
        ("finished", (True, "true", "Yes", 1, "1.0"), (False, "FALSE", "no", 0, "0"), (None, "", "maybe", 0.5)),
        ("crashed", (False, "false", "0"), (True, "T", 1.0), (None, "once", 2)),
        ("exit_code", (0, "0", 0.0, "0:0"), (1, "137", -9, "1:0", "0:9"), (None, "", True, "none", 0.5)),
        ("ExitCode", ("0",), ("2",), ("?",)),
    ],
)
def test_a_flag_or_an_exit_code_says_whether_a_run_finished(column, kept, left_out, unclear):
    def rows(states):
        return [{"params": 1e6 * (i + 1), "tokens": 2e7, "loss": 3.1, column: state} for i, state in enumerate(states)]

    table = read_fit_table(cells_of(rows([*kept, *left_out])))
    assert [row.row for row in table.dropped] == list(range(len(kept), len(kept) + len(left_out)))
    assert column in table.dropped[0].reason and table.num_runs == len(kept) and not table.warnings
    for state in unclear:
        with pytest.raises(TableError, match=f"row {len(kept)}, column '{column}'"):
            read_fit_table(cells_of(rows([*kept, state])))
    ignored = read_fit_table(cells_of(rows(["2026-01-01", "2026-01-02"])))
    assert ignored.num_runs == 2 and any(f"'{column}'" in warning for warning in ignored.warnings)


def test_every_column_of_states_counts_in_both_verbs():
    rows = [
        {"width": width, "lr": lr, "params": width * 1e4, "tokens": 2e7, "loss": 3.0, "finished": "true"}
        for width in (64, 128)
        for lr in (0.1, 0.2)
    ]
    rows.append(rows[0] | {"finished": "false", "loss": None})
    rows.append(rows[0] | {"finished": "", "State": "running"})
    for table in (read_fit_table(cells_of(rows)), read_transfer_table(cells_of(rows))):
        assert _rows_of(table) == [4, 5]
    rows[0]["finished"] = "perhaps"
    with pytest.raises(TableError, match="row 0, column 'finished': 'perhaps': must be true or false"):
        read_transfer_table(cells_of(rows))


def _rows_of(table):
    return [row[0] if isinstance(row, tuple) else row.row for row in table.dropped]


def _choose(names, given=None):
    wanted = ("params", "tokens", "loss", "flops", "width", "learning_rate", "seed", "state")
    return choose_columns(names, wanted, given or {})


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("num_params", "params"),
        ("parameter_count", "params"),
        ("total_tokens", "tokens"),
        ("Val Loss", "loss"),
        ("val/loss", "loss"),
        ("summary.eval/loss", "loss"),
        ("config/lr", "learning_rate"),
        ("params_lr", "learning_rate"),
        ("optimizer.lr", "learning_rate"),
        ("model.n_embd", "width"),
        ("params_seed", "seed"),
        ("State", "state"),
        ("achieved_flops", "flops"),
        ("params_planned", "params"),
    ],
)
def test_columns_are_known_by_the_names_that_people_give(name, role):
    assert _choose([name]).columns == {role: name}


@pytest.mark.parametrize(
    "name",
    [
        "train/loss",
        "train_loss",
        "model.loss",
        "run - val/loss",
        "Duration",
        "head.width",
        "total_gflops",
        "n",
        "target_loss",
        "params_wte",
    ],
)
def test_other_names_are_not_taken(name):
    assert _choose([name]).columns == {}


def test_actual_counts_are_preferred_to_planned_ones_and_the_choice_is_said():
    choice = _choose(["params_planned", "parameter_count", "tokens_actual", "tokens", "loss"])
    assert choice.columns == {"params": "parameter_count", "tokens": "tokens_actual", "loss": "loss"}
    assert "'parameter_count', not 'params_planned'" in choice.notes[0] and "'tokens_actual'" in choice.notes[1]
    tied = _choose(["config/lr", "optimizer.lr"])
    assert tied.columns == {} and "'config/lr' or 'optimizer.lr'" in tied.problems[0]


def test_a_user_may_name_columns():
    assert _choose(["a", "lr", "loss"], {"lr": "a", "params": "loss"}).columns == {
        "learning_rate": "a",
        "params": "loss",
        "loss": "loss",
    }
    problems = _choose(["a", "a"], {"params": "b", "nonsense": "a", "tokens": "a"}).problems
    assert ["b" in problems[0], "nonsense" in problems[1], "twice" in problems[2]] == [True] * 3
    assert find_hyperparameter("optimizer.lr", ["learning_rate", "mine"]) == "learning_rate"
    assert find_hyperparameter("mine", ["learning_rate", "mine"]) == "mine"
    assert drop_unfinished(cells_of([{"state": "CANCELLED by 1000"}]), {"state": "state"}).rows == []


def test_every_bad_cell_is_in_the_problems_and_three_of_them_in_the_message(tmp_path):
    (tmp_path / "runs.csv").write_text("params,tokens,loss\n" + "x,1e7,3\n" * 40)
    with pytest.raises(TableError) as caught:
        read_fit_table(tmp_path / "runs.csv")
    assert len(caught.value.problems) == 40
    assert str(caught.value).count("column 'params'") == 3 and "40 bad cells" in str(caught.value)


def _make_pipe(path):
    os.mkfifo(path)


def _make_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize(("make", "kind"), [(_make_pipe, "pipe"), (_make_socket, "socket")])
def test_what_is_no_file_is_refused_by_its_kind(tmp_path, monkeypatch, make, kind):
    monkeypatch.chdir(tmp_path)
    make("runs.csv")
    with pytest.raises(FormatError, match=f"it is a {kind}"):
        read_cells(tmp_path / "runs.csv")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("name", ["-", "/dev/fd/{}"])
def test_a_table_may_come_from_a_pipe_and_ends_with_its_writer(tmp_path, kind, name):
    columns = {"params": [1e6, 2e6], "tokens": [2e7, 4e7], "loss": [3.1, 3.0]}
    if kind == "parquet":
        pq.write_table(pa.table(columns), tmp_path / "runs")
    elif kind == "jsonl":
        (tmp_path / "runs").write_text(
            "".join(
                json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in zip(*columns.values(), strict=True)
            )
        )
    else:
        (tmp_path / "runs").write_text("params,tokens,loss\n1e6,2e7,3.1\n2e6,4e7,3.0\n")
    reader, writer = os.pipe()
    os.write(writer, (tmp_path / "runs").read_bytes())
    os.close(writer)
    script = "import sys; from scaling_fits.laws.table import read_runs; print(read_runs(sys.argv[1]).loss.tolist())"
    source = name.format(reader)
    done = subprocess.run(
        [sys.executable, "-c", script, source],
        stdin=reader,
        pass_fds=[reader],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(reader)
    assert done.stdout.strip() == "[3.1, 3.0]", done.stderr


def test_a_device_is_refused():
    descriptor = os.open("/dev/zero", os.O_RDONLY)
    try:
        with pytest.raises(FormatError, match="it is a device"):
            read_cells(Path(f"/dev/fd/{descriptor}"))
    finally:
        os.close(descriptor)
