"""The verb that says where numbers come from, of a frozen config or of a parametrization: explain."""

from __future__ import annotations

import dataclasses
import difflib
import re
import shutil
import sys
from pathlib import Path
from typing import get_args

import click
from click.core import ParameterSource

from launcher.answers import explained
from launcher.cli.options import answer, json_option
from launcher.plan import sources
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.checks import SpecError
from proxies.core.hyperparameters import Hparams
from proxies.core.rules import named
from proxies.core.shape import Family, Shape

PLAIN_WIDTH = 120
"""Characters of a line of prose where there is no terminal."""


def explained_fields(frozen: Path, field: str | None) -> tuple[dict[str, Json], str]:
    """Every field, or those of a name.

    Raises:
        FrozenError: there is no launch config.
        TamperedError: it, or its evidence, was edited.
        LedgerCorrupt: the study around it is not sound.
        UnknownFieldError: no field has that name.
    """
    from launcher.cli.options import folder_of
    from launcher.explaining.explainers import explain
    from launcher.explaining.known import known_of
    from launcher.explaining.leaves import find, leaves
    from launcher.explaining.text import fields_text, table_text

    known = known_of(frozen, folder_of(frozen))
    every = leaves(known.decision)
    found = [explain(known, leaf) for leaf in (every if field is None else find(every, field))]
    body: dict[str, Json] = {
        "digest": known.decision.digest,
        "fields": canon.to_json(found),
        "notes": [*known.notes],
        "rehearsed": known.rehearsed,
    }
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PLAIN_WIDTH
    if field is not None:
        return body, fields_text(found, known.notes, width)
    told = f"\none field whole: forerun explain {frozen} clip_norm"
    notes = [f"note: {note}" for note in known.notes]
    return body, "\n".join([table_text(found), *notes, told])


_KEYS = {
    "layers": "num_layers", "width": "width", "heads": "num_heads", "kv_heads": "num_kv_heads", "ffn": "ffn_width",
    "vocab": "vocab_size", "seq_len": "seq_len",
}  # fmt: skip
_GROWING = ("layers", "width", "heads", "kv_heads", "ffn")
_LIST = "*"


@click.command()
@click.argument("frozen", metavar="[FROZEN", required=False, type=click.Path(path_type=Path))
@click.argument("field", metavar="[FIELD]]", required=False)
@click.option("--parametrization", "name", is_flag=False, flag_value=_LIST, default=_LIST, metavar="NAME",
              help="Without a NAME: all of them, a sentence each.")  # fmt: skip
@click.option("--shape", "shape_text", metavar="KEY=N,...",
              help=f"{', '.join(_KEYS)} (kv_heads: as heads). Without it: the laws alone.")  # fmt: skip
@click.option("--base", "base_text", metavar="KEY=N,...",
              help="What differs where the numbers were tuned: width=256 keeps head dim and ratios.")  # fmt: skip
@click.option("--batch-ratio", type=float, default=1.0, show_default=True, help="Batch over the base run's.")
@click.option("--duration-ratio", type=float, default=1.0, show_default=True, help="Tokens over the base run's.")
@click.option("--lr", type=float, default=0.01, show_default=True, help="Learning rate at the base, at the peak.")
@click.option("--weight-decay", type=float, default=0.1, show_default=True, help="At the base.")
@click.option("--eps", type=float, default=1e-8, show_default=True, help="AdamW's, at the base.")
@click.option("--beta1", type=float, default=0.9, show_default=True, help="AdamW's, at the base.")
@click.option("--beta2", type=float, default=0.95, show_default=True, help="AdamW's, at the base.")
@click.option("--family", type=click.Choice(get_args(Family)), default="llama", show_default=True, help="Of models.")
@click.option("--tied", is_flag=True, help="Embedding and readout share one matrix.")
@click.option("--qk-norm", is_flag=True, help="RMSNorm over each head's queries and keys.")
@click.option("--absorbed", "moved", is_flag=True,
              help="For a trainer without multipliers: moved into the weights.")  # fmt: skip
@click.option("--set", "choices", multiple=True, metavar="CHOICE=VALUE",
              help="Another answer than the source's own, such as depth_alpha=0.5; repeatable.")  # fmt: skip
@json_option
@click.pass_context
def explain(
    ctx: click.Context, frozen: Path | None, field: str | None, name: str, shape_text: str | None,
    base_text: str | None, batch_ratio: float, duration_ratio: float, lr: float,
    weight_decay: float, eps: float, beta1: float, beta2: float, family: Family, tied: bool, qk_norm: bool,
    moved: bool, choices: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Where the numbers come from.

    FROZEN [FIELD]: every field of a frozen config (its folder, or launch.json), or those of a name: value, source,
    strength of the evidence, what would change it. A name is `clip_norm`, `groups.embedding.lr`, `schedule`,
    `groups.*.wd`; a prefix means all below it. Exit 5 if something was edited.

    Without FROZEN a parametrization: per group of parameters init std, learning rate, weight decay and eps at a shape,
    the forward multipliers, and for each choice whose it is and what others do.
    """
    if frozen is not None:
        _alone(ctx)
        return answer(as_json, *explained_fields(frozen, field))
    if name == _LIST and not (shape_text or base_text or choices):
        return answer(as_json, {"parametrizations": dict(sources.PRESETS)}, _list())
    if name not in sources.PRESETS:
        near = difflib.get_close_matches(name, sources.PRESETS, n=1)
        said = (
            f"--parametrization {name}: did you mean {near[0]}?"
            if near
            else "--parametrization: one of these is wanted"
        )
        raise click.BadParameter(f"{said}\n{_list()}")
    rules = named(name, **_choices(choices))
    if shape_text is None:
        if base_text is not None:
            raise click.BadParameter("--base: of which --shape?")
        return answer(as_json, *explained.laws(rules))
    shape = _shape(shape_text, family, tied=tied, qk_norm=qk_norm)
    base = shape if base_text is None else _base(base_text, shape)
    hparams = Hparams(learning_rate=lr, weight_decay=weight_decay, eps=eps, beta1=beta1, beta2=beta2)
    return answer(as_json, *explained.numbers(rules, shape, base, hparams, batch_ratio, duration_ratio, moved=moved))


def _alone(ctx: click.Context) -> None:
    """Refuse options of the other half."""
    given = [
        parameter.opts[0]
        for parameter in ctx.command.params
        if isinstance(parameter, click.Option)
        and parameter.name not in (None, "as_json")
        and ctx.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"{', '.join(given)}: of a parametrization, and not with FROZEN")


def _list() -> str:
    return "\n".join(f"  {name.ljust(18)}{sentence}" for name, sentence in sources.PRESETS.items())


def _choices(given: tuple[str, ...]) -> dict[str, object]:
    """`--set` as values: a number, none, or a word."""
    found: dict[str, object] = {}
    for text in given:
        choice, sign, word = text.partition("=")
        if not sign:
            raise click.BadParameter(f"--set {text}: CHOICE=VALUE is wanted")
        try:
            found[choice] = float(word)
        except ValueError:
            found[choice] = None if word.lower() == "none" else word
    return found


def _sizes(option: str, text: str, keys: tuple[str, ...]) -> dict[str, int]:
    """`width=256,layers=4` as fields of a shape; every problem at once."""
    found, problems = {}, []
    for part in filter(None, text.replace(" ", "").split(",")):
        key, _, number = part.partition("=")
        near = difflib.get_close_matches(key, keys, n=1)
        if key not in keys:
            problems.append(
                f"{part}: " + (f"did you mean {near[0]}?" if near else f"one of {', '.join(keys)} is wanted")
            )
        elif not re.fullmatch(r"[0-9]{1,12}", number):
            problems.append(f"{part}: a whole number is wanted")
        else:
            found[_KEYS[key]] = int(number)
    if problems:
        raise SpecError(option, problems)
    return found


def _shape(text: str, family: Family, *, tied: bool, qk_norm: bool) -> Shape:
    sizes = _sizes("--shape", text, tuple(_KEYS))
    if "num_heads" in sizes:
        sizes.setdefault("num_kv_heads", sizes["num_heads"])
    if missing := [key for key, field in _KEYS.items() if field not in sizes and key != "kv_heads"]:
        raise SpecError("--shape", [f"{key} is missing" for key in missing])
    return Shape(**sizes, family=family, tied=tied, qk_norm=qk_norm)


def _base(text: str, shape: Shape) -> Shape:
    """The shape with these sizes; what is left unsaid of another width keeps head dim and ratios."""
    sizes = _sizes("--base", text, _GROWING)
    if "num_heads" in sizes:
        sizes.setdefault("num_kv_heads", max(1, sizes["num_heads"] * shape.num_kv_heads // shape.num_heads))
    width, ffn_width = sizes.get("width", shape.width), shape.ffn_width
    if "ffn_width" not in sizes:
        sizes["ffn_width"], rest = divmod(ffn_width * width, shape.width)
        if rest:
            raise SpecError(
                "--base", [f"width = {width}: ffn {ffn_width}/{shape.width} of it is no whole number: say ffn"]
            )
    if "num_heads" not in sizes:
        sized = dataclasses.replace(shape, ffn_width=shape.width).at_width(width)
        sizes |= {"num_heads": sized.num_heads, "num_kv_heads": sizes.get("num_kv_heads", sized.num_kv_heads)}
    return dataclasses.replace(shape, **sizes)  # type: ignore[arg-type]
