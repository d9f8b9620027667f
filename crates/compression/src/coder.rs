//! A range coder: intervals of symbols to bytes and back, without any floating point.
//!
//! The state is the interval `[low, low + range)` of 64-bit numbers. A symbol takes its share of it, and once fewer than 57 bits of
//! the range are left, its highest byte is settled and written. A sum that overflows `low` is carried into the bytes that are
//! written already. Source: Martin, "Range encoding" (1979), with the range as wide as the machine's integers: shares of 2³² then
//! lose less than 2⁻²⁴ of a symbol's size.

/// Shares are counted in `2^TOTAL_BITS`-ths.
pub(crate) const TOTAL_BITS: u32 = 32;
/// The whole, of which each symbol has its [`Interval`].
pub(crate) const TOTAL: u64 = 1 << TOTAL_BITS;
/// A range has at least so many, after [`Encoder::push`] and [`Decoder::take`].
const SMALLEST_RANGE: u64 = 1 << 56;
/// Bits of the highest byte.
const BYTE: u32 = 8;
const HIGHEST_BYTE: u32 = u64::BITS - BYTE;

/// The share of a symbol: from `start` on, `size` of [`TOTAL`], at least 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Interval {
    pub(crate) start: u64,
    pub(crate) size: u64,
}

impl Interval {
    /// Bits that a symbol of this share costs.
    pub(crate) fn bits(self) -> f64 {
        f64::from(TOTAL_BITS) - libm::log2(self.size as f64)
    }
}

/// Writes symbols.
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

    /// Adds a symbol.
    pub(crate) fn push(&mut self, Interval { start, size }: Interval) {
        let share = self.range >> TOTAL_BITS;
        self.add(share * start);
        self.range = share * size;
        while self.range < SMALLEST_RANGE {
            self.shift();
        }
    }

    /// The bytes of all symbols: as few as name a number of the last interval, where zeros follow.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        let mut bytes = 0;
        // The fewest high bytes, with zeros after them, at or above `low` and still within the range.
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
            // The interval never reaches beyond the whole, so a byte below 255 precedes those that become 0.
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

/// Reads symbols: any bytes are some, and zeros follow their end.
#[derive(Debug)]
pub(crate) struct Decoder<'a> {
    /// What was read, counted from the low end of the interval.
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

    /// Where in the whole the next symbol is: below [`TOTAL`], within its interval.
    pub(crate) fn place(&self) -> u64 {
        // What the division of the range leaves over belongs to no symbol; bytes that are not an encoder's may be there.
        (self.above_low / (self.range >> TOTAL_BITS)).min(TOTAL - 1)
    }

    /// Takes the symbol that was found there.
    pub(crate) fn take(&mut self, Interval { start, size }: Interval) {
        let share = self.range >> TOTAL_BITS;
        self.above_low -= share * start;
        self.range = share * size;
        while self.range < SMALLEST_RANGE {
            self.range <<= BYTE;
            self.read_byte();
        }
    }

    fn read_byte(&mut self) {
        let byte = self.rest.next().copied().unwrap_or(0);
        self.above_low = self.above_low << BYTE | u64::from(byte);
    }
}

const _: () = assert!(HIGHEST_BYTE == 56 && SMALLEST_RANGE == 1 << HIGHEST_BYTE);

#[cfg(test)]
mod tests {
    use candle_gpt2_arithmetic::RandomStream;

    use super::*;

    /// Symbols with shares, as `(start, size)`.
    fn encoded(symbols: &[(u64, u64)]) -> Vec<u8> {
        let mut encoder = Encoder::new();
        symbols.iter().for_each(|&(start, size)| encoder.push(Interval { start, size }));
        encoder.finish()
    }

    fn assert_decodes(symbols: &[(u64, u64)], bytes: &[u8]) {
        let mut decoder = Decoder::new(bytes);
        for (index, &(start, size)) in symbols.iter().enumerate() {
            let place = decoder.place();
            assert!((start..start + size).contains(&place), "{index}: {place} is not in {start}+{size}");
            decoder.take(Interval { start, size });
        }
    }

    #[test]
    fn symbols_of_known_shares_are_known_bytes() {
        assert_eq!(encoded(&[]), [0u8; 0]);
        assert_eq!(encoded(&[(0, 1 << 31)]), [0u8; 0], "zeros follow");
        assert_eq!(encoded(&[(1 << 31, 1 << 31)]), [0x80]);
        assert_eq!(encoded(&[(0x1234_5678, 1)]), [0x12, 0x34, 0x56, 0x78]);
        // Two quarters: the third of the second one begins at 1/4 + 1/4 · 1/2 of the whole, less what the shares lose.
        assert_eq!(encoded(&[(1 << 30, 1 << 30), (1 << 31, 1 << 30)]), [0x60]);
        // What the shares lose adds up: all 256 symbols are in the interval of a number of four bytes.
        assert_eq!(encoded(&[(0xab << 24, 1 << 24); 256]), [0xab; 4]);
        let symbols = (1u64..7).map(|n| (n * 2_654_435_761 % (TOTAL - 1_000_003), 1_000_003));
        let expected = [0x9e, 0x3b, 0x15, 0x84, 0xd6, 0x43, 0x42, 0x39, 0x78];
        assert_eq!(encoded(&symbols.collect::<Vec<_>>()), expected);
    }

    #[test]
    fn a_carry_goes_through_bytes_of_255() {
        // The upper edge of the whole, and then of each interval: the low end is full of 255s, and what follows carries or not.
        let edge = [(TOTAL - 1, 1), (TOTAL - 1, 1), (TOTAL - 1, 1), (TOTAL - 3, 3), (TOTAL - 1, 1)];
        assert_decodes(&edge, &encoded(&edge));
        let middle = [((1 << 31) - 1, 2), (1 << 31, 1 << 31), (0, 1 << 31), (TOTAL - 1, 1), (1 << 31, 1)];
        assert_decodes(&middle, &encoded(&middle));
    }

    #[test]
    fn random_symbols_come_back_and_cost_what_their_shares_say() {
        let mut random = RandomStream::new(1);
        for round in 0..200u64 {
            let mut draw = |below: u64| random.below(below);
            let symbols: Vec<(u64, u64)> = (0..draw(300) + 1)
                .map(|_| {
                    // Shares of all sizes: of the smallest, of nearly the whole.
                    let size = (draw(TOTAL) >> draw(32)).max(1);
                    let size = if draw(4) == 0 { TOTAL - size } else { size }.max(1);
                    (draw(TOTAL - size + 1), size)
                })
                .collect();
            let bytes = encoded(&symbols);
            assert_decodes(&symbols, &bytes);
            let bits: f64 = symbols.iter().map(|&(start, size)| Interval { start, size }.bits()).sum();
            // The end takes up to two bytes, and a symbol loses less than 2⁻²⁴ of its share.
            let most = bits / 8.0 + 2.0;
            assert!(bytes.len() as f64 <= most, "{round}: {} bytes for {bits} bits", bytes.len());
        }
    }

    #[test]
    fn any_bytes_decode_to_something() {
        for bytes in [&[][..], &[0xff; 9], &[0xff; 40], &[0x80]] {
            let mut decoder = Decoder::new(bytes);
            for _ in 0..100 {
                let place = decoder.place();
                assert!(place < TOTAL);
                decoder.take(Interval { start: place, size: 1 });
            }
        }
    }
}
