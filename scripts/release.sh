#!/usr/bin/env bash
# Builds the files of a release in dist/: a program archive for each target that this machine can link, bills of materials,
# checksums, and the manifests of package managers.
# usage: scripts/release.sh [--rehearse] [--twice] [--allow-dirty] [--target TARGET]…
#        scripts/release.sh --describe | --publish TAG
#   --rehearse   installs from those files alone into an empty folder, and runs the installed program
#   --twice      builds again in a clone elsewhere, and compares the checksums
#   --describe   builds nothing: writes checksums and manifests for the archives in dist/
#   --publish    creates the release of this tag on GitHub, with the files in dist/ and this version's part of the changelog
# Output is reproducible: the same commit, Rust and linker yield the same bytes in every folder. Targets that cannot be built
# here are listed and skipped; nothing is installed. The profile is `dist`; each target takes some minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/steps.sh

# Targets of a release. On Linux the program is static, so that it runs on all distributions.
targets=(x86_64-unknown-linux-musl aarch64-unknown-linux-musl x86_64-pc-windows-gnu aarch64-apple-darwin x86_64-apple-darwin)
most_megabytes=31 # 29.5 today, of which 6.3 are the model and 17 machine code

rehearse='' twice='' describe='' allow_dirty='' tag='' chosen=()
while [ $# -gt 0 ]; do
  case $1 in
    --rehearse) rehearse=yes ;;
    --twice) twice=yes ;;
    --describe) describe=yes ;;
    --publish) tag=${2:?--publish needs the tag}; shift ;;
    --allow-dirty) allow_dirty=yes ;;
    --target) chosen+=("${2:?--target needs one}"); shift ;;
    *) sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
  shift
done
[ ${#chosen[@]} -eq 0 ] || targets=("${chosen[@]}")

version=$(awk -F'"' '/^version = / { print $2; exit }' Cargo.toml)
repository=$(awk -F'"' '/^repository = / { print $2; exit }' Cargo.toml)
# Timestamp of all entries in an archive.
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct)}"
export SOURCE_DATE_EPOCH

name_of() { echo "gpt2-$version-$1"; }
archive_of() { case $1 in *windows*) echo "dist/$(name_of "$1").zip" ;; *) echo "dist/$(name_of "$1").tar.gz" ;; esac; }
program_of() { case $1 in *windows*) echo "$build/$1/dist/gpt2.exe" ;; *) echo "$build/$1/dist/gpt2" ;; esac; }

# Sets the cargo command that builds and links the target here; empty if that is impossible.
cargo_for() {
  local target=$1 what="the program for $1"
  builder=()
  if ! has_target "$target"; then
    leave_out "$what" "a target" "rustup target add $target"
    return
  fi
  case $target in
    "$(rustc -vV | sed -n 's/^host: //p')") builder=(build) ;;
    x86_64-unknown-linux-musl)
      if has musl-gcc; then builder=(build); elif has cargo-zigbuild; then builder=(zigbuild); else
        leave_out "$what" "a C compiler" "apt-get install musl-tools"
      fi ;;
    *-linux-*)
      if has cargo-zigbuild; then builder=(zigbuild); else
        leave_out "$what" "a C compiler" "pip install ziglang cargo-zigbuild"
      fi ;;
    x86_64-pc-windows-gnu)
      if has x86_64-w64-mingw32-gcc; then builder=(build); else
        leave_out "$what" "a C compiler" "apt-get install gcc-mingw-w64-x86-64"
      fi ;;
    *-apple-darwin)
      if [ "$(uname -s)" = Darwin ]; then builder=(build); else leave_out "$what" "Apple's linker" "a Mac"; fi ;;
    *) leave_out "$what" "a rule in scripts/release.sh" "add it to cargo_for" ;;
  esac
}

build_program() {
  local target=$1 command=(cargo)
  # Embeds the list of crates in the program, for `cargo audit bin`.
  if has cargo-auditable; then command+=(auditable); else
    leave_out "the list of crates inside the program for $target" "cargo-auditable" "cargo install --locked cargo-auditable"
  fi
  command+=("${builder[@]}" --package candle-gpt2-cli --profile dist --locked --target "$target")
  cargo fetch --locked --target "$target"
  local flags=()
  [[ $target != *-linux-musl ]] || flags+=(-C target-feature=+crt-static)
  # A position-independent program contains a list of its own addresses; packed, eight bytes represent many of
  # them.
  [[ $target != x86_64-unknown-linux-musl || ${builder[0]} != build ]] || flags+=(-C 'link-arg=-Wl,-z,pack-relative-relocs')
  (set_flags "$target" "${flags[@]}" && "${command[@]}")
  local program bytes
  program=$(program_of "$target")
  bytes=$(wc -c <"$program")
  echo "$program: $bytes bytes"
  [ "$bytes" -le $((most_megabytes * 1000000)) ] || { echo "expected at most $most_megabytes MB" >&2; return 1; }
  holds_no_path "$program"
}

# bill_of_materials TARGET: writes the program's components in CycloneDX format. Paths of our crates start at
# the repository.
bill_of_materials() {
  local target=$1 name
  name=$(name_of "$target").cdx
  cargo cyclonedx --quiet --manifest-path crates/cli/Cargo.toml --format json --spec-version 1.5 \
    --target "$target" --override-filename "$name"
  sed "s|file://$PWD|file:///gpt2|g" "crates/cli/$name.json" >"dist/$name.json"
  find crates docs models web -name "$name.json" -not -path '*/target/*' -delete
}

# pages PROGRAM: writes manual pages and completions with a program that runs here; they are the same for all
# targets.
pages() {
  local shell
  mkdir -p "$build/pages/man" "$build/pages/completions"
  "$1" man --out "$build/pages/man" >/dev/null
  for shell in bash elvish fish powershell zsh; do
    "$1" completions $shell >"$build/pages/completions/gpt2.$shell"
  done
}

pack() {
  local target=$1 folder program
  folder=$build/$(name_of "$target")
  program=$(program_of "$target")
  rm -rf "$folder"
  mkdir -p "$folder"
  cp -r "$program" README.md CHANGELOG.md LICENSE-MIT LICENSE-APACHE "$build/pages/man" "$build/pages/completions" "$folder"
  python3 scripts/archive.py "$folder" "$(archive_of "$target")"
}

# Prints the checksum of an archive in dist/, or nothing if it is missing.
checksum_of() { awk -v name="$(basename "$(archive_of "$1")")" '$2 == name { print $1 }' dist/SHA256SUMS; }
address_of() { echo "$repository/releases/download/v$version/$(basename "$(archive_of "$1")")"; }

# Writes checksums and package manager manifests for the archives in dist/.
describe() {
  (cd dist && checksum gpt2-"$version"-* >SHA256SUMS)
  rm -rf dist/homebrew dist/scoop dist/winget
  homebrew
  if [ -n "$(checksum_of x86_64-pc-windows-gnu)" ]; then
    scoop
    winget
  fi
  cat dist/SHA256SUMS
}

homebrew() {
  local system processor target
  mkdir -p dist/homebrew
  {
    cat <<RUBY
class Gpt2 < Formula
  desc "Generate, score, inspect, train and serve GPT-2 models"
  homepage "$repository"
  version "$version"
  license any_of: ["MIT", "Apache-2.0"]

RUBY
    for system in macos:apple-darwin linux:unknown-linux-musl; do
      for processor in arm:aarch64 intel:x86_64; do
        target=${processor#*:}-${system#*:}
        [ -n "$(checksum_of "$target")" ] || continue
        cat <<RUBY
  on_${system%:*} do
    on_${processor%:*} do
      url "$(address_of "$target")"
      sha256 "$(checksum_of "$target")"
    end
  end

RUBY
      done
    done
    cat <<'RUBY'
  def install
    bin.install "gpt2"
    man1.install Dir["man/*.1"]
    bash_completion.install "completions/gpt2.bash" => "gpt2"
    fish_completion.install "completions/gpt2.fish"
    zsh_completion.install "completions/gpt2.zsh" => "_gpt2"
  end

  test do
    system bin/"gpt2", "generate", "One day", "--max-new-tokens", "8"
  end
end
RUBY
  } >dist/homebrew/gpt2.rb
}

scoop() {
  local target=x86_64-pc-windows-gnu name
  name=$(name_of $target)
  mkdir -p dist/scoop
  cat >dist/scoop/gpt2.json <<JSON
{
  "version": "$version",
  "description": "Generate, score, inspect, train and serve GPT-2 models",
  "homepage": "$repository",
  "license": "MIT|Apache-2.0",
  "architecture": {
    "64bit": {
      "url": "$(address_of $target)",
      "hash": "$(checksum_of $target)",
      "extract_dir": "$name"
    }
  },
  "bin": "gpt2.exe",
  "checkver": "github",
  "autoupdate": {
    "architecture": {
      "64bit": {
        "url": "$repository/releases/download/v\$version/${name/$version/\$version}.zip",
        "extract_dir": "${name/$version/\$version}"
      }
    },
    "hash": { "url": "\$baseurl/SHA256SUMS" }
  }
}
JSON
}

winget() {
  local target=x86_64-pc-windows-gnu id=CandleGpt2.Gpt2 schema=1.6.0
  local folder=dist/winget/$id
  mkdir -p "$folder"
  cat >"$folder/$id.yaml" <<YAML
PackageIdentifier: $id
PackageVersion: $version
DefaultLocale: en-US
ManifestType: version
ManifestVersion: $schema
YAML
  cat >"$folder/$id.installer.yaml" <<YAML
PackageIdentifier: $id
PackageVersion: $version
InstallerType: zip
NestedInstallerType: portable
NestedInstallerFiles:
  - RelativeFilePath: $(name_of $target)\\gpt2.exe
    PortableCommandAlias: gpt2
Installers:
  - Architecture: x64
    InstallerUrl: $(address_of $target)
    InstallerSha256: $(checksum_of $target | tr a-f A-F)
ManifestType: installer
ManifestVersion: $schema
YAML
  cat >"$folder/$id.locale.en-US.yaml" <<YAML
PackageIdentifier: $id
PackageVersion: $version
PackageLocale: en-US
Publisher: candle-gpt2
PackageName: gpt2
License: MIT OR Apache-2.0
ShortDescription: Generate, score, inspect, train and serve GPT-2 models
PackageUrl: $repository
ManifestType: defaultLocale
ManifestVersion: $schema
YAML
}

# Installs from dist/ like a user, with no other files, and runs the installed program.
try_installed() {
  local place
  place=$(mktemp -d)
  scripts/install.sh --from dist --to "$place/bin"
  (cd "$place" && env -i PATH=/usr/bin:/bin bin/gpt2 generate "One day" --max-new-tokens 8)
  # The installer must reject a modified archive and keep the installed program.
  cp -r dist "$place/damaged"
  local archive
  for archive in "$place"/damaged/*.tar.gz; do printf x >>"$archive"; done
  if scripts/install.sh --from "$place/damaged" --to "$place/bin" 2>"$place/refusal"; then
    echo "installed an archive with a wrong checksum" >&2
    return 1
  fi
  cat "$place/refusal"
  rm -rf "$place"
}

# Tests the setup of examples/deploy/Containerfile without building an image: the program alone on a read-only
# root, as another user, serves, reports readiness, and stops on SIGTERM.
try_image() {
  local root namespaces=(--mount) user=(--userspec=65532:65532)
  if [ "$(id -u)" != 0 ]; then namespaces+=(--map-root-user) user=(); fi
  root=$(mktemp -d)
  mkdir "$root/tmp" "$root/models"
  chmod 755 "$root"
  scripts/install.sh --from dist --to "$root" >/dev/null
  # shellcheck disable=SC2016 # the inner shell reads them
  unshare "${namespaces[@]}" bash -euc '
    root=$1 place=(--host 0.0.0.0 --port 18099)
    mount --bind "$root" "$root"
    mount -o remount,bind,ro "$root"
    for volume in tmp models; do mount -t tmpfs -o mode=1777 tmpfs "$root/$volume"; done
    run=(env -i PATH="$PATH" HF_HOME=/models GPT2_API_KEY=only-for-this-rehearsal chroot "${@:2}" "$root" /gpt2)
    "${run[@]}" serve "${place[@]}" &
    for _ in {1..100}; do
      if "${run[@]}" serve --check "${place[@]}" 2>/dev/null; then ready=yes; break; fi
      sleep 0.1
    done
    "${run[@]}" generate "One day" --max-new-tokens 8 --offline
    kill -TERM $!
    wait $!
    [ "${ready:-}" = yes ] && ! "${run[@]}" serve --check "${place[@]}"
  ' - "$root" "${user[@]}"
  rm -rf "$root"
}

# Builds the same targets in a clone with a longer path, and compares the checksums.
build_again() {
  local other target options=()
  other=$(mktemp -d)/another/folder
  for target in "${made[@]}"; do options+=(--target "$target"); done
  git clone --quiet . "$other"
  env -u CARGO_TARGET_DIR "$other/scripts/release.sh" "${options[@]}"
  diff dist/SHA256SUMS "$other/dist/SHA256SUMS"
  rm -rf "$other"
  echo "two builds in different folders have the same checksums"
}

publish() {
  [ "$tag" = "v$version" ] || { echo "the tag is $tag, and the manifest has version $version" >&2; return 1; }
  mkdir -p "$build"
  awk -v heading="## [$version]" 'index($0, heading) == 1 { inside = 1; next } /^## |^\[/ { inside = 0 } inside' CHANGELOG.md >"$build/notes.md"
  shopt -s nullglob
  gh release create "$tag" --title "$tag" --notes-file "$build/notes.md" dist/gpt2-* dist/wheels/*.whl dist/SHA256SUMS \
    scripts/install.sh scripts/install.ps1
}

if [ -n "$describe" ]; then
  step describe
  exit
fi
if [ -n "$tag" ]; then
  publish
  exit
fi
if [ -z "$allow_dirty" ] && [ -n "$(git status --porcelain)" ]; then
  echo "a release is built from a commit; commit or remove the changes that git status shows, or pass --allow-dirty" >&2
  exit 1
fi

made=() runs=''
for target in "${targets[@]}"; do
  cargo_for "$target"
  [ ${#builder[@]} -gt 0 ] || continue
  step build_program "$target"
  made+=("$target")
  [ -n "$runs" ] || ! "$(program_of "$target")" --version 2>/dev/null || runs=$(program_of "$target")
done
[ ${#made[@]} -gt 0 ] || { echo "no target can be built on this machine" >&2; exit 1; }
[ -n "$runs" ] || { echo "none of ${made[*]} runs on this machine, but the program writes its own manual pages; add a target that runs here" >&2; exit 1; }

rm -rf dist "$build/pages"
mkdir -p dist
step pages "$runs"
for target in "${made[@]}"; do
  step pack "$target"
  if has cargo-cyclonedx; then step bill_of_materials "$target"; else
    leave_out "the bill of materials of $target" "cargo-cyclonedx" "cargo install --locked cargo-cyclonedx"
  fi
done
step describe
if [ -n "$rehearse" ]; then
  step try_installed
  if [ "$(uname -s)" = Linux ]; then
    if unshare --map-root-user --mount true 2>/dev/null; then step try_image; else
      leave_out "the program as a container has it" "user namespaces" "sysctl kernel.unprivileged_userns_clone=1"
    fi
  fi
fi
[ -z "$twice" ] || step build_again
steps_done "made: ${made[*]}"
