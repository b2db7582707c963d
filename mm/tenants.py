"""Tenants: whose request it is, as its `cache_salt` tells."""

from __future__ import annotations

from hashlib import sha256

_END = "\0"


def tenant_salt(tenant: str, salt: str) -> str:
    """Return a `cache_salt` for requests of a tenant with several salts.

    Requests share caches only if their salts are equal. Places, memory and worker processes are those of the tenant, so that a
    tenant gets no more of them by changing its salt.
    """
    return f"{tenant}{_END}{sha256(salt.encode('utf-8', 'surrogatepass')).hexdigest()}"


def tenant_of(salt: object) -> str | None:
    """Return the tenant of a `cache_salt`: the one given to `tenant_salt`, or any other text itself; None without a salt."""
    return salt.partition(_END)[0] if isinstance(salt, str) else None
