"""Certificates for `localhost` whose time of validity can be in the past, made by openssl."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_CONFIG = """
[ca]
default_ca = own
[own]
database = index.txt
serial = serial
new_certs_dir = .
default_md = sha256
policy = names
copy_extensions = copy
[names]
commonName = supplied
"""
_REQUEST = "req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem -out request.pem"
_SIGN = "ca -selfsign -batch -config ca.cnf -in request.pem -keyfile key.pem -out cert.pem -notext"


@dataclass(frozen=True)
class Files:
    """A certificate and its key in PEM."""

    certificate: Path
    key: Path


def make_certificate(folder: Path, years: tuple[int, int]) -> Files:
    """Make a certificate of `localhost` that signs itself.

    Args:
        folder: a new one.
        years: the first and the last year of its validity, relative to now.
    """
    folder.mkdir()
    for name, text in (("ca.cnf", _CONFIG), ("index.txt", ""), ("serial", "01\n")):
        (folder / name).write_text(text)
    begin, end = (time.strftime("%Y%m%d%H%M%SZ", time.gmtime(time.time() + year * 365 * 86_400)) for year in years)
    names = ["-subj", f"/CN={folder.name}", "-addext", "subjectAltName=DNS:localhost"]
    for words in ([*_REQUEST.split(), *names], [*_SIGN.split(), "-startdate", begin, "-enddate", end]):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)
    return Files(folder / "cert.pem", folder / "key.pem")
