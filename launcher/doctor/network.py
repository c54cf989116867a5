"""Loopback, proxies, and what W&B and Ray are told by the environment. No secret's value is kept."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.doctor.findings import Finding, fail, ok, warn

LOOPBACK_SECONDS = 5.0
_PROXIES = ("grpc_proxy", "http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkFacts:
    """What this process can reach of itself, and what the environment says."""

    loopback_problem: str
    """Empty: a connection to 127.0.0.1 came through."""
    localhost: tuple[str, ...]
    """What the name resolves to."""
    proxies: tuple[str, ...]
    """Names of the variables that are set."""
    no_proxy: str
    ray_address: bool
    has_key: bool
    key_problem: str
    """In words, without the key."""
    wandb_mode: str
    netrc: str
    """What is wrong with the file; empty: nothing, or there is none."""


def look_at_network(environment: Mapping[str, str] = os.environ) -> NetworkFacts:
    """The facts; a packet goes no farther than this machine."""
    key = environment.get("WANDB_API_KEY")
    netrc = Path(environment.get("NETRC") or Path.home() / ".netrc")
    set_here = [name for name in _PROXIES if environment.get(name) or environment.get(name.upper())]
    return NetworkFacts(
        loopback_problem=_loopback(),
        localhost=_localhost(),
        proxies=tuple(set_here),
        no_proxy=environment.get("no_proxy") or environment.get("NO_PROXY") or "",
        ray_address="RAY_ADDRESS" in environment,
        has_key=bool(key) or _in_netrc(netrc),
        key_problem="" if key is None else _key_problem(key),
        wandb_mode=environment.get("WANDB_MODE", ""),
        netrc=_netrc_problem(netrc),
    )


def judge_network(facts: NetworkFacts) -> list[Finding]:
    """Every line of it."""
    return [judge_loopback(facts), judge_proxies(facts), judge_wandb(facts)]


def judge_loopback(facts: NetworkFacts) -> Finding:
    """Ray's parts and the ranks of a run meet there."""
    name, said = "ports", "127.0.0.1 takes connections at free ports"
    if facts.loopback_problem:
        mend = "sudo ip link set lo up; in a container, allow connections to 127.0.0.1"
        return fail(name, f"127.0.0.1: {facts.loopback_problem}: neither Ray nor torchrun can start", mend)
    if not set(facts.localhost) & {"127.0.0.1", "::1"}:
        leads = ", ".join(facts.localhost) or "nothing"
        return warn(name, f"{said}, but `localhost` is {leads}", "echo '127.0.0.1 localhost' | sudo tee -a /etc/hosts")
    if facts.ray_address:
        mend = "unset RAY_ADDRESS, or --set cluster.address=auto to join that cluster"
        return warn(name, f"{said}; RAY_ADDRESS is set, and a plan without cluster.address does not use it", mend)
    return ok(name, said)


def judge_proxies(facts: NetworkFacts) -> Finding:
    """gRPC, and so Ray, sends even what is for this machine through a proxy that it is not told to leave out."""
    name = "proxies"
    if not facts.proxies:
        return ok(name, "none set")
    left_out = {part.strip() for part in facts.no_proxy.split(",")}
    if "*" in left_out or {"127.0.0.1", "localhost"} <= left_out:
        return ok(name, f"{', '.join(facts.proxies)}; not for this machine itself")
    said = f"{', '.join(facts.proxies)} would catch what Ray sends to this machine itself"
    mend = 'export NO_PROXY="127.0.0.1,localhost${NO_PROXY:+,$NO_PROXY}" no_proxy="$NO_PROXY"'
    return warn(name, said, f"{mend.partition(' no_proxy')[0]}; export no_proxy=$NO_PROXY")


def judge_wandb(facts: NetworkFacts) -> Finding:
    """A key is needed for `--online` alone."""
    name = "W&B"
    if facts.key_problem:
        return warn(name, f"WANDB_API_KEY {facts.key_problem}", "wandb login --relogin, and unset WANDB_API_KEY")
    if facts.netrc:
        return warn(name, facts.netrc, "chmod 600 ~/.netrc")
    mode = f"; WANDB_MODE={facts.wandb_mode} is your own trainer's to read" if facts.wandb_mode else ""
    if facts.has_key:
        return ok(name, f"a key is there; nothing is sent without --online{mode}")
    return ok(name, f"no key: dashboards stay offline, `wandb login` is for --online{mode}")


def _loopback() -> str:
    """Send a byte to ourselves; what is wrong, in words."""
    try:
        with contextlib.ExitStack() as opened:
            server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            server.settimeout(LOOPBACK_SECONDS)
            client = opened.enter_context(socket.create_connection(server.getsockname(), LOOPBACK_SECONDS))
            taken, _ = server.accept()
            opened.enter_context(taken)
            taken.settimeout(LOOPBACK_SECONDS)
            client.sendall(b"?")
            return "" if taken.recv(1) == b"?" else "a byte sent did not arrive"
    except OSError as error:
        return error.strerror or str(error)


def _localhost() -> tuple[str, ...]:
    try:
        return tuple({str(each[4][0]) for each in socket.getaddrinfo("localhost", None)})
    except OSError:
        return ()


def _key_problem(key: str) -> str:
    if not key:
        return "is set, and empty"
    if key != key.strip() or not key.isprintable():
        return "has a space or a line end at one of its ends"
    return "" if len(key) >= 40 else f"has {len(key)} characters: W&B's have 40 and more"


def _in_netrc(path: Path) -> bool:
    """Only whether W&B is named there."""
    try:
        return "api.wandb.ai" in path.read_text(errors="replace")
    except OSError:
        return False


def _netrc_problem(path: Path) -> str:
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""
    return f"{path} can be read by others" if _in_netrc(path) and mode & (stat.S_IRGRP | stat.S_IROTH) else ""
