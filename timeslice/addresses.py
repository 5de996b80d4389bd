"""Where the servers are: the forms of a Redis URL, what each part means, and how to name it without its secrets.

::

    redis://[user:password@]host[:port][/db][?option=value&...]       rediss:// with TLS
    unix://[user:password@]/path/of/socket[?db=0]
    redis+sentinel://[user:password@]host[:port],host[:port]/master   rediss+sentinel:// with TLS
    redis+cluster://[user:password@]host[:port],host[:port]           rediss+cluster:// with TLS
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field, replace
from typing import Literal
from urllib.parse import quote, unquote

from timeslice.errors import UsageError

Kind = Literal["standalone", "sentinel", "cluster"]

_DEFAULT_PORTS: dict[Kind, int] = {"standalone": 6379, "sentinel": 26379, "cluster": 6379}
_TLS_OPTIONS = frozenset(
    {
        *("ssl_ca_certs", "ssl_ca_path", "ssl_ca_data", "ssl_certfile", "ssl_keyfile", "ssl_password"),
        *("ssl_cert_reqs", "ssl_check_hostname", "ssl_ciphers"),
    }
)
_SENTINEL_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})
# What a URL made for redis-py may carry, and what timeslice sets itself.
OVERRIDDEN = frozenset(
    {
        *("decode_responses", "protocol", "socket_connect_timeout", "socket_timeout", "retry_on_timeout"),
        *("health_check_interval", "single_connection_client"),
    }
)
_OPTIONS = frozenset({"db", "username", "password", "client_name", "max_connections", "socket_keepalive"})
_SCHEME = re.compile(r"(?:(rediss?)(?:\+(sentinel|cluster))?|unix)://", re.IGNORECASE)
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_FORMS = (
    "use redis://host:port, rediss://host:port (TLS), unix:///path, redis+sentinel://host,host/master "
    "or redis+cluster://host,host"
)
_ENCODE = (
    "Percent-encode user name and password (@ is %40, / is %2F, : is %3A, ? is %3F, # is %23, % is %25, a space is "
    "%20), or leave them out of the URL and set TIMESLICE_USERNAME and TIMESLICE_PASSWORD"
)


@dataclass(frozen=True)
class Address:
    """A URL taken apart; what was percent-encoded is plain here. ``socket`` is empty but for ``unix://``."""

    kind: Kind
    tls: bool = False
    hosts: tuple[tuple[str, int], ...] = ()
    socket: str = ""
    master: str = ""
    db: int | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def url(self) -> str:
        """The whole address, secrets included."""
        user = ""
        if self.username is not None or self.password is not None:
            secret = "" if self.password is None else ":" + quote(self.password, safe="")
            user = quote(self.username or "", safe="") + secret + "@"
        in_path = self.kind == "standalone" and not self.socket
        place = f"/{self.db}" if in_path and self.db is not None else ""
        options = self.options if in_path or self.db is None else (("db", str(self.db)), *self.options)
        query = "&".join(f"{name}={quote(value, safe='/')}" for name, value in options)
        return self._base(user) + place + ("?" + query if query else "")

    @property
    def shown(self) -> str:
        """The address for messages: ``***`` for a password, no options."""
        user = quote(self.username or "", safe="") + ("" if self.password is None else ":***")
        return self._base(f"{user}@" if user else "")

    def _base(self, user: str) -> str:
        if self.socket:
            return f"unix://{user}{quote(self.socket)}"
        scheme = ("rediss" if self.tls else "redis") + ("" if self.kind == "standalone" else f"+{self.kind}")
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{scheme}://{user}{hosts}" + (f"/{quote(self.master, safe='')}" if self.master else "")


def parse_url(text: str) -> Address:
    """Take apart a URL, or ``host``, ``host:port``, ``[ipv6]:port``, a socket's path. UsageError says what is wrong.

    It never guesses: a password with characters of the URL's own syntax is refused, for its rest would be taken for
    the host.
    """
    text = _written(text.strip(), "the Redis URL")
    if text.startswith("/"):
        return Address("standalone", socket=text)
    url = text if "://" in text else f"redis://{text}"
    scheme = _SCHEME.match(url)
    if scheme is None:
        raise UsageError(f"{redact_url(url)!r} is no Redis URL: {_FORMS}")
    unix, kind = scheme[1] is None, _kind(scheme[2])
    authority, tail = _split(url[scheme.end() :], unix=unix)
    user, at, hosts = authority.rpartition("@")
    path, mark, query = tail.partition("?")
    username, password = _credentials(user) if at else (None, None)
    options = _options(query if mark else "")
    address = Address(
        kind,
        tls=(scheme[1] or "").lower() == "rediss",
        hosts=() if unix else _hosts(url, hosts, kind),
        socket=unquote(path) if unix else "",
        db=_number("db", options.pop("db")) if "db" in options else None,
        username=options.pop("username", username),
        password=options.pop("password", password),
        options=tuple(options.items()),
    )
    if unix:
        if hosts or not path.strip("/"):
            raise UsageError(f"{redact_url(text)!r} names no socket: use unix:///path/to/redis.sock")
        return _checked(address)
    return _checked(_placed(address, unquote(path.strip("/"))))


def _written(text: str, what: str) -> str:
    """The text, if it is one: what the environment or a command line holds may be any bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        # It may be a password, so it is not shown.
        raise UsageError(f"{what} has bytes that are no UTF-8: write it in UTF-8") from None
    return text


def _kind(word: str | None) -> Kind:
    match (word or "").lower():
        case "sentinel":
            return "sentinel"
        case "cluster":
            return "cluster"
    return "standalone"


def _split(rest: str, *, unix: bool) -> tuple[str, str]:
    """Authority and tail. UsageError where a character of a password could have been taken for the end of it."""
    end = re.search(r"[/?#]", rest)
    authority, tail = (rest[: end.start()], rest[end.start() :]) if end else (rest, "")
    user, _, _ = authority.rpartition("@")
    suspicious = "@" in user or "#" in tail or re.search(r"\s", user) or _STRAY_PERCENT.search(user)
    # A socket's path may have an @ in it, if nothing can stand before it.
    if suspicious or "@" in (tail.partition("?")[2] if unix and not authority else tail):
        # Not shown, not even in part: which part is the password is what can't be told.
        raise UsageError(f"the user name or password in the Redis URL can't be told from the rest of it. {_ENCODE}")
    return authority, tail


def _credentials(user: str) -> tuple[str | None, str | None]:
    name, colon, secret = user.partition(":")
    return unquote(name) or None, unquote(secret) if colon else None


def _hosts(url: str, text: str, kind: Kind) -> tuple[tuple[str, int], ...]:
    names = text.split(",") if kind != "standalone" else [text]
    found = []
    for name in names:
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[\w.-]*)(?::(.*))?", name, re.DOTALL)
        port = (match[2] if match else "") or str(_DEFAULT_PORTS[kind])
        if match is None or not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
            hint = "; several hosts need redis+sentinel:// or redis+cluster://" if "," in text else ""
            # What stands there is not shown: it may be a piece of a password.
            raise UsageError(
                f"{redact_url(url)!r} has no usable port: give host:port with a port from 1 to 65535{hint}. "
                f"If that is part of a password: {_ENCODE}"
            )
        if not match[1]:
            raise UsageError(f"{redact_url(url)!r} names no host: use redis://host:port")
        found.append((match[1].strip("[]"), int(port)))
    return tuple(found)


def _options(query: str) -> dict[str, str]:
    found = {}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        if name not in _OPTIONS | _TLS_OPTIONS | _SENTINEL_OPTIONS | OVERRIDDEN:
            # The name is not shown: it may be what follows an & in a password.
            known = ", ".join(sorted(_OPTIONS | _TLS_OPTIONS | _SENTINEL_OPTIONS))
            raise UsageError(f"the Redis URL has an option that is unknown. Known are: {known}. {_ENCODE}")
        found[name] = unquote(value)
    return found


def _number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise UsageError(f"the option {name} of the Redis URL must be a number; got {value!r}")
    return int(value)


def _placed(address: Address, path: str) -> Address:
    """What the path means depends on the kind."""
    if address.kind == "sentinel":
        if not path or "/" in path:
            example = Address("sentinel", address.tls, address.hosts, master="NAME").shown
            raise UsageError(f"{address.shown} must name one master that the sentinels watch: use {example}")
        return replace(address, master=path)
    if not path:
        return address
    db = _number("database", path)
    if address.db not in {None, db}:
        raise UsageError(f"{address.shown}: the path says database {db}, ?db= says {address.db}; leave one of them out")
    return replace(address, db=db)


def _checked(address: Address) -> Address:
    given = dict(address.options)
    if "max_connections" in given:
        _number("max_connections", given["max_connections"])
    if address.kind == "cluster" and address.db:
        raise UsageError(f"{address.shown}: a cluster has only database 0; leave the number out")
    if not address.tls and (wrong := sorted(_TLS_OPTIONS & set(given))):
        raise UsageError(f"{address.shown} does not use TLS, so {', '.join(wrong)} means nothing: use rediss://")
    if address.kind != "sentinel" and (wrong := sorted(_SENTINEL_OPTIONS & set(given))):
        raise UsageError(f"{address.shown} names no sentinels, so {', '.join(wrong)} means nothing")
    return address


def is_loopback(host: str) -> bool:
    """Whether a host of a URL is this machine, whatever network it is in."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def normalise_url(text: str) -> str:
    """Full URL for whatever ``parse_url`` takes."""
    return parse_url(text).url


def with_credentials(url: str, username: str | None, password: str | None) -> str:
    """The URL, completed with these if it has no password of its own."""
    address = parse_url(url)
    if address.password is not None:
        return address.url
    _written(f"{username or ''}{password or ''}", "TIMESLICE_USERNAME or TIMESLICE_PASSWORD")
    return replace(address, username=address.username or username, password=password).url


def socket_path(url: str) -> str | None:
    """Path of a ``unix://`` URL's socket, or None for a network URL."""
    return parse_url(url).socket or None


# Hosts with ports, and then the word ends: in running text an @ further on has nothing to do with them. A port of four
# or five digits, as those of Redis are: what is shorter might as well be the beginning of an odd password.
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+):[1-9][0-9]{3,4}"
_NO_USER = rf"(?!{_HOST}(?:,{_HOST})*(?:/[\w.%~-]*)?[)\]'\",;:.]*(?:\s|$))"
_IN_AUTHORITY = re.compile(rf"://{_NO_USER}([^:/@\s]*):(?!\*\*\*@).*@", re.DOTALL)
_IN_QUERY = re.compile(r"([?&]\w*password=)(?!\*\*\*(?:[&\s'\"]|$)).*?(?=&[a-z_]+=|$)", re.DOTALL)


def redact_url(url: str) -> str:
    """The text with the passwords of URLs in it replaced by ``***``, fit for logs and messages."""
    # By pattern, not by parsing: a password with an unescaped # or / must not slip through. What is hidden already is
    # passed by, so that a line which is cleaned twice loses nothing.
    found = _IN_QUERY.search(url)
    if found and "@" in url[found.start() :]:  # which of the two places that is, can't be told
        return re.sub(r"://.*", "://***", url, flags=re.DOTALL)
    return _IN_QUERY.sub(r"\1***", _IN_AUTHORITY.sub(r"://\1:***@", url))
