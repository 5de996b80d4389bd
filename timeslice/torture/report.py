"""What came of a run: for people, and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from timeslice.errors import UsageError
from timeslice.torture.checker import Report, Terms, check
from timeslice.torture.history import Born, Ended, Fault, Line, Told, Took, TornLineError, files_of, read
from timeslice.torture.stage import LEASES_S

HISTORY, FACTS = "history.jsonl", "run.json"
TERMS = Terms(lease_s=max(LEASES_S))
_SHOWN = 20


class Judged(NamedTuple):
    """A history, and what the checker says of it. ``complete``: nothing is missing at its end."""

    lines: list[Line]
    report: Report
    complete: bool


def merge(folder: Path) -> Path:
    """All parts as one file, by time; each process's own order is kept. The parts are removed.

    A line that a killed process left torn is dropped: what it was about is unknown anyway.
    """
    found: list[tuple[int, Line]] = []
    parts = sorted((folder / "parts").glob("*.jsonl"))
    for part in parts:
        latest = 0  # two threads of a process may write out of order by a hair
        for line in _whole_lines(part):
            if line is None:
                break
            latest = max(latest, line.at)
            found.append((latest, line))
    found.sort(key=lambda item: item[0])
    whole = folder / HISTORY
    whole.write_text("".join(f"{line.model_dump_json()}\n" for _, line in found))
    for part in parts:
        part.unlink()
    (folder / "parts").rmdir()
    return whole


def _whole_lines(file: Path) -> Iterator[Line | None]:
    """The lines of a file; None last if it ends in the middle of one."""
    try:
        yield from read(file)
    except TornLineError:
        yield None


def judge(place: Path) -> Judged:
    """Read a history, a file or the folder of one, and check it. UsageError if it is none.

    One that lacks its end is judged as far as it goes. Only a run that was interrupted at once has an empty one.
    """
    path = place / HISTORY if (place / HISTORY).is_file() else place
    try:
        found = [line for file in files_of(path) for line in _whole_lines(file)]
    except (OSError, ValueError) as error:
        raise UsageError(f"{place} can't be judged: {error}") from error
    lines = [line for line in found if line is not None]
    if not lines and not facts_of(place):
        raise UsageError(f"{place} has no history of a torture run in it; name a {HISTORY} or its folder")
    complete = len(lines) == len(found) and any(isinstance(line, Ended) for line in lines)
    return Judged(lines, check(lines, TERMS), complete)


def facts_of(place: Path) -> dict[str, Any]:
    """What is known of a saved run beside its history: seed, seconds, topology, samples. UsageError if it is none."""
    path = (place if place.is_dir() else place.parent) / FACTS
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} is no JSON ({error}); move it away to judge the history alone") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} does not describe a torture run; move it away to judge the history alone")
    return found


def document(judged: Judged, facts: Mapping[str, Any], history: Path | None) -> dict[str, Any]:
    """The report as JSON has it."""
    lines, report, complete = judged
    roles = {line.label: line.role for line in lines if isinstance(line, Born)}
    start = lines[0].at if lines else 0
    p95 = report.recovery_p95_s
    kinds = _by_kind(lines, roles)
    facts = dict(facts)
    planned = facts.pop("planned", None)
    if planned is not None:
        facts["kinds_not_injected"] = sorted(set(planned) - set(kinds) - set(facts.get("kinds_left_out", {})))
    return {
        "device": "emulated",
        **facts,
        "complete": complete,
        "faults": report.faults,
        "faults_by_kind": kinds,
        "grants": report.grants,
        "swaps": report.swaps,
        "bytes_moved": sum(
            int(line.fields.get("bytes") or 0)
            for line in lines
            if isinstance(line, Told) and line.type in {"JobSuspended", "JobRestored"}
        ),
        "processes": dict(sorted(Counter(roles.values()).items())),
        "recovery_p95_s": None if p95 is None else round(p95, 3),
        "violations": [
            {"rule": each.rule, "at_s": round((each.at - start) / 1e9, 3), "group": each.group, "message": each.message}
            for each in report.violations
        ],
        "history": None if history is None else str(history),
    }


def _by_kind(lines: Sequence[Line], roles: Mapping[str, str]) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    took = {line.id for line in lines if isinstance(line, Took)}
    for line in lines:
        if isinstance(line, Fault) and line.id in took:
            process = line.harm in {"kill", "stop"} and line.label in roles
            kinds[line.planned or (f"{line.harm}-{roles[line.label]}" if process else line.harm)] += 1
    return dict(sorted(kinds.items()))


def table(told: Mapping[str, Any]) -> Table:
    """The report for people."""
    found = Table(title="torture (emulated device)", show_header=False, title_justify="left")
    kinds = ", ".join(f"{kind} {count}" for kind, count in told["faults_by_kind"].items())
    p95 = told["recovery_p95_s"]
    rows = [
        *((name, str(told[name])) for name in ("topology", "seed", "seconds") if name in told),
        *([("interrupted", "yes: what follows is of the time until then")] if told.get("interrupted") else []),
        *([] if told["complete"] else [("incomplete", "the end of the history is missing, and was not judged")]),
        ("faults", f"{told['faults']} ({kinds})" if kinds else "0"),
        *_kinds_missing(told),
        ("grants", str(told["grants"])),
        ("swaps", f"{told['swaps']}, {told['bytes_moved'] / (1 << 20):.0f} MiB moved"),
        ("recovery p95", "nobody waited" if p95 is None else f"{p95:.2f} s"),
        *((f"{name}, first/last/highest quarter", _values(name, each)) for name, each in told.get("grown", {}).items()),
        ("violations", str(len(told["violations"]))),
    ]
    for name, value in rows:
        found.add_row(name, value)
    return found


def _kinds_missing(told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Which kinds a run can't speak of, as nothing of them came about."""
    if "kinds_not_injected" in told:
        yield "kinds not injected", ", ".join(told["kinds_not_injected"]) or "none: all came about"
    for why in sorted(set(told.get("kinds_left_out", {}).values())):
        yield f"left out: {', '.join(k for k, w in sorted(told['kinds_left_out'].items()) if w == why)}", why


def _values(name: str, means: Mapping[str, float]) -> str:
    scale, unit = (1 << 20, " MiB") if name.endswith("_bytes") else (1, "")
    return " / ".join(f"{means[part] / scale:.0f}{unit}" for part in ("first", "last", "highest"))


def complaints(told: Mapping[str, Any]) -> list[str]:
    """One line a violation, earliest first; those beyond a screenful are only counted."""
    every = [
        f"violation of {each['rule']!r} at {each['at_s']:.3f} s{' in ' * bool(each['group'])}{each['group']}: "
        f"{each['message']}"
        for each in told["violations"]
    ]
    more = len(every) - _SHOWN
    return every if more <= 0 else [*every[:_SHOWN], f"... and {more} more; see --json"]
