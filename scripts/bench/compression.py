"""Compressed sizes from `gpt2 compress`, xz, zstd, brotli, bzip3 and zpaq, and our compression speed.

usage: python -m bench compression FILE... [--speed] [--model MODEL] [--threads N] [--program PROGRAM] [--markdown] [--json]

Compresses every file with each installed program (on Debian: apt-get install xz-utils zstd brotli bzip3 zpaq)
at its highest level, and with ours, which is also decompressed and compared. Prints bits per byte, all
overhead included. A model that saw a file during training has memorized it, so use newer or held-out texts.

--speed compresses and restores the beginning of the first file, repeated if it is too short: 32 KiB (1
stream) and 1 MiB (32 streams). It prints kilobytes of text per second without the time to load the model.
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from bench import common

STREAM = 32 << 10
OTHERS = {
    "xz -9e": ["xz", "-9e", "-k", "-c", "{file}"],
    "zstd --ultra -22": ["zstd", "--ultra", "-22", "-q", "-c", "{file}"],
    "brotli -q 11": ["brotli", "-q", "11", "-w", "24", "-c", "{file}"],
    "bzip3": ["bzip3", "-e", "-c", "-b", "511", "{file}"],
    "zpaq -m5": ["zpaq", "add", "{out}", "{file}", "-m5"],
}


def size_of(command, file, folder):
    """Returns a file's compressed size from another program, or None if the program is not installed."""
    if not shutil.which(command[0]):
        return None
    out = folder / "out.zpaq"
    out.unlink(missing_ok=True)
    run = subprocess.run([word.format(file=file, out=out) for word in command], capture_output=True)
    if run.returncode:
        sys.exit(f"{command[0]}: {run.stderr.decode()[-500:]}")
    return out.stat().st_size if out.exists() else len(run.stdout)


def ours(arguments, file, folder):
    """Returns our program's report after verifying the restored file."""
    compressed, restored = folder / "ours.gpt2z", folder / "restored"
    for path in [compressed, restored]:
        path.unlink(missing_ok=True)
    model = ["--model", str(arguments.model or "built-in"), "--threads", str(arguments.threads)]
    report = common.json_of([arguments.program, "compress", file, "-o", compressed, "--json", *model])
    common.output_of([arguments.program, "decompress", compressed, "-o", restored, *model])
    if restored.read_bytes() != pathlib.Path(file).read_bytes():
        sys.exit(f"{file}: the restored file differs from the original")
    return report


def seconds(command):
    start = time.monotonic()
    common.output_of(command)
    return time.monotonic() - start


def speed(arguments, folder):
    """Returns compression and decompression speed in kilobytes per second, by number of streams."""
    text = arguments.files[0].read_bytes()
    model = ["--model", str(arguments.model or "built-in"), "--threads", str(arguments.threads)]
    data, compressed = folder / "data", folder / "data.gpt2z"

    def round_trip(size):
        data.write_bytes((text * (size // len(text) + 1))[:size])
        return (
            seconds([arguments.program, "compress", "-f", "-o", compressed, data, *model]),
            seconds([arguments.program, "decompress", "-f", "-o", folder / "restored", compressed, *model]),
        )

    # The time to compress or restore one byte is the time to load the model.
    loading = round_trip(1)
    figures = {}
    for streams in [1, 32]:
        size = streams * STREAM
        figures[streams] = [size / 1000 / max(took - load, 1e-3) for took, load in zip(round_trip(size), loading)]
    return figures


def main():
    parser = common.parser(__doc__, "program", "model", "threads", "markdown", "json")
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--speed", action="store_true", help="only how fast it is")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if arguments.speed:
            for streams, (compressing, restoring) in speed(arguments, folder).items():
                figures = {"streams": streams, "compress_kb_s": round(compressing, 2), "decompress_kb_s": round(restoring, 2)}
                print(json.dumps(figures) if arguments.json else f"{streams} streams: {compressing:.1f} kB/s compressing, {restoring:.1f} kB/s decompressing")
            return
        rows = []
        for file in arguments.files:
            size = file.stat().st_size
            sizes = {"gpt2 compress": ours(arguments, file, folder)["compressed_bytes"]}
            sizes |= {program: size_of(command, file, folder) for program, command in OTHERS.items()}
            rows.append((file.name, size, {program: 8 * found / size for program, found in sizes.items() if found}))
        if arguments.json:
            for file, size, bits in rows:
                print(json.dumps({"file": file, "bytes": size, "bits_per_byte": bits}))
            return
        names = ["gpt2 compress", *OTHERS]
        cells = [["file (bytes)", *names]]
        cells += [[f"{file} ({size:,})", *(f"{bits[name]:.3f}" if name in bits else "-" for name in names)] for file, size, bits in rows]
        if arguments.markdown:
            cells.insert(1, ["---"] * len(cells[0]))
            print("\n".join("| " + " | ".join(row) + " |" for row in cells))
        else:
            print("\n".join("  ".join(f"{cell:>17}" for cell in row) for row in cells))


if __name__ == "__main__":
    main()
