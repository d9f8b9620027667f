//! Names of models of the hub.

/// Names that stand for a repository of the hub.
const SHORT_NAMES: [(&str, &str); 5] = [
    ("gpt2", "openai-community/gpt2"),
    ("gpt2-medium", "openai-community/gpt2-medium"),
    ("gpt2-large", "openai-community/gpt2-large"),
    ("gpt2-xl", "openai-community/gpt2-xl"),
    ("distilgpt2", "distilbert/distilgpt2"),
];

/// A repository of the hub at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HubModel {
    pub(super) id: String,
    pub(super) revision: String,
}

impl std::fmt::Display for HubModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.revision.as_str() {
            "main" => f.write_str(&self.id),
            revision => write!(f, "{}@{revision}", self.id),
        }
    }
}

impl HubModel {
    /// Reads `owner/name`, a short name, or either with `@revision`; `None` for what can only be a path.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (name, revision) = text.split_once('@').unwrap_or((text, "main"));
        let id = match SHORT_NAMES.iter().find(|(short, _)| *short == name) {
            Some((_, id)) => (*id).to_owned(),
            None => name.to_owned(),
        };
        let (owner, repository) = id.split_once('/')?;
        let is_name = |part: &str| {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            !part.is_empty() && !part.starts_with('.') && part.chars().all(is_plain)
        };
        let is_revision = revision.split('/').all(is_name);
        (is_name(owner) && is_name(repository) && is_revision)
            .then(|| Self { id: id.clone(), revision: revision.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_are_told_from_paths() {
        let parsed =
            |text: &str| HubModel::parse(text).map(|model| format!("{} {}", model.id, model.revision));
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
}
