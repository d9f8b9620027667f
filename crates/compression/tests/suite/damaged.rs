//! Damaged files cause an error and never yield wrong bytes.

use candle_gpt2_compression::{CompressionError, Compressor};

use crate::{TINY, compressed, decompressed};

/// Returns an input and its compressed file, which contains a coded stream.
fn file() -> (Vec<u8>, Vec<u8>) {
    let bytes = b"the citizen and the word of the citizen".repeat(3);
    let (file, summary) = compressed(&Compressor::new(&TINY, "tiny", None).unwrap(), &bytes);
    assert!(summary.compressed_bytes < summary.bytes, "the stream should be coded, not stored");
    (bytes, file)
}

#[test]
fn every_bit_flip_is_detected() {
    let (_, file) = file();
    for bit in 0..8 * file.len() {
        let mut damaged = file.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let error = decompressed(&TINY, &damaged).unwrap_err();
        // A changed length moves the checksum to another position, perhaps beyond the end.
        let is_expected_error = match bit / 8 {
            0..4 => matches!(error, CompressionError::NotCompressed),
            4 => matches!(error, CompressionError::Version { .. }),
            _ => matches!(error, CompressionError::Damaged { .. } | CompressionError::Truncated),
        };
        assert!(is_expected_error && !error.is_usage(), "bit {bit}: {error}");
    }
}

#[test]
fn every_truncation_is_detected() {
    let (_, file) = file();
    for length in 0..file.len() {
        let error = decompressed(&TINY, &file[..length]).unwrap_err();
        match length {
            0..4 => assert!(matches!(error, CompressionError::NotCompressed), "{length}: {error}"),
            _ => assert_eq!(error.to_string(), "the file is truncated", "{length}"),
        }
    }
}

#[test]
fn trailing_bytes_are_rejected() {
    let (_, mut file) = file();
    file.push(0);
    let error = decompressed(&TINY, &file).unwrap_err();
    assert_eq!(error.to_string(), "the file is damaged: extra bytes after its end");
}

#[test]
fn newer_format_versions_are_reported() {
    let (_, file) = file();
    let message_with = |index: usize, value: u8| {
        let mut other = file.clone();
        other[index] = value;
        decompressed(&TINY, &other).unwrap_err().to_string()
    };
    assert_eq!(
        message_with(4, 2),
        "the file has format version 2, but this program reads version 1; use a newer version of the program"
    );
    // The header's checksum covers the profile, so a changed profile is reported as damage.
    assert_eq!(message_with(5, 7), "the file is damaged: the checksum of its header does not match");
}

#[test]
fn unknown_header_values_of_newer_programs_are_reported() {
    let (_, file) = file();
    let checksum = |header: &[u8]| crc32fast::hash(header).to_le_bytes();
    let end = (0..file.len()).find(|end| file[*end..].starts_with(&checksum(&file[..*end]))).unwrap();
    let message_with = |index: usize, value: u8| {
        let mut other = file.clone();
        other[index] = value;
        let sum = checksum(&other[..end]);
        other[end..end + sum.len()].copy_from_slice(&sum);
        decompressed(&TINY, &other).unwrap_err().to_string()
    };
    let advice = "use the program version that compressed it";
    assert_eq!(
        message_with(5, 7),
        format!(
            "the file was compressed with arithmetic profile 7, but this program uses profile 1; {advice}"
        )
    );
    // Changes the last character of each dtype name, `q8` and `f16`.
    for (index, found) in
        [(8, "weights in q9 and a KV cache in f16"), (12, "weights in q8 and a KV cache in f19")]
    {
        assert_eq!(
            message_with(index, b'9'),
            format!("the file was compressed with {found}, which this program does not support; {advice}")
        );
    }
}
