//! Lookup of protocols by name.

use crate::protocol::PLACE_OF_NUMBER;
use crate::protocols::ALL;
use crate::{EvaluationError, Protocol};

/// Maximum number of suggestions for an unknown name.
const NEAREST_NAMES: usize = 3;
/// Aliases for `text:bits`.
const BITS: [&str; 3] = ["bpb", "bits-per-byte", "bits_per_byte"];
/// Minimum similarity of a suggested name.
const NEAR: f64 = 0.5;

/// Returns all protocols, grouped by task.
///
/// See [`named`] for an example.
pub fn protocols() -> &'static [&'static Protocol] {
    ALL
}

/// Returns the protocol with this name, and the number at the end of the name.
///
/// The name of a task alone selects its first protocol. `bpb` is an alias of `text:bits`.
///
/// # Errors
/// Fails if the name is unknown; the error suggests the task's protocols or similar names. Also fails if
/// a required number is missing or invalid.
///
/// ```
/// use candle_gpt2_evaluation::{named, protocols};
///
/// let (protocol, number) = named("wikitext:hf-512")?;
/// assert_eq!((protocol.name, protocol.task(), number), ("wikitext:hf-N", "wikitext", Some(512)));
/// assert!(protocols().iter().any(|known| known.name == "hellaswag:lm-eval"));
/// assert_eq!((named("wikitext")?.0.name, named("bpb")?.0.name), ("wikitext:lm-eval", "text:bits"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn named(name: &str) -> Result<(&'static Protocol, Option<usize>), EvaluationError> {
    let name = if BITS.contains(&name) { "text:bits" } else { name };
    if let Some(default) = protocols().iter().find(|protocol| protocol.task() == name) {
        return Ok((default, None));
    }
    let of_name = |protocol: &&&Protocol| protocol.name == name && !name.ends_with(PLACE_OF_NUMBER);
    if let Some(protocol) = protocols().iter().find(of_name) {
        return Ok((protocol, None));
    }
    let with_number =
        protocols().iter().filter(|protocol| protocol.parameter.is_some()).find_map(|protocol| {
            let rest = name.strip_prefix(protocol.stem())?;
            (rest.is_empty() || rest.starts_with('-'))
                .then(|| (protocol, rest.strip_prefix('-').unwrap_or(rest)))
        });
    let Some((protocol, digits)) = with_number else { return Err(unknown(name)) };
    match digits.parse() {
        Ok(number) if number > 0 && digits.bytes().all(|digit| digit.is_ascii_digit()) => {
            Ok((protocol, Some(number)))
        }
        _ => Err(EvaluationError::Setting {
            what: protocol.name.to_owned(),
            expected: format!("a number of tokens at the end of the name, such as `{}-512`", protocol.stem()),
            found: format!("`{name}`"),
        }),
    }
}

/// Suggests protocols for an unknown name: similar names, or descriptions that contain the name.
fn nearest(name: &str) -> Vec<&'static str> {
    let words = name.to_lowercase().replace(['-', '_'], " ");
    let mut near: Vec<(f64, &str)> = protocols()
        .iter()
        .map(|protocol| {
            // A short name may be a misspelled task, and a longer name a misspelled protocol.
            let similarity = |known: &str| strsim::normalized_damerau_levenshtein(name, known);
            let is_described = words.contains(' ') && protocol.about.contains(&words);
            let described = if is_described { 1.0 } else { 0.0 };
            (similarity(protocol.name).max(similarity(protocol.task())).max(described), protocol.name)
        })
        .filter(|(similarity, _)| *similarity >= NEAR)
        .collect();
    near.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    near.into_iter().take(NEAREST_NAMES).map(|(_, name)| name).collect()
}

/// Creates an error for an unknown name, with the task's protocols or with similar names.
fn unknown(name: &str) -> EvaluationError {
    let quoted = |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let task = name.split(':').next().unwrap_or(name);
    let of_task: Vec<&str> =
        protocols().iter().filter(|protocol| protocol.task() == task).map(|protocol| protocol.name).collect();
    let hint = if of_task.is_empty() {
        match nearest(name).as_slice() {
            [] => "expected a name such as `wikitext:lm-eval` or `text:bits`".to_owned(),
            near => format!("similar names: {}", quoted(near)),
        }
    } else {
        format!("`{task}` has {}", quoted(&of_task))
    };
    EvaluationError::UnknownProtocol { name: name.to_owned(), hint }
}
