"""Text about a watched run: its headline, its alerts, and its figures."""

from __future__ import annotations

from forerun._launcher.main_run.watch.alerts import Alert
from forerun._launcher.main_run.watch.figures import RunFigures
from forerun._launcher.main_run.watch.judgment import WatchFindings
from forerun._launcher.main_run.watch.pace import Projection
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import (
    format_count,
    format_counted,
    format_duration,
    format_interval,
    format_loss,
    format_percent,
    format_significant,
    format_speed,
)


def format_headline(findings: WatchFindings) -> str:
    """Format the standing, where the run is, and which rises its noise hides."""
    counts = [
        format_counted(number, name)
        for name in ("alarm", "notice")
        if (number := sum(alert.severity == name for alert in findings.alerts))
    ]
    figures, standing = findings.figures, findings.standing.upper()
    headline = f"{standing} at step {figures.step} of {figures.num_steps}: {findings.why}"
    headline += f" ({', '.join(counts)})" if counts else ""
    return headline + _describe_undetectable(figures)


def _describe_undetectable(figures: RunFigures) -> str:
    """Describe the rises that would not be found in time.

    Numbers have two digits, so that the line stays the same while the run goes on as before.
    """
    jump, climb = figures.smallest_jump_nats, figures.smallest_climb_nats
    if jump is None:
        return ""
    period = f"within {figures.in_time_lines} logged steps"
    # A climb is mentioned only if its limit clearly differs from that of a jump.
    slow = (
        f" or a slow one under {format_significant(climb, 2)} nats"
        if climb is not None and climb > 1.1 * jump
        else ""
    )
    return f"; not detectable {period}: a rise under {format_significant(jump, 2)} nats{slow}"


def format_alert(alert: Alert, known_command: str = "") -> str:
    """Format an alert: what was seen, the numbers, and the next command.

    Args:
        alert: The alert.
        known_command: Command that is left out, because the reader has just run it.
    """
    numbers = ", ".join(
        f"{name} {_format_value(value)}"
        for name, value in alert.evidence.items()
        if value is not None
    )
    lines = [f"{alert.severity.upper()} {alert.name}, from step {alert.first_step}: {alert.seen}"]
    lines += [f"  evidence: {numbers}"] if numbers else []
    lines += [f"  next: {alert.next_command}"] if alert.next_command != known_command else []
    return "\n".join(lines)


def _format_value(value: Json) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def format_figures(figures: RunFigures, final_loss: float | None = None) -> list[str]:
    """Format what is known of loss, pace, end and cost.

    Args:
        figures: Figures of `WatchFindings`.
        final_loss: Final validation loss in nats of a finished run; None otherwise.
    """
    lines = []
    if figures.train_loss_nats is not None:
        lines.append(
            f"training loss {format_loss(figures.train_loss_nats)} nats; spikes so far: "
            f"{figures.num_spikes}"
        )
    frozen = (
        f"{format_loss(figures.foretold_nats)} "
        f"{format_interval(figures.foretold_interval_nats)}, at level {figures.level:g}"
    )
    if final_loss is not None:
        lines.append(
            f"final validation loss: {format_loss(final_loss)} nats; predicted when frozen: "
            f"{frozen}"
        )
    else:
        final_interval = ", ".join(map(format_loss, figures.final_interval_nats))
        lines.append(
            f"predicted final validation loss: {format_loss(figures.final_nats)} nats "
            f"[{final_interval}] from here; frozen {frozen}"
        )
    pace = []
    if figures.tokens_per_second is not None:
        pace.append(format_speed(figures.tokens_per_second, "tokens"))
    if figures.mfu is not None:
        pace.append(f"MFU {format_percent(figures.mfu)}")
    if figures.goodput is not None:
        pace.append(f"goodput {format_percent(figures.goodput)}")
    if figures.num_attempts is not None and figures.num_attempts > 1:
        pace.append(format_counted(figures.num_attempts, "attempt"))
    if pace:
        until = f"until step {figures.step}: " if figures.still_since is not None else ""
        lines.append(until + ", ".join(pace))
    if (interval := figures.noise_scale_interval_tokens) is not None:
        lines.append(
            _format_noise_scale(figures.noise_scale_tokens, interval, figures.batch_tokens)
        )
    if (ends := figures.projection) is not None:
        lines.append(_format_projection(ends))
    elif figures.projection_reason is not None:
        lines.append(f"cannot tell when it ends: {figures.projection_reason}")
    return lines


def _format_noise_scale(
    scale: float | None, interval: tuple[float, float | None], batch: int
) -> str:
    """Format the gradient noise scale, and compare the batch with it; all are in tokens."""
    low, high = interval
    scale_text = "not determined" if scale is None else f"{format_count(scale)} tokens"
    interval_text = (
        f"{format_count(low)} or more"
        if high is None
        else f"{format_count(low)} to {format_count(high)}"
    )
    side = "under" if batch < low else "over" if high is not None and batch > high else "about"
    return (
        f"gradient noise scale: {scale_text} ({interval_text}); the batch of {format_count(batch)} "
        f"tokens is {side} it"
    )


def _format_projection(ends: Projection) -> str:
    left = [format_duration(seconds) for seconds in ends.remaining_seconds]
    hours = ends.device_hours
    if not ends.remaining_seconds[0]:
        return f"{format_significant(hours[0])} device-hours in all"
    total, low, high = map(format_significant, hours)
    return (
        f"ends in {left[0]} ({left[1]} to {left[2]}); {total} device-hours in all ({low} to {high})"
    )
