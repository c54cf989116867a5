"""Random corpora, settings and planted mistakes of the checks in `coordinate_checks.py`.

`coordinate_checks.py` imports this module; it is not a program. A draw is a pure function of a seed
and an index. Corpora are text that is installed with Python and the system, or made-up words. For
each corpus, byte-level BPE vocabularies of several sizes are trained on its text.
"""

from __future__ import annotations

import dataclasses
import gzip
import math
import random
import re
import string
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from forerun._proxies.coordinates.activations import measure_run
from forerun._proxies.coordinates.coordinate_check import CoordinateCheck, check_coordinates
from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.rules import Parametrization, get_parametrization
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Family, Shape
from forerun._proxies.core.spec import Numerics, RunSpec
from forerun._proxies.data.corpus import tokenize
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.external.factory import build_model, load_factory
from forerun._proxies.training import single_trial
from forerun._proxies.training.trainable_model import BuiltModel, DecoderModel

ROOT = Path(__file__).resolve().parents[2]
USER_MODELS = ("plain:Transformer", "models:llama")
"""Factories of users' models, in `USER_FOLDER`."""
USER_FOLDER = ROOT / "examples" / "own_model"

# ---- Corpora ----

BYTES = 256
VOCABULARIES = (BYTES, 512, 4096, 16384, 50257)
CORPORA = ("python", "prose", "mixed", "zipf", "markov")
DOCUMENT_CHARACTERS = 20_000
NUM_WORDS = 60_000
"""Number of different words in a corpus of made-up words."""
CORPUS_CHARACTERS = 8_000_000
"""Size of a corpus, enough to train a vocabulary of 50,257 entries."""


def write_texts(kind: str, folder: Path) -> None:
    """Write the documents of one kind of corpus, unless they exist."""
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    num_characters = 0
    for index, text in enumerate(_make_texts(kind)):
        (folder / f"{index:05d}.txt").write_text(text, encoding="utf-8")
        num_characters += len(text)
        if num_characters >= CORPUS_CHARACTERS:
            break
    (folder / "done").touch()


def _make_texts(kind: str) -> Iterator[str]:
    """Yield documents of one kind of corpus."""
    if kind == "python":
        yield from _read_python_sources()
    elif kind == "prose":
        yield from _read_manual_pages()
    elif kind == "mixed":
        for texts in zip(
            _read_python_sources(),
            _read_manual_pages(),
            _make_synthetic_texts("markov"),
            strict=False,
        ):
            yield from texts
    else:
        yield from _make_synthetic_texts(kind)


def _read_python_sources() -> Iterator[str]:
    """Yield the source files of Python's standard library in random order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    random.Random("python").shuffle(paths)
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="ignore")[:DOCUMENT_CHARACTERS]
        if len(text) > 1000:
            yield text


def _read_manual_pages() -> Iterator[str]:
    """Yield the text of manual pages, forerun's own pages, and licenses, without markup."""
    pages = [path for path in Path("/usr/share/man").glob("man*/*.gz") if path.is_file()]
    pages += [*(ROOT / "docs").rglob("*.md"), *Path("/usr/share/common-licenses").glob("*")]
    pages += list(Path("/usr/share/doc").glob("*/copyright"))
    pages = sorted({path.resolve() for path in pages if path.is_file()})
    random.Random("prose").shuffle(pages)
    for path in pages:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8", errors="ignore")
        text = re.sub(r"^['.].*\n|\\f.|\\-|\\&", "", text, flags=re.MULTILINE)[:DOCUMENT_CHARACTERS]
        if len(text) > 1000:
            yield text


def _make_synthetic_texts(kind: str) -> Iterator[str]:
    """Yield documents of made-up words.

    The words are drawn independently by Zipf's law, or by a sparse Markov chain.
    """
    rng = random.Random(kind)
    words = [
        "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(NUM_WORDS)
    ]
    cumulative = [0.0]
    for rank in range(1, NUM_WORDS + 1):
        cumulative.append(cumulative[-1] + 1.0 / rank)
    while True:
        # A word and its space have 6.5 characters on average
        drawn = rng.choices(
            range(NUM_WORDS), cum_weights=cumulative[1:], k=DOCUMENT_CHARACTERS // 7
        )
        if kind == "markov":
            # Four of five words are one of three successors of the previous word. The numbers only
            # make the successors of different words differ.
            for index in range(1, len(drawn)):
                if rng.random() < 0.8:
                    drawn[index] = (drawn[index - 1] * 31 + rng.choice((7, 101, 4099))) % NUM_WORDS
        yield " ".join(words[index] for index in drawn)


def open_corpus(kind: str, vocab_size: int, folder: Path) -> TokenStore:
    """Open the corpus of one kind and vocabulary in `folder`; create it if it does not exist."""
    texts, tokens = folder / kind / "texts", folder / kind / f"tokens-{vocab_size}"
    write_texts(kind, texts)
    if not (tokens / "manifest.json").exists():
        tokenizer = "bytes" if vocab_size == BYTES else str(_train_vocabulary(texts, vocab_size))
        tokenize([texts], tokens, tokenizer=tokenizer, validation_fraction=0.02)
    return TokenStore(tokens)


def _train_vocabulary(texts: Path, vocab_size: int) -> Path:
    """Train a byte-level BPE on a corpus and return its file."""
    path = texts.parent / f"tokenizer-{vocab_size}.json"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(file) for file in sorted(texts.glob("*.txt"))], trainer)
    tokenizer.save(str(path))
    return path


# ---- Settings of a check ----

Mistake = Literal[
    "none",
    "every model its own base",
    "the widest model on its own base",
    "attention over 1/sqrt(head_dim)",
    "readout unscaled",
    "hidden rate unscaled",
    "hidden rate shrinks too fast by a root",
    "hidden rate shrinks too fast by a width",
    "embedding rate changes with width",
    "hidden initial std does not shrink",
    "no depth rule",
]
HIDDEN_RATE_POWERS = {
    "hidden rate unscaled": 1.0,
    "hidden rate shrinks too fast by a root": -0.5,
    "hidden rate shrinks too fast by a width": -1.0,
}
"""Power of the width ratio by which the hidden matrices' learning rates are multiplied."""
DEPTH_RULES = (
    get_parametrization("completep"),
    get_parametrization("completep", depth_alpha=0.5),
    get_parametrization("completedp"),
    get_parametrization("umup"),
)
WIDTH_RULES = (
    # Twice, so that muP is drawn twice as often
    get_parametrization("mup"),
    get_parametrization("mup"),
    get_parametrization("mup_no_wd_scaling"),
    *DEPTH_RULES,
)


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Settings of one check: its corpus, models, optimizer, and planted mistake."""

    mistake: Mistake
    corpus: str
    vocab_size: int
    axis: Literal["width", "depth"]
    points: tuple[int, ...]
    model: str
    """`llama`, `gpt2`, or the factory of a user's model."""
    tied: bool
    qk_norm: bool
    head_dim_grows: bool
    num_layers: int
    muon: bool
    rules: Parametrization
    log2_rate: int
    batch_tokens: int
    seq_len: int
    num_steps: int
    num_seeds: int
    first_seed: int

    @property
    def is_user_model(self) -> bool:
        """Whether a factory builds the models."""
        return self.model in USER_MODELS


def draw(seed: str, index: int, mistake: Mistake = "none") -> Draw:
    """Draw the settings of one check in which the mistake has an effect.

    The order of the calls of `rng` decides the settings of each seed: with another order, the
    recorded checks are no longer those of their seeds.
    """
    rng = random.Random(f"{seed}/{mistake}/{index}")
    # Weights are percentages of the draws.
    vocab_size = rng.choices(VOCABULARIES, weights=(24, 24, 28, 15, 9))[0]
    by_depth = mistake == "no depth rule" or (mistake == "none" and rng.random() < 0.2)
    grows = mistake.startswith("attention") or (not by_depth and rng.random() < 0.15)
    model = rng.choices(("llama", "gpt2", *USER_MODELS), weights=(40, 25, 20, 15))[0]
    # The plain transformer has its own attention scale and no depth rule
    if model == "plain:Transformer" and (by_depth or grows):
        model = "llama"
    rules = rng.choice(DEPTH_RULES if by_depth else WIDTH_RULES)
    if model == "plain:Transformer":
        rules = rng.choice([rule for rule in WIDTH_RULES if rule.depth_alpha is None])
    rules = dataclasses.replace(
        rules, moments="fixed", rate_batch_power=0.0, rate_duration_power=0.0
    )
    muon = rng.random() < 0.25
    if muon:
        rules = dataclasses.replace(rules, muon_rate=rng.choice(("original", "unit_rms")))
    points = (2, 4, 8) if by_depth else (32, 64, 128)
    num_layers = rng.choice((1, 1, 2, 2, 3))
    # With large vocabularies, few tokens keep a check within seconds
    batch_tokens = 256 if vocab_size > 4096 else rng.choice((256, 512))
    num_seeds = 3 if vocab_size > 16384 else rng.choice((3, 4))
    if not by_depth and vocab_size < 4096 and num_layers == 1:
        points = (32, 64, 128, 256)
    return Draw(
        mistake=mistake,
        corpus=rng.choice(CORPORA),
        vocab_size=vocab_size,
        axis="depth" if by_depth else "width",
        points=points,
        model=model,
        # A shared matrix cannot absorb the readout's multiplier
        tied=model != "plain:Transformer" and rules.output == "multiplier" and rng.random() < 0.3,
        qk_norm=model == "llama" and rng.random() < 0.2,
        head_dim_grows=grows,
        num_layers=num_layers,
        muon=muon,
        rules=rules,
        log2_rate=rng.choice((-8, -7, -7, -6)),
        batch_tokens=batch_tokens,
        seq_len=rng.choice((32, 64)),
        num_steps=4 if vocab_size > 4096 else rng.choice((4, 10)),
        num_seeds=num_seeds,
        first_seed=rng.randrange(10**6),
    )


def _make_base_shape(setting: Draw, vocab_size: int) -> Shape:
    """Return the base model of a check."""
    family: Family = "gpt2" if setting.model == "gpt2" else "llama"
    return Shape(
        num_layers=setting.num_layers,
        width=32,
        num_heads=2,
        num_kv_heads=2 if setting.num_layers % 2 else 1,
        ffn_width=128 if family == "gpt2" else 96,
        vocab_size=vocab_size,
        seq_len=setting.seq_len,
        family=family,
        tied=setting.tied,
        qk_norm=setting.qk_norm,
    )


def make_specs(setting: Draw, store: TokenStore) -> list[list[RunSpec]]:
    """Return the runs of a check, one list for each width or depth."""
    base = _make_base_shape(setting, store.manifest.vocab_size)
    if setting.axis == "depth":
        base = base.at_depth(setting.points[0])
    rules = setting.rules
    if setting.mistake.startswith("attention"):
        rules = dataclasses.replace(rules, attention="inverse_sqrt_head_dim")
    if setting.mistake == "no depth rule":
        rules = dataclasses.replace(rules, depth_alpha=None, eps="unscaled")
    needs_tokens = rules.needs_tokens
    rows = []
    for point in setting.points:
        if setting.axis == "depth":
            shape = base.at_depth(point)
        elif setting.head_dim_grows:
            shape = dataclasses.replace(
                base, width=point, ffn_width=base.ffn_width * point // base.width
            )
        else:
            shape = base.at_width(point)
        is_own_base = setting.mistake == "every model its own base" or (
            setting.mistake == "the widest model on its own base" and point == setting.points[-1]
        )
        spec = RunSpec(
            shape=shape,
            base_shape=shape if is_own_base else base,
            parametrization=rules,
            hparams=Hparams(
                learning_rate=2.0**setting.log2_rate, **_make_muon_hparams(setting)
            ).unclipped,
            schedule=Schedule(kind="constant", num_steps=setting.num_steps + 1),
            batch_tokens=setting.batch_tokens,
            data_id=store.manifest.data_id,
            seed=0,
            numerics=Numerics(num_slots=1),
            base_batch_tokens=setting.batch_tokens if needs_tokens else None,
            base_num_tokens=setting.batch_tokens * setting.num_steps if needs_tokens else None,
            optimizer="muon" if setting.muon else "adamw",
            factory=_load_factory(setting.model) if setting.is_user_model else None,
        )
        seeds = range(setting.first_seed, setting.first_seed + setting.num_seeds)
        rows.append([dataclasses.replace(spec, seed=seed) for seed in seeds])
    return rows


def _make_muon_hparams(setting: Draw) -> dict[str, Any]:
    """Return the hyperparameters that only Muon has."""
    return {"adamw_learning_rate": 2.0**setting.log2_rate, "momentum": 0.95} if setting.muon else {}


@cache
def _load_factory(model: str) -> Any:
    """Return the factory of a user's model."""
    return load_factory(model, USER_FOLDER)[1]


# ---- Mistakes ----


def plant_mistake(
    setting: Draw, build: Callable[[RunSpec], BuiltModel]
) -> Callable[[RunSpec], BuiltModel]:
    """Return a function that builds the same models with the mistake of the setting."""

    def build_with_mistake(spec: RunSpec) -> BuiltModel:
        model, ratio = build(spec), spec.ratios.width
        if setting.mistake in HIDDEN_RATE_POWERS:
            model = _scale_rates(model, "hidden", ratio ** HIDDEN_RATE_POWERS[setting.mistake])
        elif setting.mistake.startswith("embedding rate"):
            power = random.Random(setting.first_seed).choice((-0.5, 0.5, 1.0))
            if setting.rules.embedding_rate == "inverse_root":
                power = abs(power)
            model = _scale_rates(model, "embedding", ratio**power)
        elif setting.mistake.startswith("hidden initial std"):
            parameters = dict(model.module.named_parameters())
            with torch.no_grad():
                for numbers in model.numbers:
                    if numbers.kind == "hidden":
                        parameters[numbers.name].mul_(math.sqrt(ratio))
        elif setting.mistake == "readout unscaled":
            model = _unscale_readout(model, setting, ratio)
        return model

    return build_with_mistake


def _scale_rates(model: BuiltModel, kind: str, factor: float) -> BuiltModel:
    """Return the model with the learning rates of one kind of parameter multiplied by a factor."""
    numbers = tuple(
        dataclasses.replace(parameter, learning_rate=parameter.learning_rate * factor)
        if parameter.kind == kind
        else parameter
        for parameter in model.numbers
    )
    return dataclasses.replace(model, numbers=numbers)  # type: ignore[type-var]


def _unscale_readout(model: BuiltModel, setting: Draw, ratio: float) -> BuiltModel:
    """Return the model with the readout's scale by width undone."""
    if setting.rules.output == "absorbed":  # the rate shrinks with width, instead of a multiplier
        return _scale_rates(model, "readout", ratio)
    if isinstance(model, DecoderModel):
        multipliers = dataclasses.replace(
            model.multipliers, output=model.multipliers.output * ratio
        )
        return dataclasses.replace(model, multipliers=multipliers)
    readout = model.module.get_submodule(
        "lm_head" if setting.model == "models:llama" else "readout"
    )
    readout.register_forward_pre_hook(lambda module, inputs: (inputs[0] * ratio, *inputs[1:]))
    return model


def run_check(setting: Draw, store: TokenStore) -> CoordinateCheck:
    """Run one check in this process."""
    build_decoder = single_trial.build_decoder
    build_user_model = plant_mistake(setting, lambda spec: build_model(spec, USER_FOLDER))
    single_trial.build_decoder = plant_mistake(setting, build_decoder)  # type: ignore[assignment]
    try:
        return check_coordinates(
            make_specs(setting, store),
            lambda probes: [measure_run(probe, store, build_user_model) for probe in probes],
            axis=setting.axis,
        )
    finally:
        single_trial.build_decoder = build_decoder
