#!/usr/bin/env bash
# Runs a Windows program in Wine, with a separate prefix under target/wine. usage: scripts/wine.sh PROGRAM.exe
# [ARGUMENT…] Wine before 8.13 (Debian 12 has 8.0) lacks a function that every Rust program for Windows
# imports; this script builds it with mingw.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)/target/wine
library=$root/library/bcryptprimitives.dll
export WINEPREFIX=$root/prefix WINEDEBUG=${WINEDEBUG:--all}
# Disables the components that Wine would offer to download.
export WINEDLLOVERRIDES='mscoree,mshtml='

if [ ! -e "$library" ]; then
  mkdir -p "$root/library"
  exec 9>"$root/lock"
  flock 9
  if [ ! -e "$library" ]; then
    x86_64-w64-mingw32-gcc -x c -shared -o "$library.new" - -ladvapi32 <<'C'
#include <windows.h>
/* The same random bytes under an older name. */
BOOLEAN NTAPI SystemFunction036(PVOID buffer, ULONG length);
__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE buffer, SIZE_T length) {
  return SystemFunction036(buffer, (ULONG)length);
}
C
    wineboot --init >/dev/null 2>&1
    wineserver --wait
    mv "$library.new" "$library"
  fi
  flock -u 9
fi
# Windows looks for libraries next to the program; tests are in a subfolder of the program that they start.
for folder in "$(dirname "$1")" "$(dirname "$1")/.."; do
  [ -e "$folder/bcryptprimitives.dll" ] || cp "$library" "$folder"
done
exec wine "$@"
