//! Files that are not what was written: an error in words, and no byte that was not compressed.

use candle_gpt2_compression::{CompressionError, Compressor};

use crate::{TINY, compressed, decompressed};

/// A file with a coded stream.
fn file() -> (Vec<u8>, Vec<u8>) {
    let bytes = b"the citizen and the word of the citizen".repeat(3);
    let (file, summary) = compressed(&Compressor::new(&TINY, "tiny", None).unwrap(), &bytes);
    assert!(summary.compressed_bytes < summary.bytes, "a stream that is not stored");
    (bytes, file)
}

#[test]
fn every_flipped_bit_is_noticed() {
    let (_, file) = file();
    for bit in 0..8 * file.len() {
        let mut damaged = file.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let refusal = decompressed(&TINY, &damaged).unwrap_err();
        // A length that was changed makes the checksum stand elsewhere, perhaps behind the end.
        let is_told = match bit / 8 {
            0..4 => matches!(refusal, CompressionError::NotCompressed),
            4 => matches!(refusal, CompressionError::Version { .. }),
            _ => matches!(refusal, CompressionError::Damaged { .. } | CompressionError::Truncated),
        };
        assert!(is_told && !refusal.is_usage(), "bit {bit}: {refusal}");
    }
}

#[test]
fn every_beginning_is_truncated() {
    let (_, file) = file();
    for length in 0..file.len() {
        let refusal = decompressed(&TINY, &file[..length]).unwrap_err();
        match length {
            0..4 => assert!(matches!(refusal, CompressionError::NotCompressed), "{length}: {refusal}"),
            _ => assert_eq!(refusal.to_string(), "the file is truncated", "{length}"),
        }
    }
}

#[test]
fn what_follows_the_end_is_refused() {
    let (_, mut file) = file();
    file.push(0);
    let refusal = decompressed(&TINY, &file).unwrap_err();
    assert_eq!(refusal.to_string(), "the file is damaged: there are bytes after its end");
}

#[test]
fn later_versions_are_told() {
    let (_, file) = file();
    let with = |place: usize, value: u8| {
        let mut other = file.clone();
        other[place] = value;
        decompressed(&TINY, &other).unwrap_err().to_string()
    };
    assert_eq!(
        with(4, 2),
        "the file has version 2 of the format, and this program reads version 1; use a newer program"
    );
    // The profile is covered by the header's checksum, so it is written whole.
    assert_eq!(with(5, 7), "the file is damaged: the checksum of its header differs");
}
