"""Addresses: where a peer listens, as people write it. Loads nothing heavy, so that mistakes are told at once."""

from atoll.errors import FabricError

__all__ = ["split_address"]


def split_address(address: str) -> tuple[str, int]:
    """`"host:port"`, `"[::1]:port"` as host and port; FabricError if it is neither."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise FabricError(f"{address!r} is no address; write it like 'host:port'")
    return host.strip("[]"), int(port)
