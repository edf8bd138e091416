"""What listens at an endpoint to which gRPC could not connect: a look of our own, to have words for it.

gRPC's texts are for its authors, and change; and some of these servers it just waits for.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl

from .endpoints import Endpoint
from .etcd_faults import Fault, Help
from .store import Trouble

# What a client of HTTP/2 says first: the preface and empty SETTINGS (RFC 9113, 3.4).
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS_TYPE = 4
TLS_RECORDS = (b"\x15\x03", b"\x16\x03")
SPEAKS_TLS = "it speaks TLS, and we do not (give its CA: --rdzv-ca)"


async def look_at(endpoint: Endpoint, tls: ssl.SSLContext | None, within_s: float) -> Fault:
    """Connect, say hello as HTTP/2, and tell from what comes back what is wrong."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    try:
        reader, writer = await asyncio.wait_for(_connect(endpoint, tls), within_s)
    except asyncio.TimeoutError:
        return Fault(Trouble.UNREACHABLE, "it cannot be connected to in time")
    except OSError as error:
        return _connect_fault(error, tls is not None)
    try:
        writer.write(PREFACE)
        said = await asyncio.wait_for(reader.read(64), max(deadline - loop.time(), 0.05))
    except asyncio.TimeoutError:
        return Fault(Trouble.TIMEOUT, "it takes connections and says nothing (is it stopped, or no etcd?)")
    except ssl.SSLError as error:
        return _tls_fault(error)
    except OSError:
        said = b""
    finally:
        writer.transport.abort()
    if not said and tls is None and await _speaks_tls(endpoint, max(deadline - loop.time(), 0.05)):
        return _wrong(SPEAKS_TLS)
    return fault_in(said, tls is not None)


async def _speaks_tls(endpoint: Endpoint, within_s: float) -> bool:
    """Whether it takes part in a handshake of TLS. Nothing is told to it, so nothing has to be trusted."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _reader, writer = await asyncio.wait_for(_connect(endpoint, context), within_s)
    except ssl.SSLError as error:
        return "alert" in (error.reason or "").lower()  # it wants a certificate of ours, most likely
    except (OSError, asyncio.TimeoutError):
        return False
    writer.transport.abort()
    return True


async def _connect(endpoint: Endpoint, tls: ssl.SSLContext | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host = endpoint.host if tls else None
    return await asyncio.open_connection(endpoint.host, endpoint.port, ssl=tls, server_hostname=host)


def fault_in(said: bytes, tls: bool) -> Fault:
    """What the first bytes of a server mean. Pure."""
    if not said:
        return _closed(tls)
    if said.startswith(TLS_RECORDS) or b"HTTPS server" in said or b"TLS" in said[:64]:
        return _wrong(SPEAKS_TLS)
    if said.startswith(b"HTTP/1."):
        return _wrong("a web server answers (HTTP/1), not etcd with its v3 API")
    if said.startswith(b"SSH-"):
        return _wrong("an SSH server answers")
    if len(said) >= 9 and said[3] == SETTINGS_TYPE and not any(said[5:9]):
        return Fault(Trouble.UNREACHABLE, "it answers, and yet no connection came about")
    return _wrong("what answers does not speak HTTP/2, so it is not etcd with its v3 API")


def _closed(tls: bool) -> Fault:
    """A server of another kind does this, and one that is being killed: who asks must see it twice to be sure."""
    if tls:
        return Fault(Trouble.DENIED, "it closes our connections at once (does it want a client certificate?)")
    return Fault(Trouble.WRONG_SERVER, "it closes our connections at once (is it an etcd at all?)")


def _wrong(words: str) -> Fault:
    return Fault(Trouble.WRONG_SERVER, words, Help.ANOTHER_ENDPOINT)


def _connect_fault(error: OSError, tls: bool) -> Fault:
    if isinstance(error, ssl.SSLError):
        return _tls_fault(error)
    if tls and isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError):
        return Fault(Trouble.WRONG_SERVER, "it hangs up on our TLS (it does not speak it, or not with us)")
    if isinstance(error, socket.gaierror):
        return Fault(Trouble.UNREACHABLE, "its name cannot be resolved")
    # asyncio tells of several addresses in one text, without a number of its own.
    number = error.errno or next(
        (n for n in (errno.ECONNREFUSED, errno.ENETUNREACH) if f"[Errno {n}]" in str(error)), 0
    )
    return Fault(Trouble.UNREACHABLE, os.strerror(number).lower() if number else "it cannot be connected to")


def _tls_fault(error: ssl.SSLError) -> Fault:
    if isinstance(error, ssl.SSLCertVerificationError):
        words = f"its certificate is not trusted ({error.verify_message.rstrip('.')})"
        return Fault(Trouble.DENIED, words, Help.ANOTHER_ENDPOINT)
    reason = (error.reason or "").replace("_", " ").lower()
    if "certificate" in reason or "unknown ca" in reason:
        return Fault(Trouble.DENIED, f"it wants a client certificate that it trusts ({reason})", Help.ANOTHER_ENDPOINT)
    if "wrong version" in reason or "http request" in reason or "packet length" in reason:
        return _wrong("it does not speak TLS, and we do")
    return Fault(Trouble.UNREACHABLE, f"the TLS handshake failed ({reason or 'no reason given'})")
