#!/usr/bin/env python3
"""Checks that every exported item of the libraries is shown in an example.

An item (struct, enum, trait, function, macro, constant, type) is shown if
  1. it, or one of its methods, fields or variants, has a code block in its documentation,
  2. its name occurs in a code block of the crate's documentation or in one of the crate's examples, or
  3. its documentation links to an item shown in this way, as in "Made by [`Model::generate`]".
Prints one line for each item that is not shown, and fails if there are any. Rustdoc's JSON lists exported
items and link targets. The format is unstable, so the script accepts only the versions it knows.

usage: scripts/check_examples.py [CRATE…]      (crate folders such as `kernels`, or package names; default: all)
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / os.environ.get("CARGO_TARGET_DIR", "target")
KNOWN_FORMATS = range(45, 60)
EXPORTED = {"struct", "enum", "union", "trait", "function", "macro", "proc_macro", "constant", "static", "type_alias"}
# Words in a fence's info string that make rustdoc compile the block as Rust.
RUST_FENCE = re.compile(r"^(rust|no_run|should_panic|compile_fail|edition\d+|E\d+)$")


def main():
    names = sys.argv[1:]
    if any(name.startswith("-") for name in names):
        sys.exit(__doc__)
    crates = {package["name"]: Crate(package) for package in libraries(names)}
    document(crates.values())
    by_library = {crate.library: crate for crate in crates.values()}
    for crate in by_library.values():
        crate.read()
    missing, total = 0, 0
    for crate in by_library.values():
        for item in crate.exported:
            total += 1
            if not crate.has_example(item) and not crate.has_reason(item, by_library):
                missing += 1
                print(f"{crate.where(item)}: {crate.kind(item)} `{crate.path[item]}` has no example and no link to one")
    print(f"{total - missing} of {total} exported items are shown", file=sys.stderr)
    sys.exit(1 if missing else 0)


def libraries(names):
    """Returns the published library packages in the workspace, or only the named ones."""
    metadata = json.loads(
        subprocess.check_output(["cargo", "metadata", "--no-deps", "--locked", "--format-version", "1"], cwd=ROOT)
    )
    found = []
    for package in metadata["packages"]:
        package["folder"] = Path(package["manifest_path"]).parent
        package["library"] = next((t["name"] for t in package["targets"] if "lib" in t["kind"] or "rlib" in t["kind"]), None)
        if package["publish"] is None and package["library"]:
            found.append(package)
    if not names:
        return found
    chosen = [p for p in found if {p["name"], p["library"], p["folder"].name} & set(names)]
    unknown = set(names) - {n for p in chosen for n in (p["name"], p["library"], p["folder"].name)}
    if unknown:
        sys.exit(f"not a library crate in the workspace: {', '.join(sorted(unknown))}")
    return chosen


def document(crates):
    """Runs cargo once to write rustdoc's JSON for each crate to `target/doc/*.json`."""
    # Only nightly compilers offer the format. RUSTC_BOOTSTRAP is set for rustdoc alone: build scripts of
    # dependencies read it, so setting it globally would recompile all of them.
    rustdoc = TARGET / "rustdoc_with_json.sh"
    rustdoc.parent.mkdir(parents=True, exist_ok=True)
    rustdoc.write_text('#!/bin/sh\nRUSTC_BOOTSTRAP=1 exec rustdoc "$@"\n')
    rustdoc.chmod(0o755)
    environment = os.environ | {"RUSTDOC": str(rustdoc), "RUSTDOCFLAGS": "-Z unstable-options --output-format json"}
    command = ["cargo", "doc", "--locked", "--no-deps", "--lib", "--quiet"]
    for crate in crates:
        command += ["-p", crate.package]
    if subprocess.run(command, cwd=ROOT, env=environment).returncode != 0:
        sys.exit("cargo doc failed")


def rust_code(docs):
    """Returns the code in the Rust blocks of a Markdown text, or None if there are none."""
    blocks, fence, is_rust = [], None, False
    for line in (docs or "").splitlines():
        stripped = line.strip()
        if fence is None:
            opening = re.match(r"^(```+|~~~+)\s*(.*)$", stripped)
            if opening:
                fence = opening[1]
                words = [word for word in re.split(r"[,\s]+", opening[2].strip()) if word]
                is_rust = all(RUST_FENCE.match(word) for word in words)
                if is_rust:
                    blocks.append("")
        elif stripped.startswith(fence):
            fence = None
        elif is_rust:
            blocks[-1] += re.sub(r"//.*", "", line) + "\n"
    return "\n".join(blocks) if blocks else None


class Crate:
    """Rustdoc's output for one crate."""

    def __init__(self, package):
        self.package, self.folder = package["name"], package["folder"]
        self.library = package["library"].replace("-", "_")

    def read(self):
        data = json.loads((TARGET / "doc" / f"{self.library}.json").read_text())
        if data["format_version"] not in KNOWN_FORMATS:
            print(f"rustdoc's JSON has version {data['format_version']}, which this script may misread", file=sys.stderr)
        self.index, self.paths = data["index"], data["paths"]
        self.external = {str(id): one["name"] for id, one in data["external_crates"].items()}
        self.owner = {}  # a method, field or variant -> the item that documents it
        self.members = {}
        self.exported, self.path = [], {}
        code = []
        self.walk(str(data["root"]), self.library, code)
        for example in sorted(self.folder.glob("examples/**/*.rs")):
            code.append(re.sub(r"//.*", "", example.read_text()))
        self.words = set(re.findall(r"\w+", "\n".join(code)))

    def walk(self, module, path, code):
        """Lists a module's exports; other crates list the items re-exported from them."""
        code.append(rust_code(self.index[module]["docs"]) or "")
        for child in self.index[module]["inner"]["module"]["items"]:
            item = self.index[str(child)]
            if item["visibility"] != "public" and "macro" not in item["inner"]:
                continue
            name, id = item["name"], str(child)
            if "use" in item["inner"]:
                used = item["inner"]["use"]
                name, id = used["name"], str(used["id"])
                if id not in self.index or used["is_glob"]:
                    continue
            kind = next(iter(self.index[id]["inner"]))
            if kind == "module":
                self.walk(id, f"{path}::{name}", code)
            elif kind in EXPORTED and id not in self.path:
                self.exported.append(id)
                self.path[id] = f"{path}::{name}"
                self.members[id] = self.members_of(id)
                self.owner |= {member: id for member in self.members[id]}

    def members_of(self, id):
        kind, inner = next(iter(self.index[id]["inner"].items()))
        found = []
        for implementation in inner.get("impls", []) if kind in ("struct", "enum", "union") else []:
            block = self.index.get(str(implementation))
            if block:
                found += [str(implementation), *map(str, block["inner"]["impl"]["items"])]
        if kind == "trait":
            found += map(str, inner["items"])
        if kind == "enum":
            found += map(str, inner["variants"])
        if kind == "struct" and isinstance(inner["kind"], dict):
            found += map(str, inner["kind"].get("plain", {}).get("fields", []))
        return [member for member in found if member in self.index]

    def kind(self, id):
        return next(iter(self.index[id]["inner"])).replace("_", " ")

    def where(self, id):
        span = self.index[id]["span"]
        return f"{span['filename']}:{span['begin'][0]}" if span else self.package

    def has_example(self, id):
        if self.path[id].rsplit("::", 1)[1] in self.words:
            return True
        return any(rust_code(self.index[one]["docs"]) is not None for one in [id, *self.members[id]])

    def has_reason(self, id, crates):
        """Reports whether the docs link to an item with an example; crates outside this run are trusted."""
        for link in self.index[id]["links"].values():
            link = str(link)
            target = self.owner.get(link, link)
            if target != id and target in self.path and self.has_example(target):
                return True
            known = self.paths.get(target)
            if known and known["crate_id"] != 0:
                name = self.external.get(str(known["crate_id"]), "")
                if name in crates and crates[name].shows(known["path"][-1]):
                    return True
                if name not in crates and name.startswith("candle_gpt2"):
                    return True
        return False

    def shows(self, name):
        return any(self.path[id].endswith(f"::{name}") and self.has_example(id) for id in self.exported)


if __name__ == "__main__":
    main()
