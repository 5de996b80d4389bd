"""What was observed, for people and for programs."""

from __future__ import annotations

from typing import Any

from timeslice.observe.series import Loop

WORTH = 0.1  # of the time; less idle than this is not worth a swap


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"


def advice(loop: Loop) -> list[str]:
    """What to do with it, one sentence each."""
    if not loop.stretches and loop.ignored:
        return [
            f"it was active {loop.ignored} times, for about {seconds(loop.ignored_s)} each, which was taken for noise",
            f"observe with --gap {max(loop.ignored_s / 2, 0.1):.1f} to count that; holds pay where swaps are shorter",
        ]
    if not loop.stretches:
        return [
            f"nothing was active in {seconds(loop.seconds)}: observe for longer (--seconds), or look at another process"
        ]
    if loop.idle_share < WORTH:
        return [
            "it was active nearly all of the time: there is little to give away between holds",
            "lease.yield_point() in the body of a hold lets others in where you choose",
        ]
    if loop.period_s is None:
        return [
            f"active stretches of about {seconds(loop.active_s)}: wrap these in timeslice.hold(...)",
            "too few turns of the loop were seen to tell its period: observe five or more (--seconds)",
        ]
    every = seconds(loop.period_s)
    if len(loop.turn) > 1:
        lengths = ", ".join(map(seconds, loop.turn))
        return [
            f"each turn of {every} has {len(loop.turn)} active stretches, of about {lengths}",
            "wrap each of them in a timeslice.hold(...) of its own",
            f"the {loop.idle_share:.0%} of the time between them can be others'",
        ]
    when = f"every {every}" if loop.regular else f"about every {every}, with large differences"
    return [
        f"active stretches of about {seconds(loop.active_s)} {when}: wrap these in timeslice.hold(...)",
        f"the {loop.idle_share:.0%} of the time between them can be others'",
    ]


def document(loop: Loop) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "observed_s": round(loop.seconds, 3),
        "period_s": None if loop.period_s is None else round(loop.period_s, 3),
        "regular": loop.regular,
        "active_s": round(loop.active_s, 3),
        "turn_s": [round(each, 3) for each in loop.turn],
        "idle_share": round(loop.idle_share, 4),
        "device_bytes": loop.most_bytes,
        "idle_device_bytes": loop.least_bytes,
        "ignored": loop.ignored,
        "stretches": [{"start_s": round(s.start_s, 3), "end_s": round(s.end_s, 3)} for s in loop.stretches],
        "advice": advice(loop),
    }
