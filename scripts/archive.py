"""Packs a folder so that the same files give the same bytes: sorted, of one owner and one time. usage: archive.py FOLDER ARCHIVE

ARCHIVE ends with .tar.gz or .zip, and holds the folder itself. The time is that of SOURCE_DATE_EPOCH.
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
    """Name within the archive, and mode: users may run what its owner may run."""
    mode = 0o755 if os.access(path, os.X_OK) else 0o644
    return path.relative_to(folder.parent).as_posix(), mode


if archive.suffix == ".zip":
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for path in files:
            name, mode = described(path)
            entry = zipfile.ZipInfo(name, time.gmtime(seconds)[:6])
            entry.create_system = 3  # Unix, whatever the system is: it says what the mode means
            entry.external_attr = mode << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(entry, path.read_bytes())
else:
    # Neither the name nor the time of the file goes into gzip's head.
    with archive.open("wb") as out, gzip.GzipFile("", "wb", 9, out, mtime=0) as zipped:
        with tarfile.open(fileobj=zipped, mode="w", format=tarfile.USTAR_FORMAT) as packed:
            for path in files:
                name, mode = described(path)
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode, entry.mtime = path.stat().st_size, mode, seconds
                with path.open("rb") as content:
                    packed.addfile(entry, content)
