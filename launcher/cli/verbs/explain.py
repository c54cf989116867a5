"""The verb that explains where numbers come from: in a frozen config, a plan, or a
parametrization.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast, get_args

import click

from forerun._launcher.cli.frozen_config import read_sound_config
from forerun._launcher.cli.names import AnyName, get_study_option, lookup_option
from forerun._launcher.cli.options import (
    full_option,
    get_typed_options,
    json_option,
    print_result,
    refuse_options,
)
from forerun._launcher.main_run.frozen.config_names import (
    StudyNameError,
    find_default_study,
    find_frozen_config,
    list_frozen_configs,
    shorten_config_name,
)
from forerun._launcher.report.explanations import parametrizations, plan_keys
from forerun._launcher.report.explanations.field_provenance import (
    find_fields,
    list_fields,
    read_provenance,
)
from forerun._launcher.report.explanations.text import (
    MAX_FIELDS_IN_FULL,
    format_field_table,
    format_fields,
    format_summary,
)
from forerun._launcher.study.plan import sources
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.hyperparameters import LEARNING_RATE, Hparams, get_hyperparameter
from forerun._proxies.core.optimizers import RECIPES
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.shape import Family, Shape


def explain_fields(
    frozen: Path, field: str | None, *, full: bool = False
) -> tuple[dict[str, Json], str]:
    """Explain all fields of a config, or those that a name or pattern matches, as data and as text.

    Args:
        frozen: Folder or launch file of the config.
        field: Name, prefix, or pattern of the fields; None for all fields.
        full: Whether the text lists every field if `field` is None.

    Raises:
        FrozenError: There is no launch config.
        TamperedError: The config or its provenance was edited.
        NoProvenanceError: The config has no provenance record.
        UnknownFieldError: No field matches.
    """
    decision, folder = read_sound_config(frozen)
    fields = list_fields(decision)
    records = read_provenance(folder, decision.digest, [field.path for field in fields])
    explained = [
        (match, records[match.path])
        for match in (fields if field is None else find_fields(fields, field))
    ]
    body: dict[str, Json] = {
        "digest": decision.digest,
        "fields": [
            {**cast(dict[str, Json], canon.to_json(record)), "value": match.value}
            for match, record in explained
        ],
    }
    command = f"forerun explain {shorten_config_name(frozen)}"
    if field is not None:
        text = format_fields(explained)
        example = f"\n\none field in full: {command} {explained[0][0].path}"
        return body, text + example if len(explained) > MAX_FIELDS_IN_FULL else text
    one_field = f"one field in full: {command} seed"
    if full:
        return body, f"{format_field_table(explained)}\n\n{one_field}"
    return body, f"{format_summary(explained)}\n\nall fields: {command} --full\n{one_field}"


_SHAPE_KEYS = {
    "layers": "num_layers",
    "width": "width",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "ffn": "ffn_width",
    "vocab": "vocab_size",
    "seq_len": "seq_len",
}
"""Fields of a shape by their names in `--shape`."""
_BASE_KEYS = ("layers", "width")
"""Names of the fields that `--base` may set."""
_LIST_ALL = "*"
"""Value of `--parametrization` that lists all parametrizations."""
_PLAN = "plan"
"""Word that is given instead of FROZEN to explain the keys of a plan."""
_EXAMPLE_RATE = 0.01
"""Learning rate at the base if `--lr` is not given: a round number, because learning rates have no
conventional value.
"""


def _add_hyperparameter_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each hyperparameter of an optimizer. The default is the conventional value
    if there is one.
    """
    names = dict.fromkeys(name for recipe in RECIPES.values() for name in recipe.hyperparameters)
    for name in reversed(names):  # the last option that is added is first in the help
        hyperparameter = get_hyperparameter(name)
        convention = hyperparameter.convention
        default = convention.value if convention else hyperparameter.default
        verb = click.option(
            f"--{hyperparameter.placeholder_name.replace('_', '-')}",
            name,
            type=float,
            default=_EXAMPLE_RATE if name == LEARNING_RATE else default,
            show_default=True,
            help=f"Value at the base: {hyperparameter.label}.",
        )(verb)
    return verb


@click.command()
# In the usage line, the two metavars read as one nested option: [FROZEN [FIELD]].
@click.argument("frozen", metavar="[FROZEN", required=False, type=AnyName())
@click.argument("field", metavar="[FIELD]]", required=False)
@lookup_option
@click.option(
    "--parametrization",
    "name",
    is_flag=False,
    flag_value=_LIST_ALL,
    default=_LIST_ALL,
    metavar="NAME",
    help="Parametrization to explain; without NAME: a list of all, one sentence each.",
)
@click.option(
    "--shape",
    "shape_text",
    metavar="KEY=N,...",
    help=f"{', '.join(_SHAPE_KEYS)} (kv_heads: as heads). Default: rules only, no numbers.",
)
@click.option(
    "--base",
    "base_text",
    metavar="KEY=N,...",
    help="Shape the numbers were tuned at: width=256,layers=4; head dim and ratios stay.",
)
@click.option(
    "--batch-ratio",
    type=float,
    default=1.0,
    show_default=True,
    help="Batch relative to the base run.",
)
@click.option(
    "--duration-ratio",
    type=float,
    default=1.0,
    show_default=True,
    help="Tokens relative to the base run.",
)
@_add_hyperparameter_options
@click.option(
    "--family",
    type=click.Choice(get_args(Family)),
    default="llama",
    show_default=True,
    help="Model family.",
)
@click.option("--tied", is_flag=True, help="Embedding and readout share one matrix.")
@click.option("--qk-norm", is_flag=True, help="RMSNorm over each head's queries and keys.")
@click.option(
    "--set",
    "choices",
    multiple=True,
    metavar="CHOICE=VALUE",
    help="Replace one choice of the source, such as depth_alpha=0.5; repeatable.",
)
@full_option
@json_option
@click.pass_context
def explain(
    ctx: click.Context,
    /,
    frozen: str | None,
    field: str | None,
    full: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Show where numbers come from: in a frozen config, in a plan, or in a parametrization.

    FROZEN [FIELD] lists the fields of a frozen config (its folder, or launch.json) with value,
    source, strength of the evidence, and what would change it. FIELD may be a name, a prefix, or a
    pattern: `batch_tokens`, `groups.embedding.lr`, `schedule`, `groups.*.wd`. FIELD alone means the
    study's only frozen config. Exit 4: the config lacks the record that `freeze` writes; 5:
    something was edited.

    plan [KEY] lists the keys of a plan with meaning, allowed values, the study's value, and the
    default.

    Without FROZEN, --parametrization NAME shows the rules of a parametrization and the source of
    each choice; with --shape also the numbers of each parameter group: init std, learning rate,
    weight decay, eps, and the multipliers of the forward pass.
    """
    typed = get_typed_options(ctx)
    if frozen is None:
        refuse_options(typed, ("full", "study"), "with FROZEN")
        if options["shape_text"] is None:
            # All other options change numbers, which are shown only for a shape.
            refuse_options(typed, options.keys() - {"name", "choices"}, "with --shape")
        print_result(as_json, *_explain_parametrization(**options))
        return
    # `options` are exactly the options of a parametrization: the others have named parameters.
    refuse_options(typed, options, "with --parametrization, without FROZEN")
    if frozen == _PLAN and not Path(frozen).exists():
        refuse_options(typed, ("full",), "with FROZEN")
        study_dir = get_study_option(ctx) or find_default_study()
        print_result(as_json, *plan_keys.explain_keys(field, study_dir))
        return
    config, name = _find_config_and_field(ctx, frozen, field)
    print_result(as_json, *explain_fields(config, name, full=full))


def _explain_parametrization(
    name: str,
    shape_text: str | None,
    base_text: str | None,
    batch_ratio: float,
    duration_ratio: float,
    family: Family,
    tied: bool,
    qk_norm: bool,
    choices: tuple[str, ...],
    **values_at_base: float,
) -> tuple[dict[str, Json], str]:
    """Explain a parametrization, or list all of them, as data and as text."""
    presets = "\n".join(f"  {key.ljust(18)}{text}" for key, text in sources.PRESETS.items())
    if name == _LIST_ALL and not (shape_text or choices):
        return {"parametrizations": dict(sources.PRESETS)}, presets
    if name not in sources.PRESETS:
        raise click.BadParameter(f"--parametrization {name}: must be one of\n{presets}")
    rules = get_parametrization(name, **_parse_choices(choices))
    if shape_text is None:
        return parametrizations.describe_laws(rules)
    sizes = _parse_sizes("--shape", shape_text, _SHAPE_KEYS)
    if "num_heads" in sizes:
        sizes.setdefault("num_kv_heads", sizes["num_heads"])
    if missing := [
        key for key, field in _SHAPE_KEYS.items() if field not in sizes and key != "kv_heads"
    ]:
        raise SpecError("--shape", [f"{key} is missing" for key in missing])
    shape = Shape(**sizes, family=family, tied=tied, qk_norm=qk_norm)
    base_sizes = _parse_sizes("--base", base_text or "", _BASE_KEYS)
    base = shape.at_width(base_sizes.get("width", shape.width)).at_depth(
        base_sizes.get("num_layers", shape.num_layers)
    )
    hparams = Hparams.from_point(values_at_base, {})
    return parametrizations.describe_numbers(
        rules, shape, base, hparams, batch_ratio, duration_ratio
    )


def _find_config_and_field(
    ctx: click.Context, name: str, field: str | None
) -> tuple[Path, str | None]:
    """Return the config and the field that the arguments name. If the only argument names no
    config, it is the name of a field, and the config is the only one of the study.
    """
    study = get_study_option(ctx)
    try:
        return find_frozen_config(name, study), field
    except StudyNameError as error:
        message = str(error)
        if field is None and "/" not in name and not Path(name).exists():
            configs = list_frozen_configs(study or find_default_study())
            if len(configs) == 1:
                return configs[0], name
            with contextlib.suppress(plan_keys.UnknownKeyError):
                plan_keys.explain_keys(name)
                message += (
                    f"\nnext: forerun explain plan {name}, or, of a frozen config: "
                    f"explain FROZEN {name}"
                )
        raise click.BadParameter(message, ctx) from error


def _parse_choices(texts: tuple[str, ...]) -> dict[str, object]:
    """Parse the values of `--set`, CHOICE=VALUE, where VALUE is a number, `none`, or a word."""
    choices: dict[str, object] = {}
    for text in texts:
        choice, sign, word = text.partition("=")
        if not sign:
            raise click.BadParameter(f"--set {text}: must be CHOICE=VALUE")
        try:
            choices[choice] = float(word)
        except ValueError:
            choices[choice] = None if word.lower() == "none" else word
    return choices


def _parse_sizes(option: str, text: str, keys: Collection[str]) -> dict[str, int]:
    """Parse `width=256,layers=4` as fields of a shape; report every problem at once."""
    sizes, problems = {}, []
    for part in filter(None, text.replace(" ", "").split(",")):
        key, _, size = part.partition("=")
        if key not in keys:
            problems.append(f"{part}: must be one of {', '.join(keys)}")
        elif not re.fullmatch(r"[0-9]{1,12}", size):
            problems.append(f"{part}: must be a whole number")
        else:
            sizes[_SHAPE_KEYS[key]] = int(size)
    if problems:
        raise SpecError(option, problems)
    return sizes
