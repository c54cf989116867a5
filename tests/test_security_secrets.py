"""Planted secrets (argv, environment, plan, address, exception) are nowhere on disk, nor in what is
said.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_study import COMMAND, ask, plan_with, write_plan

from launcher.plan.file import PlanError, load_plan
from proxies.core import redaction
from proxies.core.redaction import INSTEAD, LineRedactor, redact_message, redacted, secret_in

ROOT = Path(__file__).parents[1]
SHORT, ENDING = "pgs3cret", "mt-7"
"""Values of PGPASSWORD and MYTOKEN, whose names have no such word by itself."""
ARGV, VARIABLE, PASSWORD = "sk-argvCANARY1234567890ab", "zebra-crossing-canary-42", "hunter2hunter2"
RAISED, PLANNED = "wandb_v1_raisedCANARY12345678", "hf_plannedCANARYabcdefghijkl"
ADDRESS = f"https://jane:{PASSWORD}@files.example.org/data"
SLASHED = "pa/ss@w:rd"
SECRETS = (ARGV, VARIABLE, PASSWORD, RAISED, PLANNED, SHORT, ENDING, SLASHED)
INNOCENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_AUTH_MODE": "token",
    "NUM_TOKENS": "4096",
    "TOY_PATH": "/no/token",
}
ENVIRONMENT = {
    "STORE_TOKEN": VARIABLE,
    "WANDB_API_KEY": RAISED,
    "HTTPS_PROXY": ADDRESS,
    "HF_TOKEN": PLANNED,
    "PGPASSWORD": SHORT,
    "MYTOKEN": ENDING,
    **INNOCENT,
    "OMP_NUM_THREADS": "1",
    "FORERUN_TRACEBACK": "1",
}
MAIN = "import sys; from launcher.cli.cli import main; main(sys.argv[2:])"
SAID = f"""
import os, sys
said = "cannot log in to {ADDRESS} with {RAISED}, api_key={ARGV}, " + os.environ["STORE_TOKEN"]
said += f" postgres://u:{SLASHED}@host {{os.environ['PGPASSWORD']}} {{os.environ['MYTOKEN']}}"
"""
TRAINER = f"""{SAID}
import json
run = json.load(open(os.path.join(sys.argv[1], "run.json")))["values"]
print("environment", dict(os.environ)); print(said, file=sys.stderr)
for name in {tuple(INNOCENT)}: print(f"{{name}}={{os.environ[name]}}")
print('{{"step": 1, "num_tokens": 4096}}', flush=True)
if not run["run_dir"].endswith("attempt-2"):
    raise RuntimeError(said)
n = run["num_steps"]
with open(os.path.join(sys.argv[1], "metrics.jsonl"), "w") as out:
    for step in range(1, n + 1):
        print(json.dumps({{"step": step, "train_loss": 2 + run["lr"]}}), file=out)
    print(json.dumps({{"step": n, "val_loss": 2 + run["lr"]}}), file=out)
"""
MODEL = f"""{SAID}
from torch import nn

class Model(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.readout = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def forward(self, ids):
        raise RuntimeError(said)

def build(shape):
    return Model(shape)
"""


def forerun(*arguments):
    """A command line as a process of its own, a secret among its words; what it said on both
    streams.
    """
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", MAIN, ARGV, *map(str, arguments)],
        env=environment,
        capture_output=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def found_in(folder, said):
    """(secret, place) wherever one is: in bytes of files, in their names, in what was said."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    texts = {str(path): os.fsencode(path.name) + path.read_bytes() for path in files} | {
        "said": said
    }
    return [
        (secret, place)
        for place, text in texts.items()
        for secret in SECRETS
        if secret.encode() in text
    ]


def test_a_command_that_shows_its_environment_and_fails_with_secrets(tmp_path):
    (tmp_path / "trainer.py").write_text(TRAINER)
    plan = plan_with(tmp_path, COMMAND % sys.executable)
    study = tmp_path / "study"
    code, said = forerun("sweep", plan, "--study", study)
    assert code == 0 and b"RuntimeError" in said, said.decode()
    for arguments in (("status", study, "--json"), ("status", study, "--brief")):
        code, more = forerun(*arguments)
        assert code == 0
        said += more
    logs = list(study.rglob("log.txt"))
    kept = [
        b"cannot log in",
        b'{"step": 1, "num_tokens": 4096}\n',
        *(f"{n}={v}\n".encode() for n, v in INNOCENT.items()),
    ]
    assert logs and all(line in log.read_bytes() for log in logs for line in kept), (
        "only the secrets go"
    )
    assert found_in(study, said) == []


def test_a_model_that_fails_with_secrets(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    write_plan(tmp_path)
    plan = plan_with(tmp_path, '[proxy]\nfactory = "mine:build"\n')
    code, said = forerun("sweep", plan, "--study", tmp_path / "study")
    assert code in (1, 2) and b"RuntimeError" in said, said.decode()
    assert found_in(tmp_path / "study", said) == []


def open_gates(study):
    body = ask("status", study)[1]
    return [gate["name"] for gate in body["gates"] if gate["outcome"] != "passed"]


def test_a_reason_that_holds_one_is_refused(tmp_path):
    code, said = forerun("freeze", tmp_path, "--accept", "fit", "--reason", f"as {PLANNED} says")
    assert code == 2 and b"--reason holds what looks like" in said
    assert found_in(tmp_path, said) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_chain(tmp_path):
    """Study, report, frozen config, export and W&B's folder, with secrets around: none gets in."""
    plan, study = write_plan(tmp_path), tmp_path / "study"
    code, said = forerun("run", plan, "--study", study)
    assert code == 0, said.decode()
    accepts = [part for gate in open_gates(study) for part in ("--accept", gate)]
    code, more = forerun("freeze", study, *accepts, *(["--reason", "a test"] if accepts else []))
    assert code == 0, more.decode()
    said += more
    (frozen,) = (study / "frozen").iterdir()
    for arguments in (
        ("report", study),
        ("export", frozen, "--to", "torchtitan", "--allow-lossy"),
        ("verify", frozen),
        ("dashboards", study),
    ):
        code, more = forerun(*arguments)
        assert code == 0, more.decode()
        said += more
    assert (
        len(list((study / "wandb").rglob("*.wandb"))) > 50
        and (study / "wandb" / "workspace.json").is_file()
    )
    assert found_in(study, said) == []


def test_the_search_for_secrets_can_fail(tmp_path):
    (tmp_path / "log.txt").write_text(f"x {VARIABLE} y")
    assert found_in(tmp_path, PASSWORD.encode()) == [
        (VARIABLE, str(tmp_path / "log.txt")),
        (PASSWORD, "said"),
    ]


@pytest.mark.parametrize(
    "foreign", [f"login with --api-key {SHORT} failed", f"it says\n  password: {SHORT} here\n"]
)
def test_a_message_of_ours_keeps_its_words_and_loses_what_others_brought(foreign):
    hint = "must be an object with a string `text` (--text-key names another key); token: it is one"
    text = redact_message(
        f"{hint}; {foreign}; {PLANNED} {VARIABLE}", [foreign], {"STORE_TOKEN": VARIABLE}
    )
    assert hint in text and not any(secret in text for secret in SECRETS)


def test_a_hint_of_the_command_line_is_whole(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "a"}\n')
    code, text = forerun("tokenize", tmp_path / "a.jsonl", "--out", tmp_path / "out")
    assert code == 2 and b"--text-key" in text and INSTEAD.encode() not in text


PLANS = {
    "proxy.command": f"python train.py --lr {{lr}} --api-key {PLANNED}",
    "data.external": ADDRESS,
    "data.path": f"corpus-{VARIABLE}",
    "cluster.address": f"ray://jane:{PASSWORD}@head:10001",
    "proxy.metrics_path": f"{{run_dir}}/{RAISED}.jsonl",
    "proxy.code_path": f"code/{ARGV}",
}


@pytest.mark.parametrize("key", PLANS)
def test_a_plan_that_holds_one_is_refused_without_saying_it(tmp_path, monkeypatch, key):
    monkeypatch.setenv("STORE_TOKEN", VARIABLE)
    (tmp_path / "plan.toml").write_text("")
    for overrides in ((f'{key}="{PLANS[key]}"',), (f'{key}="{PLANS[key]}"', "model.seq_len=-1")):
        with pytest.raises(PlanError) as told:
            load_plan(tmp_path / "plan.toml", overrides)
        assert f"{key} holds what looks like" in str(told.value)
        assert not any(secret in str(told.value) for secret in SECRETS)


FINE = (
    "python train.py --lr {lr} --seed {seed}",
    "--max-tokens 5 --token-file f --batch_tokens 5",
    "--revision " + 10 * "0a1b",
    "s3://bucket/words v1",
    "sk-learn-models-in-a-folder",
    "a token: the smallest piece",
    "--tokenizer bytes",
    "a basic understanding of the key result",
    "the key fix is in commit " + 10 * "0a1b",
    "run at " + 10 * "0a1b",
    "--api-key $WANDB_API_KEY and password=${DB_PASSWORD}",
    "64 hex digits are a digest, not a key: " + 16 * "0a1b",
)


@pytest.mark.parametrize("text", FINE)
def test_a_plan_without_one_is_not(text):
    assert secret_in(text, {"GPG_KEY": "short", "SECRET_FILE": "/run/secrets/words"}) == ""


ENVIRONMENT_SEEN = {
    "STORE_TOKEN": VARIABLE,
    "MYSQL_PWD": "p w",
    "SSHPASS": "ssh1",
    "apiKey": "keykeykey",
    "DEPLOY_PAT": "one\ntwo-two-two",
    "DEBUG_KEY": "true",
    "PIN_PASS": "123456",
    "KEY_FOLDER": "/",
    "HF_TOKEN_PATH": "anything",
    "TOKEN_FILE": "anything",
    **INNOCENT,
}
SHOWN = {
    "batch_tokens = 64: 7 is no divisor": "batch_tokens = 64: 7 is no divisor",
    f"login at {ADDRESS} failed": "login at https://***@files.example.org/data failed",
    f"API_KEY={ARGV} was refused": "API_KEY=*** was refused",
    "password: hunter2 and more": "password: ***",
    f"Bearer {20 * 'x'}": "Bearer ***",
    f"it is {VARIABLE}.": "it is ***.",
    "ValueError: num_tokens: 5": "ValueError: num_tokens: 5",
    "target.tokens_per_param = 0.5: more": "target.tokens_per_param = 0.5: more",
    "/etc/passwd: it is no folder": "/etc/passwd: it is no folder",
    f"two: {RAISED} {PLANNED}": "two: *** ***",
    "the key 3f786850e387550fdab836ed7e6dc881de23001b": "the key ***",
    "a p w, an ssh1, no xssh1, keykeykeys": "a ***, an ***, no xssh1, ***s",
    "two-two-two of several lines": "*** of several lines",
    "anything true 123456 / token false 4096": "anything true 123456 / token false 4096",
    "postgres://u:p@a/s:s@host/db?x=1": "postgres://***@host/db?x=1",
    "see https://example.org/@user/page": "see https://example.org/@user/page",
    "--wandb-key XYZ12 --lr 3 --key-value-heads 4": "--wandb-key *** --lr 3 --key-value-heads 4",
    "{'DB_PASSPHRASE': \"a b\", 'NUM_TOKENS': '4096'}": (
        "{'DB_PASSPHRASE': \"***\", 'NUM_TOKENS': '4096'}"
    ),
    '{"step": 1, "num_tokens": 4096000, "key": "a.b"}': (
        '{"step": 1, "num_tokens": 4096000, "key": "a.b"}'
    ),
    "Missing key(s): key: layers.0.wq": "Missing key(s): key: layers.0.wq",
    '--end-token </s>: gone; {"eos_token": "<s>"}': '--end-token </s>: gone; {"eos_token": "<s>"}',
    "KeyError: 'rope' InvalidTokenError: it ended": "KeyError: 'rope' InvalidTokenError: it ended",
    "PATH=/usr/bin:/bin PWD=/root RAY_AUTH_MODE=token": (
        "PATH=/usr/bin:/bin PWD=/root RAY_AUTH_MODE=token"
    ),
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.c2lnbmF0dXJl": "***",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY----- so": "*** so",
    "sk_live_0123456789 AIzaSyD-1234567890abcdefghijk npm_0123456789abcdefgh xoxb-12345-67890ab": (
        "*** *** *** ***"
    ),
}


@pytest.mark.parametrize("text", [text for text, shown in SHOWN.items() if shown != text])
def test_what_a_log_hides_is_refused_where_it_would_be_kept(text):
    assert secret_in(text, ENVIRONMENT_SEEN)


@pytest.mark.parametrize(
    "text", ["wandb key {}", "{} is my W&B login", "WANDB_API_KEY {}", "commit {0}, token {0}"]
)
def test_a_key_of_forty_hex_digits_is_refused(text):
    assert secret_in(text.format(10 * "0a1b"), {})


@pytest.mark.parametrize("text", SHOWN)
def test_texts_lose_their_secrets_and_nothing_else(text):
    assert redacted(text, ENVIRONMENT_SEEN) == SHOWN[text]


def test_a_private_key_over_many_lines(tmp_path):
    lines = [
        "x",
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        "b3BlbnNzaC1rZXktdjEAAAAA",
        "-----END OPENSSH PRIVATE KEY-----",
        "y",
    ]
    assert [*map(LineRedactor(), lines)] == ["x", INSTEAD, INSTEAD, INSTEAD, "y"]


FRAGMENTS = (
    *SHOWN,
    *FINE,
    *SECRETS,
    "tokens/s 5",
    "num_tokens: 3",
    "forward_pass 1.2",
    "key",
    "token",
    "--api-key",
    "-k",
    " ",
    "=",
    ": ",
    "x",
    "\u00e9",
    "\u00a0",
    "://",
    "@",
    '"',
    "a.b",
    "deploy-PAT",
    "MyTokenStore",
    "Basic",
    "sk-",
    "\ud800",
    "task-1",
    "eyJ",
    "0a1b" * 10,
)


def test_a_block_of_lines_loses_what_each_line_alone_would():
    """The quick search for clues misses no secret that the patterns find, whatever stands around
    it.
    """
    draw = random.Random(1)
    for _ in range(300):
        lines = ["".join(draw.choices(FRAGMENTS, k=draw.randint(1, 5))) for _ in range(8)]
        lines = [line.replace("\n", " ") for line in lines if "PRIVATE KEY" not in line]
        wanted = [redacted(line, ENVIRONMENT_SEEN) for line in lines]
        assert LineRedactor(ENVIRONMENT_SEEN)("\n".join(lines)).split("\n") == wanted


def test_only_lines_with_a_clue_are_cleaned(monkeypatch):
    """Ordinary output never reaches the slow patterns."""
    searched = []
    monkeypatch.setattr(redaction, "_named_hidden", lambda text: searched.append(text) or text)
    ordinary = (
        "2026-11-28 INFO step 12/90 val_loss 3.35 lr 6e-04 tokens/s 123,456 num_tokens: "
        "4096 task-1 https://x.org"
    )
    text = "\n".join([ordinary] * 100)
    assert LineRedactor({})(text) == text and searched == []
    LineRedactor({})(f"{text}\nmy password: x\n{text}")
    assert searched == ["my password: x"]


def test_what_is_too_much_to_clean_is_hidden_whole(monkeypatch):
    monkeypatch.setattr(redaction, "MAX_CLEANED_BYTES", 100)
    text = LineRedactor({})(
        "\n".join(["fine", *(f"line {i} password=hunter{i}" for i in range(9)), "fine"])
    )
    lines = text.split("\n")
    assert lines[:2] == ["fine", f"line 0 password={INSTEAD}"] and lines[-2:] == [INSTEAD, "fine"]


UNITS = (
    "-",
    "a",
    'a="',
    "token",
    "://a:",
    "://",
    "sk-",
    "eyJaaaaaaaa.",
    "eyJ-aaaaaaaa",
    "-----BEGIN PRIVATE KEY",
    "key ",
    "--key ",
    "password ",
    "basic x",
    "a@",
    "KEY='",
    "A_",
)


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_twice_the_line_takes_twice_the_time(unit):
    seconds = []
    for num_chars in (2**17, 2**18):
        begin = time.process_time()
        redacted(unit * (num_chars // len(unit)))
        seconds.append(time.process_time() - begin)
    assert seconds[1] < 3 * seconds[0] + 0.2, "a pattern is quadratic"


@pytest.mark.parametrize(
    "unit",
    [
        "-",
        "a",
        'a="',
        "token",
        "://a:",
        "sk-",
        "eyJaaaaaaaa.",
        "-----BEGIN PRIVATE KEY",
        "eyJ-aaaaaaaa",
    ],
)
def test_a_long_line_takes_no_time(unit):
    begin = time.process_time()
    redacted(unit * (65536 // len(unit)))
    assert time.process_time() - begin < 10, "some took minutes by backtracking"
