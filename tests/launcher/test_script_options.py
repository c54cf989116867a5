"""`forerun init --from train.py`: options of four kinds of scripts become a plan that loads; nothing of them is run."""

import json

import pytest
from tiny_study import ask

from launcher.plan.file import load_plan

ARGPARSE = """
import argparse, json
parser = argparse.ArgumentParser()
parser.add_argument("--max-lr", type=float, default=6e-4)
parser.add_argument("--muon-lr", type=float, default=0.02)
parser.add_argument("--d-model", type=int); parser.add_argument("--max-iters", type=int)
parser.add_argument("--seed", type=int); parser.add_argument("--n-layer", type=int, default=3)
parser.add_argument("--out-dir"); parser.add_argument("--compile", action="store_true")
raise SystemExit("it was run")
print(json.dumps({"step": 1, "loss": 2.0})); print(json.dumps({"val/loss": 2.0}))
"""
DATACLASS = """
from dataclasses import dataclass
import wandb, tyro
@dataclass
class Args:
    learning_rate: float = 1e-3
    hidden_size: int = 256
    max_steps: int = 1000
    seed: int = 0
    warmup_steps: int = 10
wandb.init(); wandb.log({"train/loss": 1.0, "eval/loss": 1.0})
"""
HYDRA = """
import hydra
@hydra.main(config_path="conf")
def main(cfg):
    train(cfg.optim.lr, cfg.model.width, cfg.trainer.max_steps, cfg.seed)
"""
GLOBALS = """
learning_rate = 6e-4
n_embd = 768
max_iters = 600
seed = 1337
block_size = 128
exec(open("configurator.py").read())
"""


def planned(tmp_path, text):
    (tmp_path / "train.py").write_text(text)
    code, body = ask("init", "--from", tmp_path / "train.py", "--out", tmp_path / "plan.toml")
    assert code == 0, body
    return load_plan(tmp_path / "plan.toml")


def test_argparse(tmp_path):
    plan = planned(tmp_path, ARGPARSE)
    assert plan.proxy.command.split()[2:] == [
        "--max-lr", "{lr}", "--d-model", "{width}", "--max-iters", "{num_steps}", "--seed", "{seed}", "--n-layer",
        "{num_layers}", "--out-dir", "{run_dir}", "--muon-lr", "{muon_lr}",
    ]  # fmt: skip
    assert list(plan.search.own) == ["muon_lr"] and plan.model.num_layers == 3
    assert (plan.proxy.metrics_train_loss_key, plan.proxy.metrics_validation_loss_key) == ("loss", "val/loss")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (DATACLASS, ["--learning_rate {lr}", "--hidden_size {width}", "--warmup_steps {warmup_steps}"]),
        (HYDRA, ["optim.lr={lr}", "model.width={width}", "trainer.max_steps={num_steps}", "seed={seed}"]),
        (GLOBALS, ["--learning_rate={lr}", "--n_embd={width}", "--block_size={seq_len}"]),
    ],
    ids=["dataclass", "hydra", "globals"],
)
def test_other_kinds_of_options(text, words, tmp_path):
    plan = planned(tmp_path, text)
    assert all(word in plan.proxy.command for word in words)
    assert plan.proxy.metrics_format == ("wandb" if "wandb" in text else "jsonl")


def test_all_that_is_missing_is_named_at_once(tmp_path):
    (tmp_path / "train.py").write_text(ARGPARSE.replace('"--seed"', '"--entropy"').replace('"--d-model"', '"--size"'))
    code, body = ask("init", "--from", tmp_path / "train.py", "--out", tmp_path / "plan.toml")
    assert code == 2 and "{width}" in json.dumps(body["problems"]) and "{seed}" in json.dumps(body["problems"])
    assert not (tmp_path / "plan.toml").exists()
    assert ask("init", "--from", tmp_path / "none.py", "--out", tmp_path / "plan.toml")[0] == 2
