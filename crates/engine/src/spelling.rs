//! How the faces of the project write the names of options, so that one rule can be told in all of them.

/// Words that languages keep for themselves.
const RESERVED: [&str; 3] = ["as", "from", "with"];

/// How a face writes the names of its options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spelling {
    /// `--top-k`, as at a command line.
    Flags,
    /// `top_k`, as a keyword or a field; `with_` where a language keeps the word for itself.
    Keywords,
}

impl Spelling {
    /// The option of this name, which is written with underscores.
    ///
    /// ```
    /// use candle_gpt2_engine::Spelling;
    ///
    /// assert_eq!(Spelling::Flags.of("top_k"), "--top-k");
    /// assert_eq!(Spelling::Keywords.of("top_k"), "top_k");
    /// assert_eq!(Spelling::Keywords.of("from"), "from_");
    /// ```
    pub fn of(self, option: &str) -> String {
        match self {
            Self::Flags => format!("--{}", option.replace('_', "-")),
            Self::Keywords if RESERVED.contains(&option) => format!("{option}_"),
            Self::Keywords => option.to_owned(),
        }
    }
}
