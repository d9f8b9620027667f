//! Names of models and datasets on the Hub.

use super::checked::FilePath;

/// Short names of repositories on the Hub.
const SHORT_NAMES: [(&str, &str); 5] = [
    ("gpt2", "openai-community/gpt2"),
    ("gpt2-medium", "openai-community/gpt2-medium"),
    ("gpt2-large", "openai-community/gpt2-large"),
    ("gpt2-xl", "openai-community/gpt2-xl"),
    ("distilgpt2", "distilbert/distilgpt2"),
];

/// Kind of repository on the Hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Model,
    Dataset,
}

/// A repository on the Hub at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HubName {
    pub(super) kind: Kind,
    pub(super) id: String,
    pub(super) revision: String,
}

impl std::fmt::Display for HubName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.revision.as_str() {
            "main" => f.write_str(&self.id),
            revision => write!(f, "{}@{revision}", self.id),
        }
    }
}

impl HubName {
    /// Parses the name of a model; returns `None` if the text can only be a path.
    ///
    /// The name is `owner/name` or a short name, optionally followed by `@revision`.
    pub(super) fn of_model(text: &str) -> Option<Self> {
        let (name, revision) = text.split_once('@').unwrap_or((text, "main"));
        let id = match SHORT_NAMES.iter().find(|(short, _)| *short == name) {
            Some((_, id)) => *id,
            None => name,
        };
        Self::checked(Kind::Model, id, revision)
    }

    /// Parses `owner/name[@revision]/path`; returns `None` if the text can only be a local path.
    ///
    /// A revision is a single path component. The Hub's own revisions, such as `refs/convert/parquet` and
    /// `refs/pr/1`, have three.
    pub(super) fn of_dataset_file(text: &str) -> Option<(Self, FilePath)> {
        let slash_after = |from: usize| text.get(from..)?.find('/').map(|at| from + at);
        let name = slash_after(0)? + 1;
        let mut end = slash_after(name)?;
        let at = text[name..end].find('@').map(|at| name + at);
        if at
            .is_some_and(|at| ["refs/convert/", "refs/pr/"].iter().any(|own| text[at + 1..].starts_with(own)))
        {
            end = slash_after(slash_after(end + 1)? + 1)?;
        }
        let (id, revision) = at.map_or((&text[..end], "main"), |at| (&text[..at], &text[at + 1..end]));
        Some((Self::checked(Kind::Dataset, id, revision)?, FilePath::new(&text[end + 1..])?))
    }

    fn checked(kind: Kind, id: &str, revision: &str) -> Option<Self> {
        let (owner, repository) = id.split_once('/')?;
        let is_name = |part: &str| {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            !part.is_empty() && !part.starts_with('.') && part.chars().all(is_plain)
        };
        let is_revision = revision.split('/').all(is_name);
        (is_name(owner) && is_name(repository) && is_revision).then(|| Self {
            kind,
            id: id.to_owned(),
            revision: revision.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_names_are_distinguished_from_paths() {
        let parsed =
            |text: &str| HubName::of_model(text).map(|model| format!("{} {}", model.id, model.revision));
        assert_eq!(parsed("gpt2").as_deref(), Some("openai-community/gpt2 main"));
        assert_eq!(parsed("distilgpt2@v1").as_deref(), Some("distilbert/distilgpt2 v1"));
        assert_eq!(parsed("owner/na.me-2").as_deref(), Some("owner/na.me-2 main"));
        assert_eq!(parsed("owner/name@refs/pr/1").as_deref(), Some("owner/name refs/pr/1"));
        for path in
            ["folder", "/abs/path", "./a", "../a", "a/b/c", "a/", "/a", "a b/c", "~/x", "a/b@", "a/b@../c"]
        {
            assert_eq!(parsed(path), None, "{path}");
        }
    }
    #[test]
    fn dataset_files_are_distinguished_from_paths() {
        let parsed = |text: &str| {
            let (name, file) = HubName::of_dataset_file(text)?;
            Some(format!("{} {} {}", name.id, name.revision, file.as_str()))
        };
        assert_eq!(parsed("owner/name/file.jsonl").as_deref(), Some("owner/name main file.jsonl"));
        assert_eq!(parsed("owner/name/data/a b.jsonl").as_deref(), Some("owner/name main data/a b.jsonl"));
        assert_eq!(parsed("owner/name@v1.0/data/x.txt").as_deref(), Some("owner/name v1.0 data/x.txt"));
        assert_eq!(
            parsed("Rowan/hellaswag@refs/convert/parquet/default/validation/0000.parquet").as_deref(),
            Some("Rowan/hellaswag refs/convert/parquet default/validation/0000.parquet")
        );
        assert_eq!(parsed("owner/name@refs/pr/7/x.txt").as_deref(), Some("owner/name refs/pr/7 x.txt"));
        assert_eq!(parsed("owner/name@refs/x.txt").as_deref(), Some("owner/name refs x.txt"));
        for path in [
            "file.jsonl",
            "folder/file.jsonl",
            "/owner/name/file",
            "./owner/name/file",
            "../name/file",
            "owner/name/",
            "owner/name/../file",
            "owner/name/a//b",
            "owner/name@/file",
            "owner/name@refs/convert/parquet",
            "owner/name@refs/convert/parquet/",
            "owner//file",
            "owner/na me/file",
        ] {
            assert_eq!(parsed(path), None, "{path}");
        }
    }
}
