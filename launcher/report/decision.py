"""The top of the report: what to launch, what to expect, because of which gates, and what nobody knows."""

from __future__ import annotations

from typing import Any

from launcher.study.gates import forecast_warnings
from launcher.study.own import own_text
from launcher.views import html as show
from launcher.views.html import Body


def decision(body: Body) -> str:
    """Headline, configuration, expectation, gates and the honest rest; or what is missing before there is one."""
    headline, lead = _standing(body)
    parts = [
        '<p class="over">forerun report</p>',
        f"<h1>{headline}</h1>",
        _in_one_sentence(body),
        f'<p class="lead">{lead}</p>',
    ]
    if body["decision"] is not None:
        cards = f"{_configuration(body)}{_expectation(body)}{_gates(body)}"
        parts.append(f'<div class="decision">{cards}</div>')
    if body["own_run"] is not None:
        parts.append(f"<pre>{show.text(own_text(body['own_run']))}</pre>{_gates(body)}")
    parts.append(show.section("unknown", "What is not known", show.bullets(_unknown(body))))
    return "".join(parts)


def _standing(body: Body) -> tuple[str, str]:
    """Headline and the sentence below it."""
    if body["own_run"] is not None:
        closed = [show.words(gate["name"]) for gate in body["gates"] if gate["outcome"] != "passed"]
        held = f"These gates did not pass: {_listed(closed)}." if closed else "Every gate passed."
        return (
            "Not ready to launch" if closed else "Launch this",
            f"{held} Your own code trains; what to start it with:",
        )
    if body["decision"] is None:
        if body["fit"] is not None:
            return "Nothing to launch yet", "The ladder has run, and fits no law; see the warnings of the fit below."
        return "Nothing to launch yet", (f"The study has not ended: {show.command('forerun run PLAN')} continues it.")
    unsettled = [gate for gate in body["gates"] if gate["outcome"] != "passed" and gate["name"] not in body["accepted"]]
    failed = [show.words(gate["name"]) for gate in unsettled if gate["outcome"] == "failed"]
    untold = [show.words(gate["name"]) for gate in unsettled if gate["outcome"] != "failed"]
    if unsettled:
        headline = f"Do not launch this yet: {_listed(failed)} failed" if failed else (
            f"Not ready to launch: {_listed(untold)} cannot tell")  # fmt: skip
        return headline, (
            "What follows is the candidate. More evidence decides a gate; "
            f"{show.command('forerun freeze STUDY --accept GATE --reason TEXT')} accepts one as it is, on the record."
        )
    by_hand = [show.words(gate["name"]) for gate in body["gates"] if gate["outcome"] != "passed"]
    if by_hand:
        were = "were" if len(by_hand) > 1 else "was"
        return "Launch this, at the risk accepted", (
            f"{_listed(by_hand).capitalize()} did not pass, and {were} accepted by hand; the reasons are below."
        )
    return "Launch this", (
        f"Every gate passed. {show.command('forerun freeze STUDY')} writes the config, to be launched with "
        f"{show.command('forerun launch FROZEN')}."
    )


def _in_one_sentence(body: Body) -> str:
    """What, what to expect, and at what cost; nothing before there is a config."""
    config, choice = body["decision"], body["choice"]
    if config is None:
        return ""
    predicted = config["predicted"]
    ends = show.interval((predicted["low_nats"], predicted["high_nats"]))
    expect = f"Expect a validation loss of <b>{show.loss(predicted['loss_nats'])} nats per token</b> {ends}"
    if _inconclusive(body):
        expect = (
            "<b>No loss can be expected yet:</b> the forecast is inconclusive (see the fit gate below); the fit would "
            f"say {show.loss(predicted['loss_nats'])} nats per token {ends}"
        )
    return (
        f'<p class="lead"><b>{show.count(choice["params"])} parameters on {show.count(config["num_tokens"])} tokens.'
        f"</b> {expect}, at "
        f"<b>{show.flops(choice['prediction']['flops'])} FLOPs</b>; what these take in hours and dollars on your GPUs "
        f"says {show.command('forerun estimate FROZEN --gpu NAME')}.</p>"
    )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _configuration(body: Body) -> str:
    config, choice = body["decision"], body["choice"]
    schedule, shape = config["learning_rate"]["schedule"], config["shape"]
    kind = f"{show.text(schedule['kind'])}, ends at {show.number(schedule['final_fraction'], 'g')} of the peak"
    clip = "none" if config["clip_norm"] is None else f"global gradient norm {show.number(config['clip_norm'])}"
    tied = "tied" if shape["tied"] else "untied"
    parallel = config["parallelism"]
    rows = [
        ("Shape", (f"{shape['num_layers']} layers, width {shape['width']}, {shape['num_heads']} heads "
                  f"({shape['num_kv_heads']} KV), feed-forward {shape['ffn_width']}"
                  + (f"<br>{show.text(traded)}" if (traded := choice.get("shape_traded")) else ""))),
        ("Vocabulary", f"{show.count(shape['vocab_size'])}, {tied}; sequences of {show.count(shape['seq_len'])}"),
        ("Parameters", (f"{show.count(choice['params'])} ({show.count(choice['params_non_embedding'])} "
                       "without embeddings)")),
        ("Tokens", (f"{show.count(config['num_tokens'])} in {show.count(schedule['num_steps'])} steps of "
                   f"{show.count(config['batch_tokens'])}")),
        ("Compute", f"{show.flops(choice['prediction']['flops'])} FLOPs (6ND)"),
        ("Learning rate", "<br>".join(_rates(config))),
        ("Weight decay", "<br>".join(_decays(config))),
        ("Betas", ", ".join(show.number(config["groups"][0][beta]) for beta in ("beta1", "beta2"))),
        ("Warmup", f"{show.count(schedule['warmup_steps'])} steps"),
        ("Schedule", kind),
        ("Clip", clip),
        ("Precision", (f"{show.text(config['precision'])}, AdamW, parametrization "
                      f"{show.text(config['parametrization']['name'])}")),
        ("Ranks", f"{parallel['data_parallel_shard']} sharded × {parallel['data_parallel_replicate']} replicated"),
        ("If the loss spikes", _on_a_spike(config["spikes"])),
        ("Digest", f"<code>{show.text(body['digest'])}</code>"),
    ]  # fmt: skip
    return f'<div class="card"><h2>The launch</h2>{show.facts(rows)}</div>'


def _on_a_spike(policy: Any) -> str:
    """What is done, and by whom; a file of before the trainer could has no number of times."""
    times = policy.get("max_rollbacks", 0)
    by = f"the trainer by itself, {show.count(times)} times at most" if times else "for people to do"
    return (
        f"go back {show.count(policy['rollback_steps'])} steps, skip {show.count(policy['skip_batches'])} batches: {by}"
    )


def _rates(config: Any) -> list[str]:
    """Peak learning rate of every kind of parameter; a kind that has several is there several times."""
    rates = dict.fromkeys((group["kind"], group["learning_rate"]) for group in config["groups"])
    return [f"{show.number(rate)} {show.words(kind)}" for kind, rate in rates]


def _decays(config: Any) -> list[str]:
    """Weight decay of every kind of parameter that has one."""
    decays = dict.fromkeys((group["kind"], group["weight_decay"]) for group in config["groups"])
    return [f"{show.number(decay)} {show.words(kind)}" for kind, decay in decays if decay] or ["none"]


def _expectation(body: Body) -> str:
    config = body["decision"]
    predicted = config["predicted"]
    ends = (predicted["low_nats"], predicted["high_nats"])
    rows = [
        ("Interval", f"{show.interval(ends)} at level {show.percent(predicted['level'])}, for one new run"),
        ("Training loss on the way", "<br>".join(_on_the_way(config)) or "the ladder has too few runs to say"),
        ("Beyond the ladder", f"{show.number(predicted['extrapolation'], '.3g')} times its largest rung's compute"),
        ("About as good", _about_as_good(body["choice"])),
        ("Stop if", (f"a loss is not finite, or training loss exceeds "
                    f"{show.loss(config['abort']['train_loss_above_nats'])} nats")),
        ("Spent on proxies", (f"{show.flops(body['spend']['flops_causal'])} FLOPs, "
                             f"{show.percent(body['spend']['share_of_target'])} of the main run's budget")),
    ]  # fmt: skip
    loss = f"{show.loss(predicted['loss_nats'])} nats per token"
    if said := _inconclusive(body):
        rows.insert(0, ("The fit would say", loss))
        return (
            f'<div class="card"><h2>No loss can be expected yet</h2><p>{show.text(said)}.</p>{show.facts(rows)}</div>'
        )
    return f'<div class="card"><h2>Expect this validation loss</h2><p class="big">{loss}</p>{show.facts(rows)}</div>'


def _inconclusive(body: Body) -> str:
    """What must be said before the forecast; empty where the fit's gate passed."""
    return "; ".join(forecast_warnings(body["gates"]))


def _about_as_good(choice: Any) -> str:
    """Sizes that lose about as little; only a range that holds the chosen one speaks of it."""
    best = choice["allocation"]
    low, high = best["flat_range"]["params"]
    if low <= choice["params"] <= high:
        return f"{_range((low, high))} parameters, on the same compute"
    return f"not determined: the fit's best size, {show.count(best['params'])} parameters, is not the one chosen"


def _on_the_way(config: Any) -> list[str]:
    """Expected training loss near a tenth and a half of the steps."""
    curve, num_steps = config["predicted"]["curve"], config["learning_rate"]["schedule"]["num_steps"]

    def nearest(share: float) -> Any:
        return min(curve, key=lambda point: abs(point["step"] - share * num_steps))

    near = [nearest(share) for share in (0.1, 0.5)] if curve else []
    return [
        f"{show.loss(point['loss_nats'])} {show.interval((point['low_nats'], point['high_nats']))} near step "
        f"{show.count(point['step'])}"
        for point in near
    ]


def _range(ends: Any) -> str:
    return f"{show.count(ends[0])} to {show.count(ends[1])}"


def groups(body: Body) -> str:
    """Numbers per parameter group; the patterns are the launch config's own."""
    config = body["decision"]
    if config is None:
        return ""
    head = ("group", "matches", "peak learning rate", "weight decay", "initial sd", "betas", "eps")
    rows = [
        (show.words(group["kind"]), "<br>".join(f"<code>{show.text(p)}</code>" for p in group["pattern"].split("|")),
         show.number(group["learning_rate"]), show.number(group["weight_decay"]), show.number(group["init_std"]),
         f"{show.number(group['beta1'])}, {show.number(group['beta2'])}", show.number(group["eps"]))
        for group in config["groups"]
    ]  # fmt: skip
    forward = ", ".join(f"{show.words(name)} {show.number(value)}" for name, value in config["forward"].items())
    note = f"<p>Multipliers in the forward pass: {forward}. Gains start at one, biases at zero.</p>"
    return show.section("groups", "Numbers per parameter group", show.table(head, rows, left=(0, 1)), note)


def _gates(body: Body) -> str:
    items = []
    for gate in body["gates"]:
        given = body["accepted"].get(gate["name"])
        accepted = "" if given is None else f"<p><b>Accepted by hand:</b> {show.text(given)}</p>"
        items.append(
            f"<li><b>{show.words(gate['name'])}</b>{show.chip(gate['outcome'])}"
            f"<p>{show.text(gate['reason'])}</p>{accepted}</li>"
        )
    return f'<div class="card" id="gates"><h2>Because</h2><ul class="gates">{"".join(items)}</ul></div>'


def _unknown(body: Body) -> list[str]:
    """What the evidence does not reach, in the order in which it could hurt."""
    return [*_unknown_of_config(body), *_unknown_of_loss(body)]


def _unknown_of_config(body: Body) -> list[str]:
    transfer = body["transfer"]
    if transfer is None:
        return ["<b>Transfer.</b> Nothing is known yet of other sizes than the base's."]
    said = []
    if not transfer["at_base_optimum"]:
        said.append("<b>Rate.</b> No optimum was fitted at the base width; the rate is the search's best trial's.")
    rates = [test["verdict"] for test in transfer["tests"] if test["hyperparameter"] == "learning_rate"]
    for verdict in rates:
        largest, target = max(optimum["size"] for optimum in verdict["optima"]), verdict["target_size"]
        if target > largest:
            axis = show.words(verdict["axis"])
            said.append(
                f"<b>{axis.capitalize()}.</b> Valleys were measured up to {show.count(largest)}; the launch is at "
                f"{show.count(target)}, {show.number(target / largest, '.3g')} times beyond: the power law is "
                "extrapolated."
            )
    if len(rates) > 1:
        said.append(
            "<b>Axes together.</b> Each axis was measured at the base of the others; that their shifts of the learning "
            "rate add up is assumed."
        )
    for value in transfer["values"]:
        if value["untested"] and value["base_value"]:
            over = _listed([show.words(axis) for axis in value["untested"]])
            name = show.words(value["hyperparameter"])
            said.append(f"<b>{name.capitalize()}.</b> Whether it stays put over {over} was not tested.")
    return said


def _unknown_of_loss(body: Body) -> list[str]:
    fit, choice = body["fit"], body["choice"]
    if fit is None:
        return ["<b>Loss.</b> No law is fitted yet, so nothing is said about the main run's loss."]
    said = []
    if choice is not None:
        predicted = choice["prediction"]
        said.append(
            f"<b>Extrapolation.</b> The prediction lies {show.number(predicted['extrapolation'], '.3g')} times beyond "
            "the largest compute fitted; no run checks the law there."
        )
    said.append(_coverage(fit))
    said += _unknown_of_laws(fit)
    if choice is not None and choice["allocation"]["warnings"]:
        said.append(f"<b>Choice:</b> {show.text('; '.join(choice['allocation']['warnings']))}.")
    return said


def _unknown_of_laws(fit: Any) -> list[str]:
    """How far the laws that count disagree about the main run, and what hangs on single rungs."""
    losses = [member["loss_at_choice_nats"] for member in fit["members"] if member["weight"] > 0]
    said = []
    if len(losses) > 1 and None not in losses:
        said.append(
            f"<b>Law.</b> The {len(losses)} laws that count say {show.loss(min(losses))} to {show.loss(max(losses))} "
            "nats of the main run; only runs nearer to it tell which is right."
        )
    hangs = fit["influence"]
    return said + [f"<b>Single rungs:</b> {show.text(words)}." for words in (hangs["warnings"] if hangs else ())]


def _coverage(fit: Any) -> str:
    backtest = fit["backtest"]
    if backtest is None or backtest["num_covered"] is None:
        tested = "no held-out rung tested it"
    else:
        tested = f"it held {backtest['num_covered']} of {backtest['num_held_out']} held-out rungs"
    misfit = fit["misfit_sd"]
    widened = (
        ""
        if misfit is None
        else (
            "Beside what the runs leave open it counts an error that all laws share, "
            f"{show.percent(misfit, '.2g')} of the loss "
            "some three times beyond the largest rung and more further out."
        )
    )
    return (
        f"<b>Coverage.</b> The interval says {show.percent(fit['level'])}; {tested}, which shows little about how "
        f"often it is right. {widened}"
    )
