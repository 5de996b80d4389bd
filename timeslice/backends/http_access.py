"""Whom the ``http`` backend may ask, and with which credentials. An address in a registration is only a claim."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from timeslice.errors import quoted

_PORTS = {"http": 80, "https": 443}
_TOKEN = re.compile(r"[\x21-\x7e]+")  # what fits into a header; an error of the HTTP library would quote the rest
_ENTRY = re.compile(r"(https?)://(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+\*?)(?::(\d{1,5}|\*))?/?")
_PREFIX = re.compile(r"(?:\d{1,3}\.){1,3}")


class AccessError(Exception):
    """This address may not be asked, or not with these credentials. The text says what to set."""


@dataclass(frozen=True)
class _Entry:
    scheme: str
    host: str
    port: int | None  # None: any
    prefix: bool  # of a numeric address

    def permits(self, url: httpx.URL) -> bool:
        port = _PORTS[url.scheme] if url.port is None else url.port
        if url.scheme != self.scheme or self.port not in (None, port):
            return False
        if self.prefix:  # names are no matter of prefixes: 10.1.evil.example would match, and 10.1.2.3.4 is a name
            return _is_ipv4(url.host) and url.host.startswith(self.host)
        return _plain(url.host) == self.host


class AllowList:
    """Addresses from an option: ``http://10.1.2.3:8000;http://10.2.*:8000;http://127.0.0.1:*``, one by one with ``;``.

    A star at the end of a numeric address stands for the rest of it, one in place of the port for any port. Nothing is
    allowed by itself, this machine neither. ValueError says what is wrong with an entry.
    """

    def __init__(self, text: str) -> None:
        self._entries = tuple(_parse(each.strip()) for each in text.split(";") if each.strip())
        if not self._entries:
            raise ValueError("its option allow=URL[;URL...] is missing: the addresses of servers that it may ask")

    def check(self, address: str) -> httpx.URL:
        """The address as it may be asked. AccessError, before a byte is sent, when it may not."""
        try:
            url = httpx.URL(address)
        except httpx.InvalidURL:
            raise AccessError(f"{quoted(address)} is no address") from None
        if url.userinfo or url.query or url.fragment or url.path not in ("", "/") or url.scheme not in _PORTS:
            raise AccessError(f"{quoted(address)} has more than scheme, host and port")
        if not any(entry.permits(url) for entry in self._entries):
            raise AccessError(
                f"this agent may not ask {quoted(address)}; if it should, start it with --backend http:allow={address}"
            )
        return url


@dataclass(frozen=True)
class Token:
    """Where the bearer token is. It is read anew for each request, so that it may be changed; it is never shown."""

    variable: str = ""
    file: str = ""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Token:
        return cls(options.get("token_env", ""), options.get("token_file", ""))

    def headers(self) -> dict[str, str]:
        """AccessError when there should be one and is not."""
        if not (self.variable or self.file):
            return {}
        where = f"variable {self.variable}" if self.variable else f"file {self.file}"
        try:
            token = os.environ.get(self.variable, "") if self.variable else Path(self.file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise AccessError(f"the token's {where} can't be read: {why}") from None
        if not _TOKEN.fullmatch(token.strip()):
            raise AccessError(f"the token's {where} holds no token (one word of plain characters)")
        return {"Authorization": f"Bearer {token.strip()}"}


def plain(address: str) -> str:
    """In the one way of writing it by which a server is known."""
    try:
        return str(httpx.URL(address)).rstrip("/")
    except httpx.InvalidURL:
        return address.rstrip("/")  # refused as soon as it is to be asked


def _parse(text: str) -> _Entry:
    found = _ENTRY.fullmatch(text)
    if not found:
        raise ValueError(f"allow: {text!r} is no address such as http://10.1.2.3:8000, http://10.1.*:8000")
    scheme, host, port = found.groups()
    prefix = host.endswith("*")
    if prefix and not _PREFIX.fullmatch(host[:-1]):
        raise ValueError(f"allow: {text!r}: a star may stand only for the end of a numeric address, such as 10.1.*")
    number = None if port == "*" else int(port or _PORTS[scheme])
    if number is not None and not 0 < number < 1 << 16:
        raise ValueError(f"allow: {text!r}: there is no port {number}")
    return _Entry(scheme, _plain(host.rstrip("*").strip("[]")), number, prefix)


def _plain(host: str) -> str:
    """In the one way of writing it that there is for an address."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower()


def _is_ipv4(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True
