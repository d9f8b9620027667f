//! Range coder that converts symbols to bytes and back with integer arithmetic only.
//!
//! The state is the interval `[low, low + range)` of 64-bit numbers. Each symbol narrows it to the symbol's
//! interval. When fewer than 57 bits of the range are left, the highest byte is final and is written. If an
//! addition overflows `low`, the carry is added to the bytes already written.
//!
//! Source: Martin, "Range encoding" (1979). Here the range is as wide as the machine's integers.
//! With frequencies in units of 2⁻³², rounding then loses less than 2⁻²⁴ of each symbol's interval.

/// Number of bits in the total frequency.
pub(crate) const TOTAL_BITS: u32 = 32;
/// Total frequency, divided into one [`Interval`] for each symbol.
pub(crate) const TOTAL: u64 = 1 << TOTAL_BITS;
/// Minimum range after [`Encoder::push`] and [`Decoder::take`].
const MIN_RANGE: u64 = 1 << 56;
/// Number of bits in a byte.
const BYTE: u32 = 8;
const HIGHEST_BYTE: u32 = u64::BITS - BYTE;

/// Interval of a symbol: `size` units out of [`TOTAL`], at least 1, starting at `start`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Interval {
    pub(crate) start: u64,
    pub(crate) size: u64,
}

impl Interval {
    /// Returns the number of bits that the symbol costs.
    pub(crate) fn bits(self) -> f64 {
        f64::from(TOTAL_BITS) - libm::log2(self.size as f64)
    }
}

/// Range encoder.
#[derive(Debug)]
pub(crate) struct Encoder {
    low: u64,
    range: u64,
    written: Vec<u8>,
}

impl Encoder {
    pub(crate) fn new() -> Self {
        Self { low: 0, range: u64::MAX, written: Vec::new() }
    }

    /// Encodes a symbol.
    pub(crate) fn push(&mut self, Interval { start, size }: Interval) {
        let unit = self.range >> TOTAL_BITS;
        self.add(unit * start);
        self.range = unit * size;
        while self.range < MIN_RANGE {
            self.shift();
        }
    }

    /// Returns the encoded bytes of all symbols.
    ///
    /// The result is the shortest prefix that, followed by zeros, is a number in the last interval.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        let mut bytes = 0;
        // Finds the fewest high bytes that, followed by zeros, are at or above `low` and still in the range.
        let above = loop {
            let rest = u64::MAX.checked_shr(BYTE * bytes).unwrap_or(0);
            let above = self.low.wrapping_neg() & rest;
            if above < self.range {
                break above;
            }
            bytes += 1;
        };
        self.add(above);
        (0..bytes).for_each(|_| self.shift());
        let zeros = self.written.iter().rev().take_while(|byte| **byte == 0).count();
        self.written.truncate(self.written.len() - zeros);
        self.written
    }

    fn add(&mut self, number: u64) {
        let (low, has_overflowed) = self.low.overflowing_add(number);
        self.low = low;
        if has_overflowed {
            // The interval stays inside the initial one, so the carry always reaches a byte below 255.
            for byte in self.written.iter_mut().rev() {
                *byte = byte.wrapping_add(1);
                if *byte != 0 {
                    break;
                }
            }
        }
    }

    fn shift(&mut self) {
        let [highest, ..] = self.low.to_be_bytes();
        self.written.push(highest);
        self.low <<= BYTE;
        self.range <<= BYTE;
    }
}

/// Range decoder; accepts any bytes and reads zeros after the last one.
#[derive(Debug)]
pub(crate) struct Decoder<'a> {
    /// Value read so far, relative to the low end of the interval.
    above_low: u64,
    range: u64,
    rest: std::slice::Iter<'a, u8>,
}

impl<'a> Decoder<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        let mut decoder = Self { above_low: 0, range: u64::MAX, rest: bytes.iter() };
        (0..u64::BITS / BYTE).for_each(|_| decoder.read_byte());
        decoder
    }

    /// Returns a position below [`TOTAL`] that lies in the next symbol's interval.
    pub(crate) fn position(&self) -> u64 {
        // Values in the remainder of the range belong to no symbol, but invalid input may contain them.
        (self.above_low / (self.range >> TOTAL_BITS)).min(TOTAL - 1)
    }

    /// Consumes the symbol with this interval.
    pub(crate) fn take(&mut self, Interval { start, size }: Interval) {
        let unit = self.range >> TOTAL_BITS;
        self.above_low -= unit * start;
        self.range = unit * size;
        while self.range < MIN_RANGE {
            self.range <<= BYTE;
            self.read_byte();
        }
    }

    fn read_byte(&mut self) {
        let byte = self.rest.next().copied().unwrap_or(0);
        self.above_low = self.above_low << BYTE | u64::from(byte);
    }
}

const _: () = assert!(HIGHEST_BYTE == 56 && MIN_RANGE == 1 << HIGHEST_BYTE);

#[cfg(test)]
mod tests {
    use candle_gpt2_arithmetic::RandomStream;

    use super::*;

    /// Encodes symbols given as `(start, size)` pairs.
    fn encoded(symbols: &[(u64, u64)]) -> Vec<u8> {
        let mut encoder = Encoder::new();
        symbols.iter().for_each(|&(start, size)| encoder.push(Interval { start, size }));
        encoder.finish()
    }

    fn assert_decodes(symbols: &[(u64, u64)], bytes: &[u8]) {
        let mut decoder = Decoder::new(bytes);
        for (index, &(start, size)) in symbols.iter().enumerate() {
            let position = decoder.position();
            assert!(
                (start..start + size).contains(&position),
                "{index}: {position} is not in {start}+{size}"
            );
            decoder.take(Interval { start, size });
        }
    }

    #[test]
    fn encoding_matches_known_bytes() {
        assert_eq!(encoded(&[]), [0u8; 0]);
        assert_eq!(encoded(&[(0, 1 << 31)]), [0u8; 0], "zeros follow");
        assert_eq!(encoded(&[(1 << 31, 1 << 31)]), [0x80]);
        assert_eq!(encoded(&[(0x1234_5678, 1)]), [0x12, 0x34, 0x56, 0x78]);
        // The second quarter of the range, then the third quarter of that interval, which begins at
        // 1/4 + 1/4 · 1/2 of the range, minus rounding losses.
        assert_eq!(encoded(&[(1 << 30, 1 << 30), (1 << 31, 1 << 30)]), [0x60]);
        // Rounding losses add up, so four bytes followed by zeros lie in the intervals of all 256 symbols.
        assert_eq!(encoded(&[(0xab << 24, 1 << 24); 256]), [0xab; 4]);
        let symbols = (1u64..7).map(|n| (n * 2_654_435_761 % (TOTAL - 1_000_003), 1_000_003));
        let expected = [0x9e, 0x3b, 0x15, 0x84, 0xd6, 0x43, 0x42, 0x39, 0x78];
        assert_eq!(encoded(&symbols.collect::<Vec<_>>()), expected);
    }

    #[test]
    fn carries_propagate_through_0xff_bytes() {
        // Symbols at the upper edge of each interval produce bytes of 255. The next symbol may or may not
        // carry into these bytes.
        let edge = [(TOTAL - 1, 1), (TOTAL - 1, 1), (TOTAL - 1, 1), (TOTAL - 3, 3), (TOTAL - 1, 1)];
        assert_decodes(&edge, &encoded(&edge));
        let middle = [((1 << 31) - 1, 2), (1 << 31, 1 << 31), (0, 1 << 31), (TOTAL - 1, 1), (1 << 31, 1)];
        assert_decodes(&middle, &encoded(&middle));
    }

    #[test]
    fn random_symbols_round_trip_near_their_entropy() {
        let mut random = RandomStream::new(1);
        for round in 0..200u64 {
            let mut draw = |below: u64| random.below(below);
            let symbols: Vec<(u64, u64)> = (0..draw(300) + 1)
                .map(|_| {
                    // Frequencies of all magnitudes, from 1 to nearly the total.
                    let size = (draw(TOTAL) >> draw(32)).max(1);
                    let size = if draw(4) == 0 { TOTAL - size } else { size }.max(1);
                    (draw(TOTAL - size + 1), size)
                })
                .collect();
            let bytes = encoded(&symbols);
            assert_decodes(&symbols, &bytes);
            let bits: f64 = symbols.iter().map(|&(start, size)| Interval { start, size }.bits()).sum();
            // Finishing adds up to two bytes, and rounding costs each symbol less than 2⁻²⁴ of its interval.
            let max_bytes = bits / 8.0 + 2.0;
            assert!(bytes.len() as f64 <= max_bytes, "{round}: {} bytes for {bits} bits", bytes.len());
        }
    }

    #[test]
    fn any_bytes_decode_to_positions_in_range() {
        for bytes in [&[][..], &[0xff; 9], &[0xff; 40], &[0x80]] {
            let mut decoder = Decoder::new(bytes);
            for _ in 0..100 {
                let position = decoder.position();
                assert!(position < TOTAL);
                decoder.take(Interval { start: position, size: 1 });
            }
        }
    }
}
