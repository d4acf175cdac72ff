"""`trellis plan`: keep as many replicas of a role as its load needs."""

import signal
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pydantic_settings import SettingsError

from server.settings import read_settings
from server.settings.environment import child_environment
from server.settings.flags import FlagParser
from server.sweep.deployments import ROOT
from server.sweep.planner import (
    METRICS,
    Decider,
    KubernetesReplicas,
    LocalReplicas,
    Scaled,
    ScaleError,
    ScalingPolicy,
    looks,
    plan,
)

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_EPILOG = """Settings of local replicas follow --: `trellis plan --max 3 -- --model FOLDER`. They go on when the planner
ends, and the next one adopts them; --stop drains and ends them. docs/profiling.md has the whole set-up."""


def parser() -> FlagParser:
    found = FlagParser(prog="trellis plan", description="Scale the replicas of a role by metrics.", epilog=_EPILOG)
    found.add_argument("settings", nargs="*", metavar="SETTINGS", help="of local replicas, after --")
    found.add_argument("--role", choices=sorted(METRICS), default="aggregated", help="default: aggregated")
    found.add_argument("--min", type=int, default=1, metavar="INT", help="fewest replicas (default: 1)")
    found.add_argument("--max", type=int, default=4, metavar="INT", help="most replicas (default: 4)")
    found.add_argument(
        "--metric",
        type=_target,
        action="append",
        metavar="NAME=TARGET",
        help="value for each replica (default: the role's)",
    )
    found.add_argument("--interval", type=float, default=5.0, metavar="SECONDS", help="between two looks (default: 5)")
    found.add_argument("--up-seconds", type=float, default=15.0, metavar="SECONDS", help="pause after a change (15)")
    found.add_argument(
        "--down-seconds", type=float, default=300.0, metavar="SECONDS", help="of lower load before one leaves (300)"
    )
    found.add_argument(
        "--notice-seconds", type=float, default=6.0, metavar="SECONDS", help="between leaving the list and the end (6)"
    )
    found.add_argument("--state", type=Path, default=Path("plan"), metavar="FOLDER", help="of local replicas (./plan)")
    found.add_argument("--stop", action="store_true", help="drain and stop all local replicas, then end")
    found.add_argument("--kubernetes", metavar="RESOURCE/NAME", help="scale this, such as deployments/trellis-decode")
    found.add_argument("--namespace", metavar="NAME", help="of it (default: the pod's)")
    found.add_argument("--api", default="https://kubernetes.default.svc", metavar="URL", help="Kubernetes' API")
    found.add_argument("--pod-port", type=int, default=8000, metavar="PORT", help="of the replicas (default: 8000)")
    return found


def main(arguments: Sequence[str]) -> int:
    """Run `trellis plan`. Raises SettingsError."""
    args = parser().parse(arguments)
    if not 0 <= args.min <= args.max or args.max < 1 or args.interval <= 0:
        raise SettingsError("--min must be at most --max, and --interval above 0")
    targets = dict(args.metric or METRICS[args.role].items())
    policy = ScalingPolicy(targets, args.min, args.max, up_seconds=args.up_seconds, down_seconds=args.down_seconds)
    keys = read_settings([]).api_keys
    key = keys[0].get_secret_value() if keys else ""
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)
    try:
        if args.kubernetes:
            _run(_kubernetes(args, key), policy, args.interval, lambda: stopped)
            return 0
        local = _local(args, key)
        try:
            if args.stop:
                local.scale(0)
                for _ in looks(min(1.0, args.interval), lambda: stopped or not local.replicas):
                    local.settle()
                return 0
            _say(f"{args.role} replicas are listed in {local.urls.resolve().as_uri()}")
            _run(local, policy, args.interval, lambda: stopped)
            _say(f"{len(local.replicas)} replicas go on; trellis plan --stop ends them")
            return 0
        finally:
            local.close()
    except ScaleError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _run(scaled: Scaled, policy: ScalingPolicy, seconds: float, stopped: Callable[[], bool]) -> None:
    """Look again and again. What does not answer is said, and asked again."""
    decider = Decider(policy)
    for now in looks(seconds, stopped):
        try:
            plan(scaled, decider, _say, now)
        except ScaleError as error:
            _say(f"nothing is changed: {error}")


def _local(args: Namespace, key: str) -> LocalReplicas:
    def command(port: int) -> list[str]:
        address = ["--host", "127.0.0.1", "--port", str(port)]
        serve = [sys.executable, str(ROOT / "trellis.py"), "serve", "--disaggregation-mode", args.role]
        return [*serve, *address, *args.settings]

    return LocalReplicas(
        args.state, args.role, command, child_environment(), key=key, notice_seconds=args.notice_seconds
    )


def _kubernetes(args: Namespace, key: str) -> KubernetesReplicas:
    token, ca = _ACCOUNT / "token", _ACCOUNT / "ca.crt"
    namespace = args.namespace or _text(_ACCOUNT / "namespace")
    if not namespace:
        raise SettingsError("--namespace: needed outside a pod")
    return KubernetesReplicas(
        args.api,
        namespace,
        args.kubernetes,
        token=partial(_text, token),
        ca=ca if ca.is_file() else None,
        port=args.pod_port,
        key=key,
    )


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


def _target(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        target = float(value)
    except ValueError:
        target = 0.0
    if not equals or not target > 0:
        raise ArgumentTypeError("write NAME=TARGET with a target above 0, such as trtllm_num_requests_waiting=4")
    return name, target


def _say(line: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()
