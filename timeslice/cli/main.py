"""The command ``timeslice``. Commands load when they are called, so that ``--help`` and completion stay fast."""

from __future__ import annotations

import difflib
import errno
from importlib import import_module

import click

from timeslice.cli.exits import FAILED, INTERRUPTED, exit_code
from timeslice.cli.session import Session
from timeslice.errors import TimeSliceError, printable

# name -> (module, first sentence of its help). The command object is called as the command itself.
COMMANDS = {
    "up": ("timeslice.cli.up", "Run server, coordinator and agent on this machine, until Ctrl-C."),
    "demo": ("timeslice.demo.command", "Run two RL jobs alone and then by turns on the same devices, and compare."),
    "torture": ("timeslice.cli.torture", "Attack a whole system with faults, and prove that its promises held."),
    "coordinator": ("timeslice.cli.daemons", "Run a coordinator, which drives the swaps of the groups it owns."),
    "agent": ("timeslice.cli.daemons", "Run the node agent beside this node's accelerators."),
    "gateway": ("timeslice.cli.gateway", "Run a gateway, which answers the gRPC clients of llm-d's time-slicing."),
    "groups": ("timeslice.cli.groups", "List the groups."),
    "group": ("timeslice.cli.groups", "Create, change, show or delete a group."),
    "status": ("timeslice.cli.status", "Show who holds what, since when, and what is being moved."),
    "queue": ("timeslice.cli.status", "Show who waits for GROUP, in service order, and why each waits."),
    "events": ("timeslice.cli.events", "Show what happened in GROUP, or in all groups, oldest first."),
    "nodes": ("timeslice.cli.nodes", "List the nodes, the groups they serve and how their agents are."),
    "node": ("timeslice.cli.nodes", "Drain a node for maintenance, or forget one that will not come back."),
    "jobs": ("timeslice.cli.jobs", "List the jobs, what they hold and wait for, and where their device state is."),
    "ready": ("timeslice.cli.ready", "Say whether JOB may be sent requests: it holds, and its state is on the device."),
    "hold": ("timeslice.cli.hold", "Run COMMAND while holding GROUP, or several groups at once."),
    "observe": ("timeslice.cli.observe", "Watch a running program, and say when it uses the device."),
    "yield": ("timeslice.cli.operator", "Give GROUP up for JOB, which holds it."),
    "cancel": ("timeslice.cli.operator", "Take a waiting request out of the queue of GROUP."),
    "pause": ("timeslice.cli.operator", "Stop granting GROUP."),
    "resume": ("timeslice.cli.operator", "Go on granting GROUP."),
    "acl": ("timeslice.cli.acl", "Print the Redis users that timeslice needs, with the least rights for each role."),
    "revoke": ("timeslice.cli.revoke", "Take GROUP away from its holder, by force if need be."),
    "evict": ("timeslice.cli.evict", "Move the device state of JOB to host memory, where it does not hold."),
    "repair": ("timeslice.cli.repair", "Put right what keeps GROUP from going on, and say what else is in its way."),
    "doctor": ("timeslice.cli.doctor", "Look for what is wrong, and say what to do about it."),
}

_GLOBAL = {"--url": "URL", "--prefix": "TEXT"}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Commands(click.Group):
    """Loads a command when it is needed, and turns our errors into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's interface
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - as above
        if cmd_name not in COMMANDS:
            return None
        module = import_module(COMMANDS[cmd_name][0])
        command = getattr(module, "yield_" if cmd_name == "yield" else cmd_name)
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            place = f"Options of a command stand behind it: timeslice COMMAND {error.option_name} ..."
            raise click.UsageError(f"{error.format_message()} {place}", ctx) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        near = [] if name in COMMANDS or ctx.resilient_parsing else difflib.get_close_matches(name, COMMANDS, n=3)
        if near:
            raise click.UsageError(f"No such command '{name}'. Did you mean {' or '.join(near)}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - as above
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            ctx.exit(INTERRUPTED)
        except click.NoSuchOption as error:
            if error.option_name not in _GLOBAL or error.ctx is None:
                raise
            command = error.ctx.command_path.partition(" ")[2]
            place = f"timeslice {error.option_name} {_GLOBAL[error.option_name]} {command} ..."
            raise click.UsageError(f"{error.format_message()} Put it before the command: {place}", error.ctx) from error
        except TimeSliceError as error:
            click.echo(f"error: {printable(str(error))}", err=True)
            ctx.exit(exit_code(error))
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            click.echo(f"error: {error.filename or 'the output'} can't be written: {error.strerror}", err=True)
            ctx.exit(FAILED)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  timeslice up                                   # all of it on this machine
  timeslice status                               # who holds what
  timeslice hold trainers --job a -- python train.py
\b
Exit codes: 0 done, 1 failed, 2 usage, 3 unknown group, job or node, 4 timed out,
5 Redis unreachable, 6 refused, 130 interrupted. `timeslice hold -- CMD` returns what CMD returned.""",
)
@click.option("--url", metavar="URL", help="Redis server. Default: TIMESLICE_URL, else what `timeslice up` left.")
@click.option("--prefix", metavar="TEXT", help="Start of every Redis key. Default: TIMESLICE_PREFIX, else ts.")
@click.version_option(package_name="timeslice-rl", prog_name="timeslice")
@click.pass_context
def main(ctx: click.Context, url: str | None, prefix: str | None) -> None:
    """Independent RL jobs take turns on the same accelerators.

    Messages go to stderr. With --json a command prints its result, and only that, to stdout as JSON.
    """
    ctx.obj = ctx.with_resource(Session(url, prefix))
