"""Tests that secrets appear neither in files nor in output.

Secrets are planted in arguments, environment variables, plans, URLs, and exceptions.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_study import COMMAND, run_json, write_plan, write_plan_with
from tiny_study import run_forerun as run_in_process

from forerun._launcher.study.plan.file import PlanError, load_plan
from forerun._proxies.core import redaction
from forerun._proxies.core.redaction import (
    REPLACEMENT,
    LineRedactor,
    find_secret,
    redact,
    redact_message,
)

ROOT = Path(__file__).parents[1]
SHORT, ENDING = "pgs3cret", "mt-7"
"""Values of PGPASSWORD and MYTOKEN, names in which `password` and `token` are only a part."""
# Secrets by the place where they are planted: arguments, environment, URL, exception, and plan.
ARGV, VARIABLE, PASSWORD = "sk-argvCANARY1234567890ab", "zebra-crossing-canary-42", "hunter2hunter2"
RAISED, PLANNED = "wandb_v1_raisedCANARY12345678", "hf_plannedCANARYabcdefghijkl"
ADDRESS = f"https://jane:{PASSWORD}@files.example.org/data"
SLASHED = "pa/ss@w:rd"
"""A password with the characters that separate the parts of a URL."""
SECRETS = (ARGV, VARIABLE, PASSWORD, RAISED, PLANNED, SHORT, ENDING, SLASHED)
INNOCENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_AUTH_MODE": "token",
    "NUM_TOKENS": "4096",
    "TOY_PATH": "/no/token",
}
"""Variables whose names look like those of secrets. Their values must be kept."""
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
"""Environment variables of the commands under test."""
RUN_CLI = "import sys; from forerun._launcher.cli.cli import main; main(sys.argv[2:])"
"""Program that runs the command line. Its first argument is a secret that the verbs do not see."""
SECRET_MESSAGE = f"""
import os, sys
message = "cannot log in to {ADDRESS} with {RAISED}, api_key={ARGV}, " + os.environ["STORE_TOKEN"]
message += f" postgres://u:{SLASHED}@host {{os.environ['PGPASSWORD']}} {{os.environ['MYTOKEN']}}"
"""
"""Program text that puts every secret into the variable `message`."""
TRAINER = f"""{SECRET_MESSAGE}
import json
run = json.load(open(os.path.join(sys.argv[1], "run.json")))["values"]
print("environment", dict(os.environ)); print(message, file=sys.stderr)
for name in {tuple(INNOCENT)}: print(f"{{name}}={{os.environ[name]}}")
print('{{"step": 1, "num_tokens": 4096}}', flush=True)
if not run["run_dir"].endswith("attempt-2"):
    raise RuntimeError(message)
n = run["num_steps"]
with open(os.path.join(sys.argv[1], "metrics.jsonl"), "w") as out:
    for step in range(1, n + 1):
        print(json.dumps({{"step": step, "train_loss": 2 + run["lr"]}}), file=out)
    print(json.dumps({{"step": n, "val_loss": 2 + run["lr"]}}), file=out)
"""
"""A user's trainer that prints its environment and the secrets; its first attempt fails."""
MODEL = f"""{SECRET_MESSAGE}
from torch import nn

class Model(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.readout = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def forward(self, ids):
        raise RuntimeError(message)

def build(shape):
    return Model(shape)
"""
"""A user's model whose forward pass raises an error with the secrets."""


def run_forerun(*arguments):
    """Run the command line in a new process with a secret among its arguments.

    Returns:
        Exit code and output.
    """
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", RUN_CLI, ARGV, *map(str, arguments)],
        env=environment,
        capture_output=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def find_secrets(folder, output):
    """Return (secret, place) for every secret in the bytes or names of files, or in the output."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    texts = {str(path): os.fsencode(path.name) + path.read_bytes() for path in files} | {
        "output": output
    }
    return [
        (secret, place)
        for place, text in texts.items()
        for secret in SECRETS
        if secret.encode() in text
    ]


@pytest.fixture
def secret_environment(monkeypatch):
    """The planted secrets in the environment of this process."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def test_secrets_of_a_command_that_prints_its_environment_are_hidden(tmp_path, secret_environment):
    (tmp_path / "trainer.py").write_text(TRAINER)
    plan = write_plan_with(tmp_path, COMMAND % sys.executable)
    study = tmp_path / "study"
    code, output = run_forerun("sweep", plan, "--study", study)
    assert code == 0 and b"RuntimeError" in output, output.decode()
    for option in ("--json", "--brief"):
        code, stdout, stderr = run_in_process("status", study, option)
        assert code == 0
        output += (stdout + stderr).encode()
    logs = list(study.rglob("log.txt"))
    expected_lines = [
        b"cannot log in",
        b'{"step": 1, "num_tokens": 4096}\n',
        *(f"{n}={v}\n".encode() for n, v in INNOCENT.items()),
    ]
    assert logs and all(line in log.read_bytes() for log in logs for line in expected_lines), (
        "everything but the secrets is kept"
    )
    assert find_secrets(study, output) == []


def test_secrets_in_a_models_error_are_hidden(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    write_plan(tmp_path)
    plan = write_plan_with(tmp_path, '[proxy]\nfactory = "mine:build"\n')
    code, output = run_forerun("sweep", plan, "--study", tmp_path / "study")
    assert code in (1, 2) and b"RuntimeError" in output, output.decode()
    assert find_secrets(tmp_path / "study", output) == []


def list_open_gates(study):
    """Return the gates of a study that did not pass."""
    body = run_json("status", study)[1]
    return [gate["name"] for gate in body["gates"] if gate["outcome"] != "passed"]


def test_reason_with_a_secret_is_refused(tmp_path, secret_environment):
    code, stdout, stderr = run_in_process(
        "freeze", tmp_path, "--accept", "fit", "--reason", f"as {PLANNED} says"
    )
    assert code == 2 and "--reason seems to contain a secret" in stderr
    assert find_secrets(tmp_path, (stdout + stderr).encode()) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_whole_chain_stores_no_secret(tmp_path):
    """All verbs run with secrets in the environment.

    They write the study, its report, the frozen config, an export, and W&B's folder.
    """
    plan, study = write_plan(tmp_path), tmp_path / "study"
    code, output = run_forerun("run", plan, "--study", study)
    assert code == 0, output.decode()
    accepts = [part for gate in list_open_gates(study) for part in ("--accept", gate)]
    code, more_output = run_forerun(
        "freeze", study, *accepts, *(["--reason", "a test"] if accepts else [])
    )
    assert code == 0, more_output.decode()
    output += more_output
    (frozen,) = (study / "frozen").iterdir()
    for arguments in (
        ("report", study),
        ("export", frozen, "--to", "torchtitan", "--allow-lossy"),
        ("verify", frozen),
        ("dashboards", study),
    ):
        code, more_output = run_forerun(*arguments)
        assert code == 0, more_output.decode()
        output += more_output
    assert (
        len(list((study / "wandb").rglob("*.wandb"))) > 50  # one for each run of the study
        and (study / "wandb" / "workspace.json").is_file()
    )
    assert find_secrets(study, output) == []


def test_planted_secrets_are_found(tmp_path):
    (tmp_path / "log.txt").write_text(f"x {VARIABLE} y")
    assert find_secrets(tmp_path, PASSWORD.encode()) == [
        (VARIABLE, str(tmp_path / "log.txt")),
        (PASSWORD, "output"),
    ]


@pytest.mark.parametrize(
    "foreign", [f"login with --api-key {SHORT} failed", f"it says\n  password: {SHORT} here\n"]
)
def test_message_keeps_its_own_words_and_loses_secrets_of_foreign_text(foreign):
    hint = "must be an object with a string `text` (--text-key names another key); token: it is one"
    text = redact_message(
        f"{hint}; {foreign}; {PLANNED} {VARIABLE}", [foreign], {"STORE_TOKEN": VARIABLE}
    )
    assert hint in text and not any(secret in text for secret in SECRETS)


def test_foreign_line_inside_another_one_does_not_keep_its_secret():
    """The longer line must be redacted first, whatever order PYTHONHASHSEED gives to a set."""
    foreign = [f"token={SHORT}", f"set token={SHORT}, secret={ENDING}"]
    program = (
        "from forerun._proxies.core.redaction import redact_message\n"
        f"print(redact_message({foreign[1]!r}, {foreign!r}, {{}}))"
    )
    for seed in range(6):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"set token={REPLACEMENT}\n", seed


def test_hint_of_the_command_line_is_not_redacted(tmp_path, secret_environment):
    (tmp_path / "a.jsonl").write_text('{"content": "a"}\n')
    code, stdout, stderr = run_in_process(
        "tokenize", tmp_path / "a.jsonl", "--out", tmp_path / "out"
    )
    assert code == 2 and "--text-key" in stderr and REPLACEMENT not in stdout + stderr


SECRET_PLAN_VALUES = {
    "proxy.command": f"python train.py --lr {{lr}} --api-key {PLANNED}",
    "data.external": ADDRESS,
    "data.path": f"corpus-{VARIABLE}",
    "cluster.address": f"ray://jane:{PASSWORD}@head:10001",
    "proxy.metrics_path": f"{{run_dir}}/{RAISED}.jsonl",
    "proxy.code_path": f"code/{ARGV}",
}


@pytest.mark.parametrize("key", SECRET_PLAN_VALUES)
def test_plan_with_a_secret_is_refused_without_showing_it(tmp_path, monkeypatch, key):
    monkeypatch.setenv("STORE_TOKEN", VARIABLE)
    (tmp_path / "plan.toml").write_text("")
    for overrides in (
        (f'{key}="{SECRET_PLAN_VALUES[key]}"',),
        (f'{key}="{SECRET_PLAN_VALUES[key]}"', "model.seq_len=-1"),
    ):
        with pytest.raises(PlanError) as caught:
            load_plan(tmp_path / "plan.toml", overrides)
        assert f"{key} holds what looks like" in str(caught.value)
        assert not any(secret in str(caught.value) for secret in SECRETS)


HARMLESS_TEXTS = (
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


@pytest.mark.parametrize("text", HARMLESS_TEXTS)
def test_harmless_text_is_not_taken_for_a_secret(text):
    assert find_secret(text, {"GPG_KEY": "short", "SECRET_FILE": "/run/secrets/words"}) == ""


REDACTED_ENVIRONMENT = {
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
"""Environment of the redaction. Its secrets are the first five; the others only look like some."""
REDACTED_TEXTS = {
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
"""Texts, and how each is shown after redaction."""


@pytest.mark.parametrize("text", [text for text, shown in REDACTED_TEXTS.items() if shown != text])
def test_text_that_is_redacted_in_logs_counts_as_a_secret(text):
    assert find_secret(text, REDACTED_ENVIRONMENT)


@pytest.mark.parametrize(
    "text", ["wandb key {}", "{} is my W&B login", "WANDB_API_KEY {}", "commit {0}, token {0}"]
)
def test_key_of_forty_hex_digits_counts_as_a_secret(text):
    assert find_secret(text.format(10 * "0a1b"), {})


@pytest.mark.parametrize("text", REDACTED_TEXTS)
def test_redaction_hides_secrets_and_nothing_else(text):
    assert redact(text, REDACTED_ENVIRONMENT) == REDACTED_TEXTS[text]


def test_private_key_of_several_lines_is_hidden(tmp_path):
    lines = [
        "x",
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        "b3BlbnNzaC1rZXktdjEAAAAA",
        "-----END OPENSSH PRIVATE KEY-----",
        "y",
    ]
    assert [*map(LineRedactor(), lines)] == ["x", REPLACEMENT, REPLACEMENT, REPLACEMENT, "y"]


FRAGMENTS = (
    *REDACTED_TEXTS,
    *HARMLESS_TEXTS,
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
"""Parts of the random lines of the next test."""


def test_block_of_lines_is_redacted_as_its_single_lines():
    """The quick search for clues misses no secret that the patterns find, in any context."""
    generator = random.Random(1)
    for _ in range(300):
        lines = ["".join(generator.choices(FRAGMENTS, k=generator.randint(1, 5))) for _ in range(8)]
        lines = [line.replace("\n", " ") for line in lines if "PRIVATE KEY" not in line]
        expected = [redact(line, REDACTED_ENVIRONMENT) for line in lines]
        assert LineRedactor(REDACTED_ENVIRONMENT)("\n".join(lines)).split("\n") == expected


@pytest.mark.parametrize("word", sorted({*redaction._SECRET_WORDS, *redaction._SECRET_ENDS}))
def test_line_redactor_has_a_clue_for_every_name_of_a_secret(word):
    for line in (f"MY_{word}={SHORT}", f"--my-{word.lower()} {SHORT} -x"):
        shown = line.replace(SHORT, REPLACEMENT)
        assert redact(line, {}) == LineRedactor({})(line) == shown


@pytest.mark.parametrize("prefix", " ".join(redaction._KEY_FORMS).split())
def test_line_redactor_has_a_clue_for_every_prefix_of_a_key(prefix):
    key = prefix + ("b-" if prefix == "xox" else "") + 2 * "0123456789abcdef"
    line = f"it is {key + '.abcdefgh.' if prefix == 'eyJ' else key}"
    assert redact(line, {}) == LineRedactor({})(line) == f"it is {REPLACEMENT}"


def test_slow_patterns_search_only_lines_with_a_clue(monkeypatch):
    searched = []
    monkeypatch.setattr(redaction, "_hide_named", lambda text: searched.append(text) or text)
    ordinary = (
        "2026-11-28 INFO step 12/90 val_loss 3.35 lr 6e-04 tokens/s 123,456 num_tokens: "
        "4096 path of the tokenizer"
    )
    text = "\n".join([ordinary] * 100)
    assert LineRedactor({})(text) == text and searched == []
    LineRedactor({})(f"{text}\nmy password: x\n{text}")
    assert searched == ["my password: x"]


def test_text_beyond_the_limit_loses_every_line_with_a_clue(monkeypatch):
    monkeypatch.setattr(redaction, "MAX_CLEANED_CHARS", 100)
    text = LineRedactor({})(
        "\n".join(["fine", *(f"line {i} password=hunter{i}" for i in range(9)), "fine"])
    )
    lines = text.split("\n")
    assert lines[:2] == ["fine", f"line 0 password={REPLACEMENT}"] and lines[-2:] == [
        REPLACEMENT,
        "fine",
    ]


def test_private_key_after_a_line_too_long_to_redact_is_hidden(monkeypatch):
    monkeypatch.setattr(redaction, "MAX_CLEANED_CHARS", 100)
    key = [
        "x=" + 101 * "token=a ",
        "-----BEGIN PRIVATE KEY-----",
        "MIIBVQ",
        "-----END PRIVATE KEY-----",
    ]
    assert LineRedactor({})("\n".join([*key, "fine"])).split("\n") == [*4 * [REPLACEMENT], "fine"]


BACKTRACKING_UNITS = (
    "-",
    "a",
    'a="',
    "token",
    "://a:",
    "sk-",
    "eyJaaaaaaaa.",
    "eyJ-aaaaaaaa",
    "-----BEGIN PRIVATE KEY",
)
"""Texts whose repetition once made a pattern backtrack for minutes."""
REPEATED_UNITS = (
    *BACKTRACKING_UNITS,
    "://",
    "key ",
    "--key ",
    "password ",
    "basic x",
    "a@",
    "KEY='",
    "A_",
)
"""Texts whose repetition must take linear time."""


@pytest.mark.slow
@pytest.mark.parametrize("unit", REPEATED_UNITS)
def test_twice_the_line_takes_about_twice_the_time(unit):
    seconds = []
    for num_chars in (2**17, 2**18):
        begin = time.process_time()
        redact(unit * (num_chars // len(unit)))
        seconds.append(time.process_time() - begin)
    assert seconds[1] < 3 * seconds[0] + 0.2, "a pattern is quadratic"


@pytest.mark.parametrize("unit", BACKTRACKING_UNITS)
def test_long_line_is_redacted_fast(unit):
    begin = time.process_time()
    redact(unit * (65536 // len(unit)))
    assert time.process_time() - begin < 10
