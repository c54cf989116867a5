"""Tiny shapes, run specs, corpora and a user's model for tests of the proxies.

A training run of these takes a fraction of a second.
"""

import dataclasses
import random
import sysconfig
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn

from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.numbers import ParameterNumbers
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Numerics, RunSpec
from forerun._proxies.data.corpus import tokenize
from forerun._proxies.model.optimizer import IMPLEMENTATIONS

TINY = Shape(
    num_layers=1, width=16, num_heads=2, num_kv_heads=1, ffn_width=32, vocab_size=256, seq_len=16
)
"""Shape of the smallest runs. Its vocabulary is that of `write_corpus`, the 256 bytes."""
BASE = Shape(
    num_layers=2, width=16, num_heads=2, num_kv_heads=1, ffn_width=48, vocab_size=23, seq_len=12
)
"""Shape of models that train on random ids, without a corpus."""

WORDS = (
    "run",
    "loss",
    "width",
    "batch",
    "token",
    "model",
    "layer",
    "scale",
    "proxy",
    "sweep",
    "the",
    "a",
    "of",
    "is",
    "and",
    "grows",
    "falls",
    "with",
)


def generate_documents(num_documents=120, num_words=430):
    """Yield texts of `num_words` words, each with two likely followers, so that a model can learn.

    Many tests depend on these texts: a change of a seed or a word changes their losses.
    """
    rng = random.Random(1)
    for _ in range(num_documents):
        word, text = rng.randrange(len(WORDS)), []
        for _ in range(num_words):
            text.append(WORDS[word] + (".\n" if rng.random() < 0.1 else ""))
            if rng.random() < 0.9:
                word = (word * 7 + rng.choice((1, 5))) % len(WORDS)
            else:
                word = rng.randrange(len(WORDS))
        yield " ".join(text)


def write_corpus(folder, *, validation_fraction=0.1, **options):
    """Write a tokenized corpus into `folder / "tokens"` and return that folder."""
    source = folder / "texts"
    source.mkdir(parents=True)
    for number, text in enumerate(generate_documents(**options)):
        (source / f"{number:03d}.txt").write_text(text)
    tokenize([source], folder / "tokens", validation_fraction=validation_fraction)
    return folder / "tokens"


def make_run_spec(
    data_id, *, shape=TINY, base_shape=None, num_steps=12, seed=0, num_slots=4, **changes
):
    """Return a run spec with four sequences per step.

    Args:
        base_shape: Shape of the base run; `shape` if None.
        changes: Fields of `Hparams`, `Numerics` or `RunSpec` by name. The parametrization may be a
            name too.
    """

    def pop_fields(record):
        names = [name for name in changes if name in record.__dataclass_fields__]
        return {name: changes.pop(name) for name in names}

    hparams = Hparams(**{"learning_rate": 0.01, **pop_fields(Hparams)})
    numerics = Numerics(num_slots=num_slots, **pop_fields(Numerics))
    rules = changes.pop("parametrization", "mup")
    return RunSpec(
        **{
            "shape": shape,
            "base_shape": base_shape or shape,
            "parametrization": get_parametrization(rules) if isinstance(rules, str) else rules,
            "hparams": hparams,
            "schedule": Schedule(kind="cosine", num_steps=num_steps, warmup_steps=2),
            "batch_tokens": 4 * shape.seq_len,
            "data_id": data_id,
            "seed": seed,
            "numerics": numerics,
            "optimizer": "adamw",
            **changes,
        }
    )


MAX_CALLS = 1000
"""Calls of an engine after which `finish_runs` gives up. Every run of the tests needs fewer."""


def finish_runs(engine, *, until=None, num_steps=10**6):
    """Train until all runs of an engine have ended, and return (result, curve) by run id.

    The outcomes are in the order in which the runs end, and without the time that they took.

    Args:
        until: Spec of the run at whose end training stops; None to train until all runs have ended.
        num_steps: Maximum number of steps in each call of the engine.
    """
    outcomes = {}
    for _ in range(MAX_CALLS):
        for _, result, curve in engine.advance(num_steps):
            outcomes[result.id] = (dataclasses.replace(result, seconds=0.0), curve)
        if not engine.steps or (until is not None and until.id in outcomes):
            return outcomes
    raise AssertionError(f"runs have not ended after {MAX_CALLS} calls of the engine")


def set_row_updates(monkeypatch, optimizer, *, by_row):
    """Let banks update one trial after the other, or all at once as on a GPU."""
    implementation = IMPLEMENTATIONS[optimizer]
    changed = dataclasses.replace(implementation, bank=partial(implementation.bank, by_row=by_row))
    monkeypatch.setitem(IMPLEMENTATIONS, optimizer, changed)


def replace_settings(numbers, **settings):
    """Return the numbers of a parameter or group with some settings replaced."""
    return dataclasses.replace(numbers, settings={**numbers.settings, **settings})


class UserModule(nn.Module):
    """A user's model with a buffer that changes at each call and a parameter without gradient."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 16)
        self.head = nn.Linear(16, 256, bias=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, ids):
        if self.training:
            self.calls += 1
        return self.head(self.table(ids) * (1 + 0.01 * self.calls)).flatten(0, 1)


@dataclasses.dataclass(frozen=True)
class BuiltModel:
    """A module with the numbers of its parameters, as a factory's model is passed to an engine."""

    module: nn.Module
    numbers: tuple

    def __call__(self, ids):
        return self.module(ids)


def build_user_module(spec):
    """Build a `UserModule` from the run's seed, with the numbers of its parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(spec.seed)
        module = UserModule()
    numbers = [
        ParameterNumbers(
            name=name,
            size=tuple(p.shape),
            kind="hidden",
            width_multiplier=1.0,
            init_std=0.0,
            optimizer="adamw",
            settings={
                "learning_rate": 0.01,
                "weight_decay": 0.0,
                "eps": 1e-8,
                "beta1": 0.9,
                "beta2": 0.95,
            },
        )
        for name, p in module.named_parameters()
    ]
    return BuiltModel(module, tuple(numbers))


def write_learned_corpus(folder):
    """Tokenize Python sources with a byte-level BPE trained on them; return the corpus folder.

    The sources are those of Python's standard library, so the corpus differs between versions.
    """
    source = folder / "texts"
    source.mkdir(parents=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py"))[:60]
    for file in files:
        (source / f"{file.stem}.txt").write_bytes(file.read_bytes())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted(source.iterdir())], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenize(
        [source],
        folder / "tokens",
        tokenizer=str(folder / "tokenizer.json"),
        validation_fraction=0.1,
    )
    return folder / "tokens"
