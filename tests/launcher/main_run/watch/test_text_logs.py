"""Tests of logs in the formats of other trainers: text, CSV, TSV, JSON lines, trainer_state.json.

Files that are no logs must be refused.
"""

import gzip
import json

import pytest
from tiny_study import run_forerun, run_json
from watched_case import NUM_STEPS, compute_loss_at, read_log

STEPS = range(1, NUM_STEPS + 1)
FINAL = 2.15
BANNER = "import torch\nprint(0)\n" + "=" * 100 + "\nRunning Python 3.12\n"


def make_llm_c_log():
    """Return a log as llm.c writes it, which counts steps from 0."""
    rows = [f"s:{s - 1} trl:{compute_loss_at(s):.4f} lr:0.000300 norm:1.25" for s in STEPS]
    return "\n".join(["s:0 tel:10.9876", *rows, f"s:{NUM_STEPS} tel:{FINAL:.4f}", ""])


def make_modded_nanogpt_log():
    """Return a log as modded-nanogpt writes it, below a banner."""
    rows = [
        f"step:{s}/{NUM_STEPS} train_loss:{compute_loss_at(s):.4f} train_time:{s}ms step_avg:1.00ms"
        for s in STEPS
    ]
    ends = [
        f"step:{s}/{NUM_STEPS} val_loss:{loss:.4f} train_time:0ms step_avg:nanms"
        for s, loss in ((0, 10.9), (NUM_STEPS, FINAL))
    ]
    return BANNER + "\n".join([ends[0], *rows, ends[1], ""])


def make_nanotron_log():
    """Return a log as nanotron writes it, with abbreviated numbers and no validation loss."""
    head = "11/28/2026 09:00:00 [INFO|DP=0|PP=0|TP=0|node-1]: "
    rows = [
        f"{head}iteration: {s} / {NUM_STEPS} | consumed_tokens: {s}.1K | "
        "elapsed_time_per_iteration_ms: 250 | "
        f"tokens_per_sec: 4.1K | global_batch_size: 512 | lm_loss: {compute_loss_at(s):.4f} | "
        "lr: 0.0003 | grad_norm: 1.25"
        for s in STEPS
    ]
    return BANNER + "\n".join([*rows, ""])


def make_megatron_log():
    """Return a log as Megatron-LM writes it, with the validation loss on a line of its own."""
    rows = [
        f" [2026-11-28 09:00:00] iteration {s:8d}/{NUM_STEPS:8d} | consumed samples: {s:12d} | "
        "elapsed time per iteration (ms): 250.0 | learning rate: 3.0E-04 | "
        f"lm loss: {compute_loss_at(s):.6E} | grad norm: 1.250 |"
        for s in STEPS
    ]
    end = (
        f" validation loss at iteration {NUM_STEPS} | lm loss value: {FINAL:.6E} | lm loss PPL: "
        "8.5E+00 | "
    )
    return BANNER + "\n".join([*rows, "-" * 80, end, ""])


def make_trainer_state():
    """Return trainer_state.json as the Hugging Face Trainer writes it."""
    rows = [
        {
            "epoch": s / 100,
            "grad_norm": 1.25,
            "learning_rate": 3e-4,
            "loss": compute_loss_at(s),
            "step": s,
        }
        for s in STEPS
    ]
    rows += [
        {"epoch": 4.0, "eval_loss": FINAL, "step": NUM_STEPS},
        {"step": NUM_STEPS, "train_loss": 3.0},
    ]
    return json.dumps(
        {"global_step": NUM_STEPS, "log_history": rows, "max_steps": NUM_STEPS}, indent=2
    )


def make_table(delimiter):
    """Return a table whose head is repeated before the last row."""
    rows = [["epoch", "step", "train_loss", "val_loss", "grad_norm"]]
    rows += [["0", str(s), f"{compute_loss_at(s):.6f}", "", "1.25"] for s in STEPS]
    rows += [rows[0], ["0", str(NUM_STEPS), "", str(FINAL), ""]]
    return "\r\n".join(map(delimiter.join, rows))


def make_llama_factory_log():
    """Return a log as LLaMA-Factory writes it, with a byte order mark and no validation loss."""
    rows = [
        {
            "current_steps": s,
            "total_steps": NUM_STEPS,
            "loss": compute_loss_at(s),
            "grad_norm": 1.25,
        }
        for s in STEPS
    ]
    return "\ufeff" + "".join(json.dumps(row) + "\n" for row in rows)


LOGS = {
    "llm.c": ("main.log", make_llm_c_log, FINAL),
    "modded-nanogpt": ("4f2e.txt", make_modded_nanogpt_log, FINAL),
    "nanotron": ("train.log", make_nanotron_log, None),
    "Megatron-LM": ("out.txt", make_megatron_log, FINAL),
    "trainer_state.json": ("trainer_state.json", make_trainer_state, FINAL),
    "Megatron-LM under torchrun": (
        "out.txt",
        lambda: "[W1128 09:00:00] warning\n" + make_megatron_log(),
        FINAL,
    ),
    "LLaMA-Factory": ("trainer_log.jsonl", make_llama_factory_log, None),
    "CSV": ("metrics.csv", lambda: make_table(","), FINAL),
    "TSV": ("metrics.tsv", lambda: make_table("\t"), FINAL),
    "semicolons": ("metrics.csv", lambda: make_table(";"), FINAL),
}
"""Logs by trainer: a file name, a function that makes the text, and the final validation loss."""


@pytest.mark.parametrize("trainer", LOGS)
def test_log_of_each_trainer_is_read(tmp_path, trainer):
    name, make, final = LOGS[trainer]
    path = tmp_path / name
    path.write_text(make())
    columns = read_log(path, num_steps=NUM_STEPS).columns
    assert columns.steps.tolist() == list(STEPS)
    assert columns.train_loss_nats == pytest.approx([compute_loss_at(s) for s in STEPS], abs=1e-4)
    assert trainer == "modded-nanogpt" or set(columns.grad_norm.tolist()) == {1.25}
    assert columns.validation_loss_nats.tolist()[-1:] == (
        [] if final is None else [pytest.approx(final, abs=1e-4)]
    )
    if trainer == "nanotron" or trainer.startswith("Megatron-LM"):
        assert set(columns.seconds.tolist()) == {0.25}


def test_abbreviated_numbers_of_nanotron_are_read(tmp_path):
    (tmp_path / "train.log").write_text(make_nanotron_log())
    assert set(
        read_log(tmp_path / "train.log", num_steps=NUM_STEPS).columns.tokens_per_second.tolist()
    ) == {4100.0}


@pytest.mark.parametrize("trainer", ["llm.c", "trainer_state.json", "CSV"])
def test_folder_with_logs_and_half_written_log_are_read(frozen, tmp_path, trainer):
    name, make, _ = LOGS[trainer]
    for at, size in (("checkpoint-200", 0.5), ("checkpoint-400", 1.0)):
        folder = tmp_path / "out" / (at if name.endswith("json") else "")
        folder.mkdir(parents=True, exist_ok=True)
        text = make()
        (folder / name).write_text(text if name.endswith("json") else text[: int(size * len(text))])
    code, body = run_json("watch", frozen, "--once", "--metrics", tmp_path / "out")
    assert (code, body["figures"]["step"]) == (0, NUM_STEPS), body
    complete = tmp_path / "out" / ("checkpoint-400" if name.endswith("json") else "") / name
    (tmp_path / name).write_text(complete.read_text()[:-7])
    cut_short = run_json("watch", frozen, "--once", "--metrics", tmp_path / name)[1]
    assert cut_short["figures"]["step"] in (0, NUM_STEPS) and cut_short["notes"]


UNKNOWN = {
    "prose": ("train.log", b"loading the model\ndone\n", "'loading the model'"),
    "garbage": ("log.jsonl", bytes(range(1, 256)) * 40, r"'\x01\x02"),
    "gzip": (
        "log.jsonl.gz",
        gzip.compress(b'{"step": 1, "loss": 3.0}\n'),
        "is compressed: unpack it",
    ),
    "other names": ("log.jsonl", b'{"s": 1, "l": 3.0}\n', "none of the names looked for"),
    "other columns": ("metrics.csv", b"s,l\n1,3.0\n", "'s,l'"),
    "JSON without a history": ("state.json", b'{"a": [1, 2]}', "is no log that forerun knows"),
}
"""Files that are no logs, by kind: a name, the content, and words of the refusal."""


@pytest.mark.parametrize("kind", UNKNOWN)
def test_file_that_is_no_log_is_refused_with_its_first_line(frozen, tmp_path, kind):
    name, content, message = UNKNOWN[kind]
    (tmp_path / name).write_bytes(content)
    code, body = run_json("watch", frozen, "--once", "--metrics", tmp_path / name)
    assert code == 4 and message in body["why"], body["why"]
    text = run_forerun("watch", frozen, "--once", "--metrics", tmp_path / name)[1]
    assert "nothing is logged yet" not in text and "\x01" not in text
