//! The stories that the built-in model learns from.
mod check;
mod choices;
mod corpus;
mod diversity;
mod exercises;
mod grammar;
mod lexicon;
mod plots;
mod probes;
mod story;
mod teller;
mod world;

pub use check::{Fault, faults};
pub use choices::Choices;
pub use corpus::{Corpus, Line, Split};
pub use diversity::{Figure, diversity};
pub use exercises::{Exercise, is_held_out, random_rows};
pub use lexicon::{Lexicon, Noun, Verb, lexicon};
pub use story::Document;
pub use teller::{Bound, Id, Teller};
pub use probes::{Probe, probes};
pub use world::{Impossible, Place, World};

/// The story of a seed.
///
/// # Errors
/// When something happens in it that cannot: a fault of a plot.
pub fn story(seed: u64) -> Result<Document, Impossible> {
    story::Story::of(seed)
}
