# Installs the program gpt2 for Windows: downloads the archive of a release, verifies its checksum and installs the program.
# usage: install.ps1 [-Version VERSION] [-To FOLDER] [-From FOLDER|URL]
#   -Version   a release (default: the newest)
#   -To        the installation folder (default: %LOCALAPPDATA%\Programs\gpt2)
#   -From      the source of the archives and SHA256SUMS (default: the project's releases)
param(
    [string]$Version = '',
    [string]$To = (Join-Path $env:LOCALAPPDATA 'Programs\gpt2'),
    [string]$From = ''
)
$ErrorActionPreference = 'Stop'
$ProgressPreference = 'SilentlyContinue' # the progress bar slows downloads down many times
[Net.ServicePointManager]::SecurityProtocol = [Net.ServicePointManager]::SecurityProtocol -bor [Net.SecurityProtocolType]::Tls12

$releases = 'https://github.com/candle-gpt2/candle-gpt2/releases'
$Version = $Version -replace '^v', ''
if (-not $From) {
    $From = if ($Version) { "$releases/download/v$Version" } else { "$releases/latest/download" }
}
# Windows on ARM runs x86-64 programs.
if (-not [Environment]::Is64BitOperatingSystem) {
    throw 'there is no archive for 32-bit Windows'
}
$target = 'x86_64-pc-windows-gnu'

function Get-Part([string]$Name) {
    $place = Join-Path $work $Name
    if ($From -match '^https?://') {
        Invoke-WebRequest -UseBasicParsing -Uri "$From/$Name" -OutFile $place
    } else {
        Copy-Item -LiteralPath (Join-Path $From $Name) -Destination $place
    }
    $place
}

$work = Join-Path ([IO.Path]::GetTempPath()) ([IO.Path]::GetRandomFileName())
New-Item -ItemType Directory -Path $work | Out-Null
try {
    $wanted = if ($Version) { [regex]::Escape($Version) } else { '[^ ]*' }
    $lines = @(Get-Content -LiteralPath (Get-Part 'SHA256SUMS') |
        Where-Object { $_ -match "^[0-9a-f]{64} [ *]gpt2-$wanted-$target\.zip$" })
    if ($lines.Count -eq 0) { throw "$From/SHA256SUMS lists no archive for $target" }
    if ($lines.Count -gt 1) { throw "$From/SHA256SUMS lists several versions: choose one with -Version" }
    $expected, $archive = $lines[0] -split ' [ *]', 2
    $zip = Get-Part $archive
    $found = (Get-FileHash -LiteralPath $zip -Algorithm SHA256).Hash.ToLowerInvariant()
    if ($found -ne $expected) {
        throw "$archive is damaged: expected the SHA-256 $expected, found $found; nothing was installed"
    }
    Expand-Archive -LiteralPath $zip -DestinationPath $work
    $new = Join-Path $work (Join-Path ($archive -replace '\.zip$', '') 'gpt2.exe')
    $starts = & $new --version
    if ($LASTEXITCODE -ne 0) { throw 'the program does not start here; nothing was installed' }
    New-Item -ItemType Directory -Force -Path $To | Out-Null
    $program = Join-Path $To 'gpt2.exe'
    try {
        Copy-Item -LiteralPath $new -Destination $program -Force
    } catch {
        throw "cannot replace $program (is it running?): $_"
    }
    "${starts}: installed as $program"
    if (($env:PATH -split ';') -notcontains $To) {
        "$To is not in PATH: add it in the system's settings, or call the program by this path"
    }
} finally {
    Remove-Item -LiteralPath $work -Recurse -Force
}
