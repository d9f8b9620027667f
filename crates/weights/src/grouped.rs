//! Human-readable numbers.

/// Formats a number with thousands separators: `124,439,808`.
///
/// ```
/// assert_eq!(candle_gpt2_weights::grouped(124_439_808), "124,439,808");
/// ```
pub fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_thousands() {
        assert_eq!([0, 999, 1000, 124_439_808].map(grouped), ["0", "999", "1,000", "124,439,808"]);
    }
}
