//! CRC-32C (Castagnoli), the checksum of TensorFlow checkpoints.
//!
//! Processes eight bytes per step with eight tables. Source: RFC 3720, appendix B.4;
//! `tensorflow/core/lib/hash/crc32c.h` for the mask.

/// Generator polynomial in reversed bit order.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// Checksums of a byte followed by 0 to 7 zero bytes.
const TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0u32;
    while byte < 256 {
        let mut crc = byte;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ POLYNOMIAL } else { crc >> 1 };
            bit += 1;
        }
        tables[0][byte as usize] = crc;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[table - 1][byte];
            tables[table][byte] = (before >> 8) ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
}

/// Extends the checksum `crc` of preceding data by `bytes`; the checksum of empty data is 0.
pub(crate) fn extended(crc: u32, bytes: &[u8]) -> u32 {
    let mut crc = !crc;
    let (eights, rest) = bytes.as_chunks::<8>();
    for eight in eights {
        let both = u64::from_le_bytes(*eight) ^ u64::from(crc);
        let parts = both.to_le_bytes();
        crc = (0..8).fold(0, |sum, index| sum ^ TABLES[7 - index][usize::from(parts[index])]);
    }
    for byte in rest {
        crc = (crc >> 8) ^ TABLES[0][usize::from(crc.to_le_bytes()[0] ^ byte)];
    }
    !crc
}

/// Recovers the checksum from TensorFlow's masked form.
pub(crate) fn unmasked(masked: u32) -> u32 {
    masked.wrapping_sub(0xa282_ead8).rotate_right(17)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks test vectors from RFC 3720 and the standard check value.
    #[test]
    fn checksums_match_known_vectors() {
        assert_eq!(extended(0, b"123456789"), 0xe306_9283);
        assert_eq!(extended(0, &[0; 32]), 0x8a91_36aa);
        assert_eq!(extended(0, &[0xff; 32]), 0x62a8_ab43);
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(extended(0, &ascending), 0x46dd_794e);
        for cut in 0..=32 {
            assert_eq!(extended(extended(0, &ascending[..cut]), &ascending[cut..]), 0x46dd_794e);
        }
        assert_eq!(unmasked((0xe306_9283u32.rotate_right(15)).wrapping_add(0xa282_ead8)), 0xe306_9283);
    }
}
