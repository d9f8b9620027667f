//! Files that are not what their names say: what a download or a clone leaves when it goes wrong.

/// Bytes at the start of a file that are looked at to tell what it is.
pub(crate) const SNIFFED_BYTES: usize = 512;

/// What the file is, if its first bytes show that it is not the `wanted` one. No more than these bytes are needed.
pub(crate) fn something_else(file: &[u8], wanted: &str) -> Option<String> {
    let start = &file[..file.len().min(SNIFFED_BYTES)];
    let text = String::from_utf8_lossy(start);
    let trimmed = text.trim_start_matches('\u{feff}').trim_start();
    if start.is_empty() {
        return Some("the file is empty; download it again".into());
    }
    if trimmed.starts_with("version https://git-lfs") {
        let size = trimmed.lines().find_map(|line| line.strip_prefix("size "));
        let size = size.map_or(String::new(), |size| format!(" (the file has {} bytes)", size.trim()));
        return Some(format!(
            "a Git LFS pointer in place of the {wanted}{size}; run `git lfs pull` in the folder, or download the file itself"
        ));
    }
    if trimmed.starts_with('<') {
        return Some(format!(
            "an HTML or XML page in place of the {wanted}; the download went wrong (a login or error page), download it again"
        ));
    }
    None
}
