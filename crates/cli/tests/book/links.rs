//! Checks the links between the Markdown files in the repository.
//!
//! Files and headings must exist, and the book's summary must list every chapter.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use crate::{Problem, in_page, markdown_files};

/// The repository's pages on GitHub, relative to a file at its root.
const GITHUB_PAGES: [&str; 2] = ["../../deployments/github-pages", "../../releases/latest"];

/// Checks every link into the repository, and checks that the summary is complete.
pub(crate) fn check(root: &Path) -> Result<(), String> {
    let files = markdown_files(root);
    let mut anchors = HashMap::new();
    let mut wrong = Vec::new();
    let mut in_summary = HashSet::new();
    let summary = root.join("docs/src/SUMMARY.md");
    for file in &files {
        let text = fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        let mut problems = Vec::new();
        for (line, link) in links(&text) {
            match follow(root, file, &link, &mut anchors) {
                Ok(target) => {
                    if *file == summary {
                        in_summary.extend(target);
                    }
                }
                Err(message) => problems.push(Problem { line, message }),
            }
        }
        if !problems.is_empty() {
            wrong.push(in_page(&file.strip_prefix(root).unwrap_or(file).display().to_string(), &problems));
        }
    }
    let book = root.join("docs/src");
    let is_missing =
        |file: &&PathBuf| file.starts_with(&book) && **file != summary && !in_summary.contains(*file);
    for file in files.iter().filter(is_missing) {
        wrong.push(format!(
            "docs/src/SUMMARY.md: {} is missing",
            file.strip_prefix(&book).unwrap_or(file).display()
        ));
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n\n")) }
}

/// Returns the links and images of a page with their lines, including those in HTML.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut links = Vec::new();
    for (event, range) in Parser::new_ext(text, options()).into_offset_iter() {
        let line = text[..range.start].matches('\n').count() + 1;
        match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                links.push((line, dest_url.to_string()));
            }
            Event::Html(html) | Event::InlineHtml(html) => {
                for name in ["href", "src", "srcset"] {
                    links.extend(attributes(&html, name).map(|link| (line, link.to_owned())));
                }
            }
            _ => {}
        }
    }
    links
}

/// Returns the values of an attribute in HTML.
fn attributes<'a>(html: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let pattern = format!(" {name}=\"");
    let ends: Vec<usize> = html.match_indices(&pattern).map(|(at, found)| at + found.len()).collect();
    ends.into_iter().filter_map(|end| html[end..].split('"').next())
}

/// Returns the target of a link in the repository, or `None` if the link leaves it.
fn follow(
    root: &Path,
    file: &Path,
    link: &str,
    anchors: &mut HashMap<PathBuf, HashSet<String>>,
) -> Result<Option<PathBuf>, String> {
    // `crate::Type` is a rustdoc link, which rustdoc checks.
    let is_elsewhere = ["https:", "http:", "mailto:", "data:"].iter().any(|scheme| link.starts_with(scheme));
    if is_elsewhere || link.contains("::") {
        return Ok(None);
    }
    let (path, anchor) = link.split_once('#').map_or((link, None), |(path, anchor)| (path, Some(anchor)));
    if path.starts_with('/') {
        return Err(format!("`{link}` is not a relative link"));
    }
    // GitHub shows the README two levels below the repository's address, so these links match no file.
    if file.parent() == Some(root) && GITHUB_PAGES.contains(&path) {
        return Ok(None);
    }
    let folder = file.parent().unwrap_or(root);
    let target = if path.is_empty() { file.to_owned() } else { normalized(&folder.join(path)) };
    if !target.starts_with(root) || !target.exists() {
        return Err(format!("the target of `{link}` does not exist"));
    }
    let book = root.join("docs/src");
    if file.starts_with(&book) && !target.starts_with(&book) && path.ends_with(".md") {
        return Err(format!(
            "`{link}` leaves the book, where mdBook changes `.md` to `.html`; link to its folder"
        ));
    }
    let Some(anchor) = anchor.filter(|_| target.extension().is_some_and(|end| end == "md")) else {
        return Ok(Some(target));
    };
    let known = anchors.entry(target.clone()).or_insert_with_key(|target| {
        fs::read_to_string(target).map(|text| anchors_of(&text)).unwrap_or_default()
    });
    if known.contains(anchor) {
        return Ok(Some(target));
    }
    Err(format!("the target of `{link}` has no such heading"))
}

/// Resolves `.` and `..` in a path.
fn normalized(path: &Path) -> PathBuf {
    let mut normalized = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                normalized.pop();
            }
            other => normalized.push(other),
        }
    }
    normalized
}

/// Returns the anchors of a page, as mdBook and GitHub name them.
fn anchors_of(text: &str) -> HashSet<String> {
    let mut anchors = HashSet::new();
    let mut heading: Option<String> = None;
    for event in Parser::new_ext(text, options()) {
        match event {
            Event::Start(Tag::Heading { id, .. }) => {
                anchors.extend(id.map(|id| id.to_string()));
                heading = Some(String::new());
            }
            Event::End(TagEnd::Heading(_)) => {
                let name = anchor(&heading.take().unwrap_or_default());
                let numbered = (1..).map(|number| format!("{name}-{number}"));
                let mut names = std::iter::once(name.clone()).chain(numbered);
                anchors.extend(names.find(|name| !anchors.contains(name)));
            }
            Event::Text(part) | Event::Code(part) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&part);
                }
            }
            Event::Html(html) | Event::InlineHtml(html) => {
                anchors.extend(attributes(&html, "id").map(str::to_owned));
            }
            _ => {}
        }
    }
    anchors
}

/// Returns the anchor of a heading: letters and digits in lower case, with hyphens for spaces.
fn anchor(heading: &str) -> String {
    let part = |c: char| match c {
        '-' | '_' => Some(c),
        c if c.is_whitespace() => Some('-'),
        c if c.is_alphanumeric() => Some(c),
        _ => None,
    };
    heading.trim().to_lowercase().chars().filter_map(part).collect()
}

fn options() -> Options {
    Options::ENABLE_TABLES
        | Options::ENABLE_FOOTNOTES
        | Options::ENABLE_STRIKETHROUGH
        | Options::ENABLE_HEADING_ATTRIBUTES
}
