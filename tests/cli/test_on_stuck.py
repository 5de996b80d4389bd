"""The setting for jobs that must leave and that nothing can move."""

from __future__ import annotations

from tests.cli.conftest import Cli, World


def test_a_group_blocks_until_somebody_chooses_otherwise(cli: Cli, world: World) -> None:
    """L28: `group set --on-stuck kill` is kept and shown, and can be taken back; another word is refused."""
    world.serve("trainers")
    assert cli.json("group", "show", "trainers")["config"]["on_stuck"] == "block"
    assert cli("group", "set", "trainers", "--on-stuck", "kill").exit_code == 0
    assert cli.json("group", "show", "trainers")["config"]["on_stuck"] == "kill"
    assert "on stuck" in cli("group", "show", "trainers").stdout
    assert cli("group", "set", "trainers", "--on-stuck", "shoot").exit_code == 2
    assert cli("group", "set", "trainers", "--on-stuck", "block").exit_code == 0
    assert world.driver.view(world.keys.group("trainers")).config.on_stuck == "block"


def test_a_word_that_nobody_knows_kills_nobody(cli: Cli, world: World) -> None:
    """Written past the command it is an error that names the setting."""
    world.serve("trainers")
    world.driver.client.hset(world.keys.group("trainers").config, "on_stuck", "maybe")
    shown = cli("group", "show", "trainers")
    assert shown.exit_code == 2
    assert "on_stuck" in shown.stderr
