//! Bounds and multiples of numbers, rewritten into forms that the library enforces exactly.
//!
//! llguidance 1.9.1 reads numbers as 64-bit floats and generates a regular expression for their digits. This
//! has three defects:
//!
//! - An exclusive whole bound becomes inclusive if the other bound has the same whole part
//!   (`rx_float_range`).
//! - Multiples are written with all their decimals, which an upper bound may forbid.
//! - Dividing bounds by `multipleOf` introduces rounding errors (`check_number_bounds`).

use serde_json::{Map, Number, Value, json};

use super::places::children;

/// 2^53, the magnitude up to which 64-bit floats represent every integer.
pub(super) const LARGEST_EXACT: f64 = 9_007_199_254_740_992.0;
/// [`LARGEST_EXACT`] as an integer.
const LARGEST_WHOLE: u128 = 1 << f64::MANTISSA_DIGITS;
/// Maximum `multipleOf`, in units of its last decimal place.
///
/// The library checks numbers digit by digit and needs a state for each remainder.
const MAX_MULTIPLE: i128 = 10_000;
/// Maximum number of decimal places in a `multipleOf`.
///
/// The library computes remainders of ten units in 32 bits.
const MAX_MULTIPLE_DECIMALS: u32 = 8;
/// Maximum common multiple of `multipleOf` values that are combined.
///
/// The unit is the last decimal place. The library multiplies two such values in 32 bits.
const MAX_COMBINED: i128 = 65_535;
/// Maximum number of decimal places in a bound.
///
/// Each decimal place adds three levels to a regular expression, which is limited to 250 levels.
const MAX_DECIMALS: u32 = 75;
/// 10^15; decimal digits below this limit survive the conversion to a 64-bit float.
const EXACT_DIGITS: i128 = 1_000_000_000_000_000;
/// Minimum of positive numbers, used where the library would not exclude 0.
const SMALLEST: f64 = 1e-60;
/// Keywords that bound numbers.
const BOUNDS: [&str; 4] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];

type KeywordError = (&'static str, String);

/// Properties of all the number limits in a schema.
pub(super) struct NumberContext {
    /// Whether the library may combine limits from several subschemas.
    merges: bool,
    /// Number of subschemas that restrict numbers.
    limiting: usize,
    /// Whether a bound other than 0 is between -1 and 1.
    has_small_bound: bool,
    /// Common multiple of all `multipleOf` values, in units of the smallest decimal place.
    ///
    /// `None` if the common multiple is too large.
    combined: Option<i128>,
}

impl NumberContext {
    pub(super) fn of(schemas: &[&Map<String, Value>], merges: bool) -> Self {
        let limits = |schema: &&&Map<String, Value>| {
            let listed = ["const", "enum"].iter().any(|key| schema.get(*key).is_some_and(has_number));
            listed || schema.contains_key("multipleOf") || BOUNDS.iter().any(|key| schema.contains_key(*key))
        };
        let bounds =
            schemas.iter().flat_map(|schema| BOUNDS.iter().filter_map(|key| schema.get(*key)?.as_f64()));
        let multiples: Vec<Decimal> =
            schemas.iter().filter_map(|schema| Decimal::of(schema.get("multipleOf")?.as_f64()?)).collect();
        Self {
            merges,
            limiting: schemas.iter().filter(limits).count(),
            has_small_bound: bounds.into_iter().any(|bound| bound != 0.0 && bound.abs() < 1.0),
            combined: common_multiple(&multiples),
        }
    }
}

fn has_number(value: &Value) -> bool {
    value.is_number() || children(value).into_iter().any(|(_, inner)| has_number(inner))
}

/// Whether the library writes this `const` or `enum` number digit for digit.
pub(super) fn is_written_exactly(number: &Number) -> bool {
    match whole(number) {
        Some(whole) => is_exact_integer(whole),
        None => number.as_f64().is_some_and(|number| number.abs() < LARGEST_EXACT),
    }
}

/// Rewrites a schema's number limits.
///
/// # Errors
/// The keyword and the reason, if the library would not enforce a limit.
pub(super) fn rewrite(schema: &mut Map<String, Value>, context: &NumberContext) -> Result<(), KeywordError> {
    // The library itself reports bounds that are not numbers.
    let is_limit = |value: &Value| value.is_number() || value.is_boolean();
    if BOUNDS.iter().any(|key| schema.get(*key).is_some_and(|value| !is_limit(value))) {
        return Ok(());
    }
    let is_integer = is_integer_only(schema.get("type"));
    for keyword in BOUNDS {
        if let Some(Value::Number(number)) = schema.get(keyword) {
            check_bound(keyword, number, is_integer)?;
        }
    }
    exclusive_as_numbers(schema);
    let multiple = match schema.get("multipleOf") {
        Some(Value::Number(number)) => Some(multiple_of(number, schema, is_integer, context)?),
        _ => None,
    };
    match multiple {
        // Integers need a whole multiple. The library itself rounds the bounds.
        Some(multiple) if is_integer => {
            let whole = multiple.digits / gcd(multiple.digits, power_of_ten(multiple.decimals).unwrap_or(1));
            schema.insert("multipleOf".into(), json!(i64::try_from(whole).unwrap_or(i64::MAX)));
        }
        Some(multiple) => {
            let number = multiple.for_library().ok_or_else(|| {
                (
                    "multipleOf",
                    format!(
                        "{} cannot be represented exactly; \
                    use a whole number",
                        multiple.to_f64()
                    ),
                )
            })?;
            schema.insert("multipleOf".into(), json!(number));
            bounds_between_multiples(schema, multiple)?;
        }
        None if is_integer => {}
        None => exclude_whole_bounds(schema, context),
    }
    Ok(())
}

/// Whether `type` allows integers but no other numbers.
fn is_integer_only(types: Option<&Value>) -> bool {
    let has = |name: &str| match types {
        Some(Value::String(only)) => only == name,
        Some(Value::Array(types)) => types.iter().any(|other| other == name),
        _ => false,
    };
    has("integer") && !has("number")
}

fn check_bound(keyword: &'static str, number: &Number, is_integer: bool) -> Result<(), KeywordError> {
    let value = number.as_f64().unwrap_or(f64::INFINITY);
    let is_exclusive = keyword.starts_with("exclusive");
    let is_kept = match whole(number) {
        _ if value.abs() < LARGEST_EXACT => true,
        Some(whole) if whole.unsigned_abs() == LARGEST_WHOLE => !is_exclusive,
        Some(whole) if is_integer && !is_exclusive => {
            is_exact_integer(whole) || keyword == "maximum" && whole == i128::from(i64::MAX)
        }
        _ => false,
    };
    if !is_kept {
        return Err((
            keyword,
            format!(
                "expected at most {LARGEST_EXACT} in magnitude, found {number}; \
                 remove the bound if every number of the type satisfies it"
            ),
        ));
    }
    match Decimal::of(value) {
        Some(decimal) if decimal.decimals <= MAX_DECIMALS => Ok(()),
        _ => Err((keyword, format!("expected at most {MAX_DECIMALS} decimal places, found {number}"))),
    }
}

/// Converts a number written without a fraction or exponent to an integer.
fn whole(number: &Number) -> Option<i128> {
    number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from))
}

/// Whether the library stores this integer exactly, both as a 64-bit float and as an `i64`.
fn is_exact_integer(whole: i128) -> bool {
    let magnitude = whole.unsigned_abs();
    let digits = magnitude.checked_shr(magnitude.trailing_zeros()).unwrap_or(0);
    digits < LARGEST_WHOLE && magnitude < u128::from(i64::MAX.unsigned_abs())
}

/// Converts draft 4's `exclusiveMinimum: true` to a numeric bound.
///
/// The library may otherwise interpret `exclusiveMinimum` and `minimum` separately.
fn exclusive_as_numbers(schema: &mut Map<String, Value>) {
    for (exclusive, inclusive) in [("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")] {
        if let Some(Value::Bool(is_exclusive)) = schema.get(exclusive).cloned() {
            schema.shift_remove(exclusive);
            if is_exclusive && let Some(bound) = schema.shift_remove(inclusive) {
                schema.insert(exclusive.into(), bound);
            }
        }
    }
}

/// Reads and validates the schema's `multipleOf`.
fn multiple_of(
    number: &Number,
    schema: &Map<String, Value>,
    is_integer: bool,
    context: &NumberContext,
) -> Result<Decimal, KeywordError> {
    let wrong = |what: String| Err(("multipleOf", what));
    let too_large =
        || format!("expected at most {MAX_MULTIPLE} when written without the decimal point, found {number}");
    let Some(multiple) = Decimal::of(number.as_f64().unwrap_or(f64::INFINITY)) else {
        return wrong(too_large());
    };
    if multiple.digits <= 0 {
        return wrong(format!("expected a number above 0, found {number}"));
    }
    if multiple.digits > MAX_MULTIPLE && !(is_integer && multiple.decimals > 0) {
        return wrong(too_large());
    }
    if is_integer {
        let whole =
            power_of_ten(multiple.decimals).map(|power| multiple.digits / gcd(multiple.digits, power));
        return match whole {
            Some(whole) if whole <= MAX_MULTIPLE => Ok(multiple),
            _ => wrong(too_large()),
        };
    }
    if multiple.decimals > MAX_MULTIPLE_DECIMALS {
        return wrong(format!("expected at most {MAX_MULTIPLE_DECIMALS} decimal places, found {number}"));
    }
    let is_listed = ["const", "enum"].iter().any(|key| schema.contains_key(*key));
    if multiple.decimals > 0 && (is_listed || context.merges && context.limiting > 1) {
        return wrong(format!(
            "{number} has a fraction, so it cannot be combined with other limits; put all limits of the number into one schema without const, enum, allOf, anyOf, oneOf and $ref"
        ));
    }
    if context.merges && context.limiting > 1 && context.combined.is_none() {
        return wrong(format!(
            "{number} and other multiples have no common multiple up to {MAX_COMBINED}; use them in separate schemas"
        ));
    }
    Ok(multiple)
}

/// Moves each bound so that the library accepts exactly the multiples within the original bounds.
///
/// Each of these multiples then has at least one accepted spelling.
fn bounds_between_multiples(schema: &mut Map<String, Value>, multiple: Decimal) -> Result<(), KeywordError> {
    let mut first = None;
    let mut last = None;
    for keyword in BOUNDS {
        let Some(number) = schema.get(keyword).and_then(Value::as_f64) else { continue };
        let too_long =
            || (keyword, format!("{number} has too many digits for a bound combined with `multipleOf`"));
        let bound = Decimal::of(number).ok_or_else(too_long)?;
        let scaled = |digits: i128, decimals: u32| digits.checked_mul(power_of_ten(decimals)?);
        let dividend = scaled(bound.digits, multiple.decimals).ok_or_else(too_long)?;
        let divisor = scaled(multiple.digits, bound.decimals).ok_or_else(too_long)?;
        let (below, is_multiple) = (dividend.div_euclid(divisor), dividend % divisor == 0);
        let is_included = is_multiple && !keyword.starts_with("exclusive");
        if keyword.ends_with("inimum") {
            let index = if is_included { below } else { below + 1 };
            first = first.max(Some(index));
        } else {
            let index = if is_multiple && !is_included { below - 1 } else { below };
            last = Some(last.map_or(index, |last: i128| last.min(index)));
        }
        schema.shift_remove(keyword);
    }
    let mut insert = |keyword: &'static str, bound: Decimal| {
        if bound.digits.abs() >= EXACT_DIGITS {
            return Err((keyword, "too many digits for a bound combined with `multipleOf`".to_owned()));
        }
        schema.insert(keyword.into(), json!(bound.to_f64()));
        Ok(())
    };
    match (first, last) {
        // Keep the schema unsatisfiable, so that the library reports it.
        (Some(first), Some(last)) if first > last => {
            insert("minimum", Decimal { digits: 1, decimals: 0 })?;
            insert("maximum", Decimal { digits: 0, decimals: 0 })?;
        }
        // The library may round one of two equal bounds to a different multiple.
        (Some(first), Some(last)) if first == last => {
            insert("minimum", multiple.times(first))?;
            insert("maximum", multiple.times(first))?;
            schema.shift_remove("multipleOf");
        }
        _ => {
            first.map_or(Ok(()), |first| insert("minimum", multiple.limit(-first).negative()))?;
            last.map_or(Ok(()), |last| insert("maximum", multiple.limit(last)))?;
            let has_both_signs = first.is_none_or(|first| first < 0) && last.is_none_or(|last| last >= 0);
            if multiple.needs_all_decimals() && has_both_signs && (first.is_some() || last.is_some()) {
                split_at_zero(schema, multiple);
            }
        }
    }
    Ok(())
}

/// Splits the range into negative and non-negative multiples.
///
/// The library would otherwise split the range itself and forbid trailing zeros in numbers between -1 and 0.
fn split_at_zero(schema: &mut Map<String, Value>, multiple: Decimal) {
    let mut negative = json!({ "type": "number", "maximum": multiple.limit(-1).to_f64() });
    let mut other = json!({ "type": "number", "minimum": 0 });
    for (part, keyword) in [(&mut negative, "minimum"), (&mut other, "maximum")] {
        if let Some(bound) = schema.shift_remove(keyword) {
            part[keyword] = bound;
        }
    }
    if let Some(multiple) = schema.shift_remove("multipleOf") {
        negative["multipleOf"] = multiple.clone();
        other["multipleOf"] = multiple;
    }
    let allows = |name: &str| match schema.get("type") {
        None => true,
        Some(Value::Array(types)) => types.iter().any(|known| known == name),
        Some(only) => only == name,
    };
    let others = ["null", "boolean", "string", "array", "object"].into_iter().filter(|name| allows(name));
    let others: Vec<&str> = others.collect();
    let parts = [negative, other].into_iter().chain((!others.is_empty()).then(|| json!({ "type": others })));
    let parts: Vec<Value> = parts.collect();
    if let Value::Array(all) = schema.entry("allOf").or_insert_with(|| json!([])) {
        all.push(json!({ "anyOf": parts }));
    }
}

/// Replaces exclusive whole bounds with inclusive bounds at the next float.
///
/// The library may treat exclusive whole bounds as inclusive.
fn exclude_whole_bounds(schema: &mut Map<String, Value>, context: &NumberContext) {
    for (exclusive, inclusive, opposite, sign) in [
        ("exclusiveMinimum", "minimum", ["maximum", "exclusiveMaximum"], 1.0),
        ("exclusiveMaximum", "maximum", ["minimum", "exclusiveMinimum"], -1.0),
    ] {
        let Some(bound) = schema.get(exclusive).and_then(Value::as_f64) else { continue };
        // The library handles fractional bounds, negative minimums and positive maximums correctly.
        if bound.fract() != 0.0 || bound * sign < 0.0 {
            continue;
        }
        let is_near =
            opposite.iter().filter_map(|key| schema.get(*key)?.as_f64()).any(|other| other * sign < 1.0);
        let next = match bound {
            0.0 if !(is_near || context.merges && context.has_small_bound) => continue,
            0.0 => SMALLEST * sign,
            _ => f64::from_bits(bound.to_bits() + 1),
        };
        let stricter =
            schema.get(inclusive).and_then(Value::as_f64).filter(|other| other * sign > next * sign);
        schema.insert(inclusive.into(), json!(stricter.unwrap_or(next)));
        schema.shift_remove(exclusive);
    }
}

/// A float's shortest decimal representation: `digits` divided by ten to the power of `decimals`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Decimal {
    digits: i128,
    decimals: u32,
}

impl Decimal {
    /// Decimal representation of a float; `None` if it has more than 38 digits.
    fn of(number: f64) -> Option<Self> {
        let text = format!("{number:e}");
        let (mantissa, exponent) = text.split_once('e')?;
        let exponent: i32 = exponent.parse().ok()?;
        let fraction = mantissa.split_once('.').map_or(0, |(_, fraction)| fraction.len());
        let digits: i128 = mantissa.replace('.', "").parse().ok()?;
        let decimals = i32::try_from(fraction).ok()? - exponent;
        match u32::try_from(decimals) {
            Ok(decimals) => Some(Self { digits, decimals }),
            Err(_) => {
                let digits = digits.checked_mul(power_of_ten(decimals.unsigned_abs())?)?;
                Some(Self { digits, decimals: 0 })
            }
        }
    }

    fn to_f64(self) -> f64 {
        format!("{}e-{}", self.digits, self.decimals).parse().unwrap_or(f64::NAN)
    }

    fn negative(self) -> Self {
        Self { digits: -self.digits, ..self }
    }

    /// This number times `index`.
    fn times(self, index: i128) -> Self {
        Self { digits: self.digits * index, ..self }
    }

    /// Whether the library writes multiples of this number with all their decimals.
    fn needs_all_decimals(self) -> bool {
        self.digits >= 10 && self.decimals > 0
    }

    /// Returns an upper bound that allows the multiples up to `index`.
    ///
    /// The library rejects prefixes of an upper bound, such as 0.7 for a bound of 0.75. If `multipleOf` is
    /// ten units or more, it writes multiples with all their decimals.
    ///
    /// Above 0, the bound is therefore the multiple itself if multiples may be written without trailing
    /// zeros. Otherwise, the bound has one decimal place fewer than the multiples. Below 0, the bound is
    /// halfway between two multiples.
    fn limit(self, index: i128) -> Self {
        let digits = self.digits * index;
        if index < 0 {
            Self { digits: 5 * (2 * digits + self.digits), decimals: self.decimals + 1 }
        } else if index == 0 || !self.needs_all_decimals() {
            self.times(index)
        } else {
            Self { digits: digits / 10 + 1, decimals: self.decimals - 1 }
        }
    }

    /// Finds a nearby float that the library reads as exactly this decimal.
    ///
    /// The library repeatedly multiplies the float by ten, with rounding.
    fn for_library(self) -> Option<f64> {
        const NEIGHBORS: u64 = 16;
        let bits = self.to_f64().to_bits();
        let mut near = (0..=NEIGHBORS).flat_map(|step| [bits + step, bits - step]).map(f64::from_bits);
        near.find(|number| read_by_library(*number) == Some(self))
    }
}

/// Returns the decimal that the library reads from a `multipleOf` (`Decimal::try_from`, 1.9.1).
fn read_by_library(number: f64) -> Option<Decimal> {
    let (mut value, mut decimals) = (number, 0);
    while value.fract() != 0.0 {
        value *= 10.0;
        decimals += 1;
    }
    let mut digits: i128 =
        (value <= f64::from(u32::MAX)).then(|| format!("{value:.0}").parse().ok()).flatten()?;
    while decimals > 0 && digits % 10 == 0 {
        digits /= 10;
        decimals -= 1;
    }
    Some(Decimal { digits, decimals })
}

fn common_multiple(multiples: &[Decimal]) -> Option<i128> {
    let decimals = multiples.iter().map(|multiple| multiple.decimals).max().unwrap_or(0);
    multiples.iter().try_fold(1, |common: i128, multiple| {
        let digits = multiple.digits.checked_mul(power_of_ten(decimals - multiple.decimals)?)?;
        let common = (common / gcd(common, digits).max(1)).checked_mul(digits)?;
        (common <= MAX_COMBINED).then_some(common)
    })
}

fn gcd(a: i128, b: i128) -> i128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn power_of_ten(exponent: u32) -> Option<i128> {
    10_i128.checked_pow(exponent)
}
