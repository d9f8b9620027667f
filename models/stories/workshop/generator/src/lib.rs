//! Lessons for the built-in model: published stories with replaced names, and generated exercises.
//!
//! [`Stories`] reads the stories. [`Exercise`] and rows of random tokens teach the circuits. [`Corpus`] mixes
//! all of them in the proportions of a [`Lesson`].
//!
//! ```
//! use story_generator::{Corpus, Lesson, Split, Stories};
//!
//! let tales = vec!["Tim had a ball. He gave it to Lily.".to_owned()];
//! let mut stories = Stories::new(1, [tales, Vec::new(), Vec::new()]);
//! let mut corpus = Corpus::new(1, Lesson::Early, Split::Training, 4096, &mut stories);
//! assert!(corpus.next_line().text.is_some());
//! ```

mod choices;
mod corpus;
mod exercises;
mod grammar;
mod lexicon;
mod names;
mod probes;
mod stories;
mod teller;
mod unwanted;

pub use choices::Choices;
pub use corpus::{Corpus, Lesson, Line, tokenizer_texts};
pub use exercises::{Exercise, is_held_out, random_rows, short_rows};
pub use lexicon::{Lexicon, Noun, Verb, lexicon};
pub use probes::{Probe, probes};
pub use stories::{Shelf, Split, Stories};
pub use unwanted::is_unwanted;
