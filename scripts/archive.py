"""Packs a folder into a reproducible archive: sorted entries, fixed owner and fixed time.

usage: archive.py FOLDER ARCHIVE

The suffix of ARCHIVE selects the format: .tar.gz or .zip. The archive contains the folder itself. Entries
carry the time in SOURCE_DATE_EPOCH.
"""

import gzip
import os
import sys
import tarfile
import time
import zipfile
from pathlib import Path

folder, archive = map(Path, sys.argv[1:])
seconds = int(os.environ["SOURCE_DATE_EPOCH"])
files = sorted(path for path in folder.rglob("*") if path.is_file())


def described(path):
    """Returns a file's name in the archive and its mode, which is 0755 for executable files."""
    mode = 0o755 if os.access(path, os.X_OK) else 0o644
    return path.relative_to(folder.parent).as_posix(), mode


if archive.suffix == ".zip":
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for path in files:
            name, mode = described(path)
            entry = zipfile.ZipInfo(name, time.gmtime(seconds)[:6])
            entry.create_system = 3  # Unix on every system, so that unzip reads the mode below
            entry.external_attr = mode << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(entry, path.read_bytes())
else:
    # The gzip header omits the file's name and time.
    with archive.open("wb") as out, gzip.GzipFile("", "wb", 9, out, mtime=0) as zipped:
        with tarfile.open(fileobj=zipped, mode="w", format=tarfile.USTAR_FORMAT) as packed:
            for path in files:
                name, mode = described(path)
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode, entry.mtime = path.stat().st_size, mode, seconds
                with path.open("rb") as content:
                    packed.addfile(entry, content)
