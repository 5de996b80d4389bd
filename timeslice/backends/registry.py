"""Finds backends by the entry-point group ``timeslice.backends``, so that other distributions can add theirs."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from timeslice.backends.base import Backend, Context
from timeslice.errors import BackendError, FaultKind

ENTRY_POINTS = "timeslice.backends"


def names() -> list[str]:
    """Names of all installed backends, sorted. Nothing is imported for it."""
    return sorted({entry.name for entry in entry_points(group=ENTRY_POINTS)})


def get_backend(name: str, context: Context) -> Backend:
    """A backend for one group of one agent. BackendError(unsupported) when it can't be had here, with the reason."""
    try:
        made = _find(name, context).load()
    except BackendError:
        raise
    except Exception as error:  # whatever a foreign module raises while it loads
        raise _unsupported(
            context, f"backend {name!r} can't be loaded ({type(error).__name__}: {error}); reinstall what provides it"
        ) from error
    if not (isinstance(made, type) and issubclass(made, Backend)):
        raise _unsupported(context, f"backend {name!r} is {made!r}, no class of timeslice.backends.base.Backend")
    if made.options is not None and (unknown := sorted(context.options.keys() - made.options)):
        able = ", ".join(sorted(made.options)) or "none"
        raise _unsupported(context, f"backend {name} has no option {', '.join(unknown)}; its options: {able}")
    return made(context)


def _find(name: str, context: Context) -> EntryPoint:
    # An editable install beside a built one shows the same entry twice; that is no conflict.
    found = {entry.value: entry for entry in entry_points(group=ENTRY_POINTS, name=name)}
    if not found:
        raise _unsupported(context, f"no backend {name!r}; installed are: {', '.join(names()) or 'none'}")
    if len(found) > 1:
        raise _unsupported(context, f"backend {name!r} is provided twice ({', '.join(sorted(found))}); uninstall one")
    return next(iter(found.values()))


def _unsupported(context: Context, message: str) -> BackendError:
    return BackendError(
        f"group {context.group}, node {context.node}: {message}",
        kind=FaultKind.UNSUPPORTED,
        group=context.group,
        node=context.node,
    )
