"""Command ``acl``: the users that a shared Redis server needs, with the least rights for each role."""

from __future__ import annotations

import hashlib
from pathlib import Path

import click

from timeslice.cli.output import json_option, note, print_json
from timeslice.cli.session import Session

ROLES = ("client", "agent", "coordinator", "viewer", "operator")
PLACEHOLDER = "CHANGE-ME"


@click.command(
    epilog="""\b
Examples:
  timeslice acl                                            # one user a role, for all groups
  timeslice acl --role client --group trainers --password-file client.pw
  timeslice acl --role agent --node node-1 --node node-2   # a user for each agent"""
)
@click.option("--role", "roles", type=click.Choice(ROLES), multiple=True, help="Repeatable. Default: all roles.")
@click.option("--group", "groups", multiple=True, metavar="GROUP", help="Only these groups; repeatable. Default: all.")
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="NODE",
    help="A user for the agent of this node alone; repeatable. Default: one for all.",
)
@click.option(
    "--password-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"Its first line is the user's password, printed as a hash. Without it put yours for {PLACEHOLDER}.",
)
@json_option
@click.pass_obj
def acl(
    session: Session,
    roles: tuple[str, ...],
    groups: tuple[str, ...],
    nodes: tuple[str, ...],
    password_file: Path | None,
    as_json: bool,
) -> None:
    """Print the Redis users that timeslice needs, with the least rights for each role.

    Nothing is sent to a server. What these rights can't keep apart is said in docs/threat-model.md.
    """
    from timeslice.locks.permissions import quoted, user_rules
    from timeslice.names import check_name

    for name in groups:
        check_name("group", name)
    for name in nodes:
        check_name("node", name)
    if nodes and "agent" not in (roles or ROLES):
        note(f"--node {', '.join(nodes)} was not used: only users of agents are for one node")
    users = []
    for role in roles or ROLES:
        for at in [(name,) for name in nodes] if role == "agent" and nodes else [()]:
            name = "-".join(["timeslice", role, *at, *(["+".join(groups)] if groups and not at else [])])
            users.append((name, role, user_rules(role, session.keys, groups, at)))
    secret = f">{PLACEHOLDER}"
    if password_file:
        if len(users) != 1:
            raise click.UsageError(f"--password-file is for one user, and these are {len(users)}; name one --role")
        secret = _hashed(password_file)
    lines = [f"ACL SETUSER {name} reset on {secret} {' '.join(map(quoted, rules))}" for name, _, rules in users]
    if as_json:
        documents = [
            {"user": name, "role": role, "rules": rules, "line": line}
            for (name, role, rules), line in zip(users, lines, strict=True)
        ]
        print_json({"users": documents})
        return
    for line in lines:
        click.echo(line)
    if not password_file:
        note(f"put a password of its own for each {PLACEHOLDER}, then:")
    note("- on a running server: paste the lines into redis-cli (then ACL SAVE, if it has an aclfile)")
    note("- or in the aclfile: write `user` for `ACL SETUSER` in each line, and restart the server or ACL LOAD")
    note("- in a cluster on every server; then switch the default user off: ACL SETUSER default off")
    note("processes find user and password, as they are, in TIMESLICE_USERNAME and TIMESLICE_PASSWORD;")
    note("or percent-encoded (@ is %40, / is %2F) in TIMESLICE_URL=redis://USER:PASSWORD@HOST:PORT")


def _hashed(path: Path) -> str:
    """What stands for the password: Redis takes its SHA-256."""
    try:
        password = path.read_bytes().split(b"\n", 1)[0].decode().rstrip("\r")
    except UnicodeDecodeError:
        raise click.UsageError(f"the first line of {path} has bytes that are no UTF-8: save it as UTF-8") from None
    if not password:
        raise click.UsageError(f"the first line of {path} is empty: a user without a password is open to everybody")
    return "#" + hashlib.sha256(password.encode()).hexdigest()
