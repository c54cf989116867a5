"""Tiny shapes, runs and a structured corpus, small enough that a training run takes a fraction of a
second.
"""

import dataclasses
import random
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn

from proxies.core.hyperparameters import Hparams
from proxies.core.numbers import ParameterNumbers
from proxies.core.rules import named
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.core.spec import Numerics, RunSpec
from proxies.data.corpus import tokenize

TINY = Shape(
    num_layers=1, width=16, num_heads=2, num_kv_heads=1, ffn_width=32, vocab_size=256, seq_len=16
)
BASE = Shape(
    num_layers=2, width=16, num_heads=2, num_kv_heads=1, ffn_width=48, vocab_size=23, seq_len=12
)

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


def documents(num_documents=120, num_words=430):
    """Texts in which each word has two likely followers: there is something to learn."""
    rng = random.Random(1)
    for _ in range(num_documents):
        word, text = rng.randrange(len(WORDS)), []
        for _ in range(num_words):
            text.append(WORDS[word] + (".\n" if rng.random() < 0.1 else ""))
            word = (
                (word * 7 + rng.choice((1, 5))) % len(WORDS)
                if rng.random() < 0.9
                else rng.randrange(len(WORDS))
            )
        yield " ".join(text)


def write_corpus(folder, *, validation_fraction=0.1, **options):
    """A tokenized corpus in `folder / "tokens"`; returns that folder."""
    source = folder / "texts"
    source.mkdir(parents=True)
    for number, text in enumerate(documents(**options)):
        (source / f"{number:03d}.txt").write_text(text)
    tokenize([source], folder / "tokens", validation_fraction=validation_fraction)
    return folder / "tokens"


def run_spec(data_id, *, shape=TINY, base_shape=None, num_steps=12, seed=0, num_slots=4, **changes):
    """A run of `shape` and four sequences a step; `changes` go to the record that has a field of
    that name.
    """

    def taken(record):
        return {
            name: changes.pop(name) for name in list(changes) if name in record.__dataclass_fields__
        }

    hparams = Hparams(**{"learning_rate": 0.01, **taken(Hparams)})
    numerics = Numerics(num_slots=num_slots, **taken(Numerics))
    name = changes.pop("parametrization", "mup")
    return RunSpec(
        **{
            "shape": shape,
            "base_shape": base_shape or shape,
            "parametrization": named(name) if isinstance(name, str) else name,
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


def with_settings(numbers, **settings):
    """The numbers of a parameter or group with some settings replaced."""
    return dataclasses.replace(numbers, settings={**numbers.settings, **settings})


class Theirs(nn.Module):
    """A model of one's own: it counts in a buffer, and has a parameter that nobody uses."""

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
class Built:
    module: nn.Module
    numbers: tuple

    def __call__(self, ids):
        return self.module(ids)


def theirs(spec):
    """As a factory hands it over, drawn from the run's seed."""
    with torch.random.fork_rng():
        torch.manual_seed(spec.seed)
        module = Theirs()
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
    return Built(module, tuple(numbers))


def write_learned_corpus(folder, vocab_size=4096):
    """Write Python sources under a byte-level BPE vocabulary trained on them; return the corpus
    folder.
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
        vocab_size=vocab_size,
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
