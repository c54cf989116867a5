"""Logs of text, CSV and trainer_state.json as trainers write them, and files that are not logs."""

import gzip
import json

import pytest
from tiny_study import ask, forerun
from watched_case import NUM_STEPS, loss_at, read

STEPS = range(1, NUM_STEPS + 1)
FINAL = 2.15
BANNER = "import torch\nprint(0)\n" + "=" * 100 + "\nRunning Python 3.12\n"


def llm_c():
    rows = [f"s:{s - 1} trl:{loss_at(s):.4f} lr:0.000300 norm:1.25" for s in STEPS]
    return "\n".join(["s:0 tel:10.9876", *rows, f"s:{NUM_STEPS} tel:{FINAL:.4f}", ""])


def modded_nanogpt():
    rows = [
        f"step:{s}/{NUM_STEPS} train_loss:{loss_at(s):.4f} train_time:{s}ms step_avg:1.00ms"
        for s in STEPS
    ]
    ends = [
        f"step:{s}/{NUM_STEPS} val_loss:{loss:.4f} train_time:0ms step_avg:nanms"
        for s, loss in ((0, 10.9), (NUM_STEPS, FINAL))
    ]
    return BANNER + "\n".join([ends[0], *rows, ends[1], ""])


def nanotron():
    head = "11/28/2026 09:00:00 [INFO|DP=0|PP=0|TP=0|node-1]: "
    rows = [
        f"{head}iteration: {s} / {NUM_STEPS} | consumed_tokens: {s}.1K | "
        "elapsed_time_per_iteration_ms: 250 | "
        f"tokens_per_sec: 4.1K | global_batch_size: 512 | lm_loss: {loss_at(s):.4f} | lr: 0.0003 | "
        "grad_norm: 1.25"
        for s in STEPS
    ]
    return BANNER + "\n".join([*rows, ""])


def megatron():
    rows = [
        f" [2026-11-28 09:00:00] iteration {s:8d}/{NUM_STEPS:8d} | consumed samples: {s:12d} | "
        "elapsed time per "
        f"iteration (ms): 250.0 | learning rate: 3.0E-04 | lm loss: {loss_at(s):.6E} | grad norm: "
        "1.250 |"
        for s in STEPS
    ]
    end = (
        f" validation loss at iteration {NUM_STEPS} | lm loss value: {FINAL:.6E} | lm loss PPL: "
        "8.5E+00 | "
    )
    return BANNER + "\n".join([*rows, "-" * 80, end, ""])


def trainer_state():
    rows = [
        {"epoch": s / 100, "grad_norm": 1.25, "learning_rate": 3e-4, "loss": loss_at(s), "step": s}
        for s in STEPS
    ]
    rows += [
        {"epoch": 4.0, "eval_loss": FINAL, "step": NUM_STEPS},
        {"step": NUM_STEPS, "train_loss": 3.0},
    ]
    return json.dumps(
        {"global_step": NUM_STEPS, "log_history": rows, "max_steps": NUM_STEPS}, indent=2
    )


def table(delimiter):
    rows = [["epoch", "step", "train_loss", "val_loss", "grad_norm"]]
    rows += [["0", str(s), f"{loss_at(s):.6f}", "", "1.25"] for s in STEPS]
    rows += [rows[0], ["0", str(NUM_STEPS), "", str(FINAL), ""]]
    return "\r\n".join(map(delimiter.join, rows))


def llama_factory():
    rows = [
        {"current_steps": s, "total_steps": NUM_STEPS, "loss": loss_at(s), "grad_norm": 1.25}
        for s in STEPS
    ]
    return "\ufeff" + "".join(json.dumps(row) + "\n" for row in rows)


LOGS = {
    "llm.c": ("main.log", llm_c, FINAL),
    "modded-nanogpt": ("4f2e.txt", modded_nanogpt, FINAL),
    "nanotron": ("train.log", nanotron, None),
    "Megatron-LM": ("out.txt", megatron, FINAL),
    "trainer_state.json": ("trainer_state.json", trainer_state, FINAL),
    "Megatron-LM under torchrun": (
        "out.txt",
        lambda: "[W1128 09:00:00] warning\n" + megatron(),
        FINAL,
    ),
    "LLaMA-Factory": ("trainer_log.jsonl", llama_factory, None),
    "CSV": ("metrics.csv", lambda: table(","), FINAL),
    "TSV": ("metrics.tsv", lambda: table("\t"), FINAL),
    "semicolons": ("metrics.csv", lambda: table(";"), FINAL),
}


@pytest.mark.parametrize("trainer", LOGS)
def test_a_trainers_log_is_read(tmp_path, trainer):
    name, make, final = LOGS[trainer]
    path = tmp_path / name
    path.write_text(make())
    columns = read(path, num_steps=NUM_STEPS).columns
    assert columns.steps.tolist() == list(STEPS)
    assert columns.train_loss_nats == pytest.approx([loss_at(s) for s in STEPS], abs=1e-4)
    assert trainer == "modded-nanogpt" or set(columns.grad_norm.tolist()) == {1.25}
    assert columns.validation_loss_nats.tolist()[-1:] == (
        [] if final is None else [pytest.approx(final, abs=1e-4)]
    )
    if trainer == "nanotron" or trainer.startswith("Megatron-LM"):
        assert set(columns.seconds.tolist()) == {0.25}


def test_units_of_nanotron(tmp_path):
    (tmp_path / "train.log").write_text(nanotron())
    assert set(
        read(tmp_path / "train.log", num_steps=NUM_STEPS).columns.tokens_per_second.tolist()
    ) == {4100.0}


@pytest.mark.parametrize("trainer", ["llm.c", "trainer_state.json", "CSV"])
def test_a_folder_with_the_log_and_a_half_written_end(frozen, tmp_path, trainer):
    name, make, _ = LOGS[trainer]
    for at, size in (("checkpoint-200", 0.5), ("checkpoint-400", 1.0)):
        folder = tmp_path / "out" / (at if name.endswith("json") else "")
        folder.mkdir(parents=True, exist_ok=True)
        text = make()
        (folder / name).write_text(text if name.endswith("json") else text[: int(size * len(text))])
    code, body = ask("watch", frozen, "--once", "--metrics", tmp_path / "out")
    assert (code, body["figures"]["step"]) == (0, NUM_STEPS), body
    complete = tmp_path / "out" / ("checkpoint-400" if name.endswith("json") else "") / name
    (tmp_path / name).write_text(complete.read_text()[:-7])
    torn = ask("watch", frozen, "--once", "--metrics", tmp_path / name)[1]
    assert torn["figures"]["step"] in (0, NUM_STEPS) and torn["notes"]


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


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_file_that_is_not_a_log_is_refused_with_its_first_line(frozen, tmp_path, kind):
    name, content, message = UNKNOWN[kind]
    (tmp_path / name).write_bytes(content)
    code, body = ask("watch", frozen, "--once", "--metrics", tmp_path / name)
    assert code == 4 and message in body["why"], body["why"]
    text = forerun("watch", frozen, "--once", "--metrics", tmp_path / name)[1]
    assert "nothing is logged yet" not in text and "\x01" not in text
