"""What `timeslice hold` says while it waits."""

from __future__ import annotations

from tests.cli.conftest import Cli, World


def test_who_waits_for_long_reads_why(cli: Cli, world: World) -> None:
    """A shell that is silent for minutes looks as if it hung. Told on stderr: stdout is the command's."""
    world.hold_lock_only("licences", "a")
    waiting = cli.start("hold", "other", "licences", "--lock-only", "--job", "b", "--", "echo", "inside")
    assert waiting.stderr is not None
    line = waiting.stderr.readline()
    assert line.startswith("job b waits for licences: job a holds it for ")
    assert line.endswith(" now. More: timeslice queue licences\n")
    assert cli("yield", "licences", "--job", "a").exit_code == 0
    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out, err) == (0, "inside\n", "")
