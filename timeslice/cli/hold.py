"""Command ``hold``: run any command while holding groups, as flock does with files."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

import click

from timeslice.cli import reaper, tether
from timeslice.cli.output import Seconds, note
from timeslice.cli.session import Session
from timeslice.client.identity import LEAVE_VARIABLE, leaves_written, process_start, registration, this_target
from timeslice.client.lease import BaseLease
from timeslice.client.sync import Client
from timeslice.client.terms import find_leave
from timeslice.errors import RedisUnreachableError, TimeSliceError
from timeslice.models import Leave, Mode

NOT_FOUND, NOT_RUNNABLE = 127, 126  # as shells have it
_COMMAND = "timeslice.command"
HOLDS_VARIABLE = "TIMESLICE_HOLDS"  # one word for each `timeslice hold` that a process runs in
_END_S = 10.0  # for a command that must not go on
_ENDING = frozenset({signal.SIGTERM, signal.SIGHUP})
_FORWARDED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class _WithCommand(click.Command):
    """A command line of which everything behind ``--`` is another command's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "--", "COMMAND [ARG]..."]


class _Child:
    """The command, once it runs, and what becomes of our signals."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: _Reaper | None = None
        self._starting = self._ends = False
        self._early: list[int] = []
        self._changing = threading.Lock()

    def listen(self) -> None:
        """Forward signals from now on. Before the command runs they end the wait for the groups."""
        for number in _FORWARDED:
            # What a parent told us to ignore (nohup, a shell's background job) the command ignores too.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda received, _: self._handle(received))

    def _handle(self, number: int) -> None:
        self._ends = self._ends or number in _ENDING
        if self._process is not None:
            if not _sent_by_terminal(number):
                self._process.send_signal(number)
        elif self._starting:
            self._early.append(number)
        else:
            raise SystemExit(128 + number)

    def start(self, command: Sequence[str], environment: dict[str, str]) -> int:
        """Returns its process id."""
        self._starting = True  # a signal between fork and the next line must not lose us the child
        mark = secrets.token_hex(8)
        marks = " ".join(filter(None, (os.environ.get(HOLDS_VARIABLE), mark)))  # of the holds around this one, too
        self._reaper = _Reaper(mark)
        try:
            process = _run(command, {**environment, HOLDS_VARIABLE: marks})
        except OSError:
            self._reaper.dismiss()
            raise
        with self._changing:
            self._process = process
        for number in self._early:
            process.send_signal(number)
        return process.pid

    def terminate(self) -> None:
        """Also from another thread, and while it is being started."""
        self._ends = True
        with self._changing:
            if self._process is None:
                self._early.append(signal.SIGTERM)
                return
        self._process.terminate()

    def end(self) -> None:
        """Ask it to end, kill it if it does not, and with it what it has started."""
        assert self._process is not None
        assert self._reaper is not None
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reaper.reap()

    def wait(self) -> int:
        """Exit code as a shell reports it. What it has put into the background stays if it ended by itself; a shell
        that was told to end leaves behind what it waited for."""
        assert self._process is not None
        assert self._reaper is not None
        code = self._process.wait()
        if self._ends:
            self._reaper.reap()
        else:
            self._reaper.dismiss()
        return code if code >= 0 else 128 - code


class _Reaper:
    """A process that ends what the command has started, should this one be killed. Where there is no /proc: none."""

    def __init__(self, mark: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if sys.platform == "linux" and sys.executable:
            line = [sys.executable, "-I", "-S", reaper.__file__, mark]
            null = subprocess.DEVNULL
            self._process = subprocess.Popen(
                line, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True, cwd="/"
            )

    def reap(self) -> None:
        """As if this process had been killed. Returns when nothing is left, or nothing more can be ended."""
        self._tell(None)

    def dismiss(self) -> None:
        """The command has ended by itself: what it has put into the background stays."""
        self._tell(b".")

    def _tell(self, word: bytes | None) -> None:
        if self._process is not None:
            try:
                self._process.communicate(word, timeout=2 * reaper.LONGEST_S)
            except BrokenPipeError:
                pass  # somebody has killed it
            except subprocess.TimeoutExpired:  # or stopped it
                self._process.kill()
                self._process.wait()


def _run(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start it so that it ends when this process does, whatever ends that: else it would go on outside of its hold.
    Returns when it runs. Raises OSError if it can't."""
    if sys.platform != "linux" or not sys.executable:
        return subprocess.Popen(command, env=environment)
    told, tell = os.pipe()
    with open(told, "rb") as answer:  # noqa: PTH123 - a descriptor
        try:
            tethered = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), str(tell), *command]
            process = subprocess.Popen(tethered, env=environment, pass_fds=(tell,))
        finally:
            os.close(tell)
        fault = answer.read()
    if fault:
        process.wait()
        raise OSError(int(fault), os.strerror(int(fault)))
    return process


def _sent_by_terminal(number: int) -> bool:
    """True if the terminal's keys sent this signal: then the command, in the same foreground, got it as well."""
    if number not in {signal.SIGINT, signal.SIGQUIT}:
        return False
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


@click.command(
    cls=_WithCommand,
    epilog="""\b
Examples:
  timeslice hold trainers --job run-a -- python train.py
  timeslice hold trainers samplers --job run-a --timeout 600 -- ./sync-weights
  timeslice hold samplers --mode discard --tag kv_cache -- python sample.py
  timeslice hold licences --lock-only -- make
\b
COMMAND finds TIMESLICE_JOB, TIMESLICE_GROUPS (GROUP,...), TIMESLICE_FENCING_TOKENS (GROUP=TOKEN,...)
and, with one group, TIMESLICE_FENCING_TOKEN in its environment; with --mode, --tag or --slot also
TIMESLICE_LEAVE, which its workloads follow. The exit code is COMMAND's own,
128 + N if signal N ended it, 126 if it is not executable, 127 if it was not found,
4 if the groups were not granted in time.""",
)
@click.argument("groups", nargs=-1, required=True, metavar="GROUP...")
@click.option("--job", metavar="JOB", help="Default: TIMESLICE_JOB, else node and process id.")
@click.option("--timeout", type=Seconds(0), metavar="SECONDS", help="Give up waiting after this. Default: never.")
@click.option(
    "--priority", type=click.IntRange(-100, 100), default=0, show_default=True, help="Higher goes first (-100 to 100)."
)
@click.option("--phase", metavar="NAME", help="What the job does meanwhile, for people who look.")
@click.option(
    "--lease",
    type=Seconds(1, 86_400),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long GROUP stays ours when this process can't renew it.",
)
@click.option("--lock-only", is_flag=True, help="A plain lock: no agent, nothing is swapped.")
@click.option("--mode", type=click.Choice(["offload", "discard"]), help="Keep what leaves the device, or drop it.")
@click.option("--tag", "tags", multiple=True, metavar="NAME", help="A part that leaves. May be repeated. Default: all.")
@click.option("--slot", default="", metavar="NAME", help="The one instance of these parts that leaves.")
@click.option("--kill-on-lost", is_flag=True, help="Send COMMAND SIGTERM when a lease is lost. Default: only warn.")
@click.pass_context
def hold(
    ctx: click.Context,
    groups: tuple[str, ...],
    job: str | None,
    timeout: float | None,
    priority: int,
    phase: str | None,
    lease: float,
    lock_only: bool,
    mode: Mode | None,
    tags: tuple[str, ...],
    slot: str,
    kill_on_lost: bool,
) -> None:
    """Run COMMAND while holding GROUP, or several groups at once.

    Signals are passed on to COMMAND. The groups are given up when it ends.
    With --mode, --tag and --slot only a part of the job's state leaves the device when another job gets the group, if
    its workload can tell its parts apart.
    """
    command: list[str] = ctx.meta.get(_COMMAND, [])
    if not command:
        raise click.UsageError("say what to run, behind --, for example: timeslice hold trainers -- python train.py")
    if shutil.which(command[0]) is None:
        there = os.path.lexists(command[0]) if os.sep in command[0] else shutil.which(command[0], mode=os.F_OK)
        problem, code = ("not executable", NOT_RUNNABLE) if there else ("no such command", NOT_FOUND)
        note(f"error: {command[0]}: {problem}; nothing was run and nothing is held")
        ctx.exit(code)
    session: Session = ctx.obj
    child = _Child()

    def on_lost(lost: BaseLease) -> None:
        act = "it is being terminated" if kill_on_lost else "it goes on, without the right to the devices"
        note(f"warning: job {lost.job} lost {lost.group} while {command[0]} runs; {act}")
        if kill_on_lost:
            child.terminate()

    child.listen()
    with Client(session.given_url, job, session.prefix) as client:
        client.lock_only_words = "--lock-only"
        client.tell = lambda _level, line: note(line)  # a shell that is silent for minutes looks as if it hung
        held = client.hold(
            *groups,
            timeout=timeout,
            priority=priority,
            phase=phase,
            lock_only=lock_only,
            lease=lease,
            on_lost=on_lost,
            gang=False,  # the command's processes hold nothing by themselves
            mode=mode,
            tags=tags,
            slot=slot,
        )
        with held as got:
            leases = got if isinstance(got, tuple) else (got,)
            for each in leases:
                each.ensure_held()
            try:
                leave = find_leave(mode, tags, slot)
                pid = child.start(command, _environment(client, leases, leave))
            except OSError as error:
                note(f"error: {command[0]}: {error.strerror}; nothing was run")
                ctx.exit(NOT_RUNNABLE)
            try:
                _register(client, leases, pid)
            except BaseException as error:
                if isinstance(error, TimeSliceError):
                    note(f"error: {command[0]} is ended: the agents of this node could not be told of it")
                child.end()  # before anybody else is let in
                raise
            code = child.wait()
            if code:
                ctx.exit(code)  # as an error of the hold's body: a command that failed has brought no weights


def _environment(client: Client, leases: Sequence[BaseLease], leave: Leave) -> dict[str, str]:
    """What the command finds: the same server as ours, the tokens, and what of its state is to leave."""
    tokens = {lease.group: str(lease.fencing_token) for lease in leases}
    environment = {
        **os.environ,
        "TIMESLICE_URL": client.url,
        "TIMESLICE_PREFIX": client.keys.prefix,
        "TIMESLICE_JOB": client.job,
        "TIMESLICE_GROUPS": ",".join(tokens),
        "TIMESLICE_FENCING_TOKENS": ",".join(f"{group}={token}" for group, token in tokens.items()),
    }
    environment.pop("TIMESLICE_FENCING_TOKEN", None)
    environment.pop(LEAVE_VARIABLE, None)
    if leave != Leave():
        environment[LEAVE_VARIABLE] = leaves_written(dict.fromkeys(tokens, leave))
    if len(tokens) == 1:
        environment["TIMESLICE_FENCING_TOKEN"] = next(iter(tokens.values()))
    return environment


def _register(client: Client, leases: Sequence[BaseLease], pid: int) -> None:
    """Tell the agents of this node about the command: what has to be suspended is its state, not ours. A server
    that does not answer is told later. TimeSliceError when it refuses."""
    for lease in leases:
        if lease.lock_only or client.disabled:
            continue
        ours = this_target(lease.group, lease.job, client.host)
        target = ours.model_copy(update={"pid": pid, "start": process_start(pid)})
        floor = client.floors.get(lease.group, 0)
        call = registration(client.group_keys(lease.group), lease.job, target.host, floor, target)
        try:
            client.driver.run(call)
        except RedisUnreachableError as error:
            what = f"group {lease.group}: registration of process {pid} of job {lease.job}"
            note(f"warning: {what}: trying on: {error}")
            client.renewer.later(call, what)
