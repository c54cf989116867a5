"""The coordinate check in words: what each flagged layer follows from, mistakes by name, choices that are none."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from proxies.coordinate_verdict import FLAGGED, INITIAL_STD, LayerVerdict, Setting
from proxies.spec import RunSpec

_ATTENTION = (
    "attention logits blow up with the head dim: q . k is scaled by 1 / sqrt(head_dim), or by less, where 1 / head_dim "
    "is wanted (random queries and keys hide it at first; trained ones align)"
)
_LATER = (
    "its own first update keeps its size: look at the multipliers before it, and whether a scheduler overwrites the "
    "groups' rates after the first step"
)
_NO_DEPTH_RULE = "no depth rule: the residual stream's updates grow with depth; completep has one"


def attributed(layers: list[LayerVerdict], setting: Setting) -> list[LayerVerdict]:
    """The layers, each that is flagged without a cause of its own given one: a scale, or what it follows from."""
    roots = [layer for layer in layers if _flagged(layer) and layer.cause]
    # What is wrong in the blocks comes before the readout, which reaches them through the gradients.
    roots.sort(key=lambda layer: layer.role == "readout")
    upset = bool(roots) and roots[0].role != "readout"
    wrong_start = any(layer.cause.startswith(INITIAL_STD) for layer in roots)

    def cause(layer: LayerVerdict) -> str:
        led = layer.role == "readout" and layer.outcome == "vanishes" and upset
        if not _flagged(layer) or (layer.cause and not led):
            return layer.cause
        grows = layer.role == "attention_logits" and setting.head_dim_power > 0 and layer.outcome == "blows_up"
        if grows and not wrong_start:
            return _ATTENTION
        if roots:
            return f"follows from {roots[0].layer}"
        if setting.axis == "depth" and layer.outcome == "blows_up":
            ruleless = setting.parametrization.depth_alpha is None
            return _NO_DEPTH_RULE if ruleless else "the branches' multiplier does not shrink with depth"
        return _LATER

    return [dataclasses.replace(layer, cause=cause(layer)) for layer in layers]


def _flagged(layer: LayerVerdict) -> bool:
    return layer.outcome in FLAGGED


def named_mistakes(layers: Sequence[LayerVerdict]) -> tuple[str, ...]:
    """Causes that are not another layer's, each with the layers it was found in."""
    where: dict[str, list[str]] = {}
    for layer in layers:
        if _flagged(layer) and not layer.cause.startswith("follows from"):
            where.setdefault(layer.cause, []).append(layer.layer)
    return tuple(
        f"{cause} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})"
        for cause, names in where.items()
    )


def structural_mistakes(specs: Sequence[Sequence[RunSpec]]) -> tuple[str, ...]:
    """Mistakes that the runs' own base shapes show. One wrong base for all is none: it only renames the rates."""
    runs = [run for row in specs for run in row]
    deep = runs[0].parametrization.depth_alpha is not None
    bases = {run.base_shape if deep else run.base_shape.at_depth(1) for run in runs}
    if runs[0].parametrization.width == "none" or len(bases) == 1:
        return ()
    if all(run.shape == run.base_shape for run in runs):
        return ("every model is given itself as base: nothing scales, which is the standard parametrization",)
    said = ", ".join(
        f"{row[0].shape.width} on {'/'.join(map(str, sorted({run.base_shape.width for run in row})))}" for row in specs
    )
    return (f"the models are on different bases (widths {said}): one base for proxies and target is wanted",)


def left_finite(lost: tuple[RunSpec, int] | None) -> tuple[str, ...]:
    """The run that left the finite numbers, and at which step."""
    if lost is None:
        return ()
    shape = lost[0].shape
    which = f"width {shape.width} ({shape.num_layers} layers, seed {lost[0].seed})"
    return (f"{which} left the finite numbers at step {lost[1]}",)


def notes_of(layers: Sequence[LayerVerdict], setting: Setting) -> tuple[str, ...]:
    """What is by choice and no mistake, and what could not be looked at."""
    chosen, notes = setting.parametrization, []
    if setting.axis == "width" and chosen.width == "mup" and chosen.embedding_rate == "inverse_root":
        notes.append(
            "by choice (embedding_rate = inverse_root) the embedding's changes shrink with the root of the width: no "
            "mistake, but no feature learning in the embedding at large width"
        )
    if setting.axis == "depth" and (chosen.depth_alpha or 1.0) < 1.0:
        notes.append(
            f"by choice (depth_alpha = {chosen.depth_alpha:g}) blocks' weights move less as depth grows: the stream's "
            "change keeps its size, the blocks become lazy"
        )
    if layers and not any(layer.role == "attention_logits" for layer in layers):
        notes.append(
            "no attention logits were seen: the model does not call torch.nn.functional.scaled_dot_product_attention, "
            "so their scale is not checked"
        )
    if layers and not any(layer.role == "readout" for layer in layers):
        notes.append("no module was seen that gives the logits: the readout is not checked")
    return tuple(notes)
