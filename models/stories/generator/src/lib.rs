//! The stories and exercises that the built-in model learns from, made from rules and a seed.
//!
//! A world is simulated ([`World`]: who is where, who has what), a [`Teller`] turns what happens into sentences, and every choice is counted
//! ([`Choices`]), so that a text has a known probability. [`Corpus`] mixes stories with [`Exercise`]s and rows of random tokens.
//!
//! ```
//! let story = story_generator::story(4)?;
//! assert!(story_generator::faults(&story.text).is_empty());
//! assert_eq!(story, story_generator::story(4)?);
//! # Ok::<(), story_generator::Impossible>(())
//! ```

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
pub use corpus::{Corpus, Lesson, Line, Split, tokenizer_texts};
pub use diversity::{Figure, diversity};
pub use exercises::{Exercise, is_held_out, random_rows, short_rows};
pub use lexicon::{Lexicon, Noun, Verb, lexicon};
pub use probes::{Probe, probes};
pub use story::Document;
pub use teller::{Bound, Id, Teller};
pub use world::{Impossible, Place, World};

/// The story of a seed.
///
/// # Errors
/// When something happens in it that cannot: a fault of a plot.
pub fn story(seed: u64) -> Result<Document, Impossible> {
    story::Story::of(seed)
}
