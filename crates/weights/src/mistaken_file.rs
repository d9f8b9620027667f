//! Detection of mislabeled files, such as leftovers from failed downloads.

use candle_gpt2::GIT_LFS_POINTER;

/// Number of leading bytes inspected to identify a file.
pub(crate) const SNIFFED_BYTES: usize = 512;

/// Describes a file that is clearly not of the `wanted` kind; `None` if it may be of that kind.
///
/// Reads at most [`SNIFFED_BYTES`].
pub(crate) fn misidentified(file: &[u8], wanted: &str) -> Option<String> {
    let start = &file[..file.len().min(SNIFFED_BYTES)];
    let text = String::from_utf8_lossy(start);
    let trimmed = text.trim_start_matches('\u{feff}').trim_start();
    if start.is_empty() {
        return Some("the file is empty; download it again".into());
    }
    if let Some(pointer) = pointer(start, wanted) {
        return Some(pointer);
    }
    if trimmed.starts_with('<') {
        return Some(format!(
            "an HTML or XML page in place of the {wanted}, probably a login or error page; download the file again"
        ));
    }
    None
}

/// Formats identified by their first bytes: signature, name and suggested fix.
const SIGNATURES: [(&[u8], &str, &str); 27] = [
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras weights)", SAVE_FROM_PYTHON),
    (b"\x1f\x8b", "a gzip archive", UNPACK),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive", UNPACK),
    (b"\xfd7zXZ\0", "an xz archive", UNPACK),
    (b"BZh", "a bzip2 archive", UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", UNPACK),
    (b"Rar!", "a RAR archive", UNPACK),
    (b"\x93NUMPY", "a NumPy array", SAVE_STATE_DICT),
    (b"\x7fELF", "an executable program", PASS_WEIGHTS),
    (b"MZ", "an executable program", PASS_WEIGHTS),
    (b"\xcf\xfa\xed\xfe", "an executable program", PASS_WEIGHTS),
    (b"\xca\xfe\xba\xbe", "an executable program", PASS_WEIGHTS),
    (b"#!", "a script", PASS_WEIGHTS),
    (b"\x89PNG", "a picture", PASS_WEIGHTS),
    (b"\xff\xd8\xff", "a picture", PASS_WEIGHTS),
    (b"%PDF", "a PDF document", PASS_WEIGHTS),
    (b"SQLite format 3", "an SQLite database", PASS_WEIGHTS),
    (b"PAR1", "a Parquet table", PASS_WEIGHTS),
    (b"ARROW1", "an Arrow table", PASS_WEIGHTS),
    (b"lmgg", "a GGML file (older than GGUF)", CONVERT_TO_GGUF),
    (b"fmgg", "a GGML file (older than GGUF)", CONVERT_TO_GGUF),
    (b"tjgg", "a GGML file (older than GGUF)", CONVERT_TO_GGUF),
    (b"algg", "a GGML adapter", PASS_WEIGHTS),
    (b"FUGG", "a GGUF file from a big-endian machine", "convert the model again on a little-endian one"),
    (b"ONNX", "an ONNX model", SAVE_FROM_PYTHON),
    (b"ORTM", "an ONNX Runtime model", SAVE_FROM_PYTHON),
    (b"\x80\x00", "a pickle with an unknown protocol", SAVE_STATE_DICT),
];
const SAVE_FROM_PYTHON: &str =
    "load it in its own framework and save the model as safetensors or with torch.save";
const SAVE_STATE_DICT: &str = "save the model's state_dict() with torch.save, or as safetensors";
const UNPACK: &str = "unpack it first";
const PASS_WEIGHTS: &str = "pass a checkpoint folder or a weights file";
const CONVERT_TO_GGUF: &str = "convert the original model to GGUF";

/// Identifies an unsupported file format by its first bytes, and suggests a fix.
pub(crate) fn other_format(file: &[u8]) -> Option<String> {
    let start = &file[..file.len().min(SNIFFED_BYTES)];
    let signed = SIGNATURES.iter().find(|(signature, ..)| start.starts_with(signature));
    let (name, what_to_do) = match signed {
        Some((_, name, what_to_do)) => (*name, *what_to_do),
        None if start.get(257..262) == Some(b"ustar") => ("a tar archive", UNPACK),
        None if start.get(4..8) == Some(b"TFL3") => ("a TensorFlow Lite model", SAVE_FROM_PYTHON),
        None if is_pickle(start) => ("a pickle that torch.save did not write", SAVE_STATE_DICT),
        None if is_message_pack(start) => ("a MessagePack file (Flax weights)", SAVE_FROM_PYTHON),
        None if is_onnx(start) => ("an ONNX model", SAVE_FROM_PYTHON),
        None if start.starts_with(&[0x08, 0x01, 0x12]) => ("a TensorFlow SavedModel", SAVE_FROM_PYTHON),
        None => return None,
    };
    Some(format!("{name}, which is not a supported weights format; {what_to_do}"))
}

/// Whether the bytes start like a pickle of protocol 2 or later, or a protocol 0 dictionary or list.
fn is_pickle(start: &[u8]) -> bool {
    matches!(start, [0x80, 2..=5, ..]) || start.starts_with(b"(dp0\n") || start.starts_with(b"(lp0\n")
}

/// Whether the bytes start with a MessagePack map whose first key is a string.
fn is_message_pack(start: &[u8]) -> bool {
    let first_key = match start {
        [0x81..=0x8f, rest @ ..] | [0xde, _, _, rest @ ..] | [0xdf, _, _, _, _, rest @ ..] => rest,
        _ => return false,
    };
    let (length, text) = match first_key {
        [length @ 0xa1..=0xbf, text @ ..] => (usize::from(length - 0xa0), text),
        [0xd9, length, text @ ..] => (usize::from(*length), text),
        _ => return false,
    };
    text.get(..length).is_some_and(|key| key.iter().all(u8::is_ascii_graphic))
}

/// Whether the bytes start like an ONNX protocol buffer: a version, then a producer or graph name.
fn is_onnx(start: &[u8]) -> bool {
    match start {
        [0x08, 1..=20, 0x12, length @ 1..=64, rest @ ..] => {
            let name = rest.get(..usize::from(*length));
            name.is_some_and(|name| name.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' '))
                && matches!(rest.get(usize::from(*length)), Some(0x1a | 0x22 | 0x2a | 0x32 | 0x3a | 0x42))
        }
        [0x08, 3..=20, 0x3a, ..] => true,
        _ => false,
    }
}

/// Describes a Git LFS pointer found in place of the actual file; `None` for anything else.
pub(crate) fn pointer(file: &[u8], wanted: &str) -> Option<String> {
    let text = String::from_utf8_lossy(&file[..file.len().min(SNIFFED_BYTES)]);
    let text = text.trim_start_matches('\u{feff}').trim_start();
    if !text.starts_with(GIT_LFS_POINTER) {
        return None;
    }
    let size = text.lines().find_map(|line| line.strip_prefix("size "));
    let size = size.map_or(String::new(), |size| format!(" (the file has {} bytes)", size.trim()));
    Some(format!(
        "a Git LFS pointer in place of the {wanted}{size}; run `git lfs pull` in the folder, or download the file itself"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_recognized_by_their_first_bytes() {
        for (start, expected) in [
            (&b"\x89HDF\r\n\x1a\n\0\0"[..], "HDF5"),
            (b"\x1f\x8b\x08\0", "gzip"),
            (b"\x81\xabtransformer\x84", "MessagePack"),
            (b"\xde\0\x10\xa3wte\x81", "MessagePack"),
            (b"\x80\x04\x95\x10\0\0\0\0\0\0\0}\x94.", "a pickle that torch.save did not write"),
            (b"\x08\x07\x12\x07pytorch\x1a\x051.9.0", "ONNX"),
            (b"\x08\x08:\xff\x01\n", "ONNX"),
            (b"\x08\x01\x12\xf4\xd1\x03\x0a", "SavedModel"),
            (b"\x7fELF\x02\x01\x01", "executable program"),
            (b"MZ\x90\0", "executable program"),
        ] {
            let found = other_format(start).unwrap_or_default();
            assert!(found.contains(expected), "{expected}: {found:?}");
        }
        // Safetensors headers, zip archives, GGUF, text and empty files are not identified as other formats.
        for start in
            [&b"\x10\x02\0\0\0\0\0\0{\"wte"[..], b"PK\x03\x04", b"GGUF\x03", b"some words", b"{}", b""]
        {
            assert_eq!(other_format(start), None, "{start:?}");
        }
    }
}
