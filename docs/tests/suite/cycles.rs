//! Checks that the files of a crate do not depend on each other in a cycle.
//!
//! Readers of a file can thus read its dependencies first. A re-export (`use crate::{Name}`) is followed to
//! the file that defines the name.
//!
//! **The rule.** File A needs file B when A's code names an item that B defines, in a `use` or by a path such
//! as `super::rows::Rows` or `rows::Rows`. A `pub use` alone needs nothing: it is followed to the file that
//! defines the item. No file needs a `mod.rs` that only declares and re-exports. `mod b;` names no item.
//! Tests (`#[cfg(test)]`) do not count, and neither do methods, which are called without a path.
//!
//! Files are read as text, not compiled. An item is a name after `fn`, `struct` and the like at the left
//! margin. A name that a module does not define this way is assumed to come from a macro there.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Crates that must be free of cycles.
const CRATES: [&str; 20] = [
    "arithmetic",
    "kernels",
    "attention",
    "gpt2",
    "weights",
    "training",
    "generation",
    "interpret",
    "engine",
    "pictures",
    "look",
    "confined",
    "grammar",
    "evaluation",
    "jobs",
    "api",
    "server",
    "cli",
    "python",
    "browser",
];

/// Path of a module in its crate: the names below the root.
type ModulePath = Vec<String>;

/// Source file of a module; a module has two files if a feature selects between them.
struct File {
    path: PathBuf,
    /// Code without comments, strings, tests and imports.
    words: String,
    items: BTreeSet<String>,
    imports: Vec<Import>,
}

/// Import of the form `use path as name`; a glob has the name `*`.
struct Import {
    path: Vec<String>,
    name: String,
    is_reexported: bool,
}

type Modules = BTreeMap<ModulePath, Vec<File>>;

fn is_word(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

/// Returns the code without comments and quoted strings.
fn plain(code: &str) -> String {
    let (mut plain, mut rest) = (String::new(), code);
    while let Some(letter) = rest.chars().next() {
        let character = |length: usize| rest.chars().nth(length) == Some('\'');
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if rest.starts_with("r#\"") {
            rest.find("\"#").map_or(rest.len(), |end| end + 2)
        } else if letter == '"' {
            let mut escaped = false;
            let end = rest.char_indices().skip(1).find(|(_, letter)| {
                let is_end = *letter == '"' && !escaped;
                escaped = *letter == '\\' && !escaped;
                is_end
            });
            end.map_or(rest.len(), |(end, _)| end + 1)
        } else if letter == '\'' && (rest.starts_with("'\\") || character(2)) {
            // A character literal, not a lifetime.
            let start = if rest.starts_with("'\\") { 3 } else { 1 };
            rest.char_indices().skip(start).find(|(_, letter)| *letter == '\'').map_or(1, |(end, _)| end + 1)
        } else {
            plain.push(letter);
            letter.len_utf8()
        };
        rest = &rest[skipped..];
    }
    plain
}

/// Returns the length of the item at the start of `code`, up to its semicolon or closing brace.
fn item_length(code: &str) -> usize {
    let mut depth = 0usize;
    for (at, letter) in code.char_indices() {
        match letter {
            '{' | '(' | '[' => depth += 1,
            '}' | ')' | ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 && (letter == ';' || letter == '}') {
            return at + 1;
        }
    }
    code.len()
}

/// Collects the names in a `use` tree such as `a::{b, c::{self, d as e}, *}`, each with its path.
fn tree(text: &str, before: &[String], found: &mut Vec<(Vec<String>, String)>) {
    let text = text.trim();
    if let Some(open) = text.find('{') {
        let head = [before, &segments(text[..open].trim_end().trim_end_matches("::"))].concat();
        let (mut depth, mut start) = (0, open + 1);
        let inner = &text[..text.rfind('}').unwrap_or(text.len())];
        for (at, letter) in inner.char_indices().skip_while(|(at, _)| *at <= open) {
            match letter {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    tree(&inner[start..at], &head, found);
                    start = at + 1;
                }
                _ => {}
            }
        }
        tree(&inner[start..], &head, found);
    } else if !text.is_empty() {
        let (path, name) = text.split_once(" as ").unwrap_or((text, ""));
        let mut path = [before, &segments(path)].concat();
        if path.last().is_some_and(|last| last == "self") && path.len() > 1 {
            path.pop();
        }
        let last = path.last().cloned().unwrap_or_default();
        found.push((path, if name.is_empty() { last } else { name.trim().to_owned() }));
    }
}

fn segments(path: &str) -> Vec<String> {
    path.split("::").map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

/// Reads a file and the files of its submodules.
fn read(path: &Path, module: &ModulePath, folder: &Path, modules: &mut Modules) {
    let whole = std::fs::read_to_string(path).unwrap();
    let mut file =
        File { path: path.to_owned(), words: String::new(), items: BTreeSet::new(), imports: vec![] };
    // `plain` removes the quoted module paths in attributes, so search the original text.
    let path_of = |name: &str| {
        let (before, _) = whole.split_once(&format!("mod {name};"))?;
        let attributes = &before[before.rfind([';', '}', '{']).map_or(0, |end| end + 1)..];
        let (_, path) = attributes.split_once("path = \"")?;
        Some(path.split('"').next().unwrap_or_default().to_owned())
    };
    let code = plain(&whole);
    let mut rest = code.as_str();
    while let Some(line) = rest.split_inclusive('\n').next() {
        if line.starts_with("#[cfg(test)]") {
            // Skip the item's other attributes and the item itself.
            rest = &rest[line.len()..];
            while rest.starts_with("#[") {
                rest = &rest[rest.find('\n').map_or(rest.len(), |end| end + 1)..];
            }
            rest = &rest[item_length(rest)..];
            continue;
        }
        let mut declared = line.trim_end();
        let is_public = declared.starts_with("pub");
        if let Some(public) = declared.strip_prefix("pub") {
            let public = public
                .strip_prefix('(')
                .and_then(|scope| scope.split_once(')'))
                .map_or(public, |(_, rest)| rest);
            declared = public.trim_start();
        }
        if let Some(used) = declared.strip_prefix("use ") {
            let start = line.len() - line.trim_end().len() + used.len();
            let item = &rest[line.len() - start..];
            let length = item.find(';').unwrap_or(item.len());
            let mut names = Vec::new();
            tree(&item[..length], &[], &mut names);
            let import = |(path, name)| Import { path, name, is_reexported: is_public };
            file.imports.extend(names.into_iter().map(import));
            rest = &item[(length + 1).min(item.len())..];
            continue;
        }
        if let Some(name) = declared.strip_prefix("mod ").and_then(|name| name.strip_suffix(';')) {
            let inner: ModulePath = module.iter().cloned().chain([name.to_owned()]).collect();
            let parent = path.parent().unwrap();
            let usual = [folder.join(format!("{name}.rs")), folder.join(name).join("mod.rs")];
            let explicit = path_of(name).map(|explicit| parent.join(explicit));
            for found in usual.into_iter().chain(explicit).filter(|found| found.exists()) {
                read(&found, &inner, &folder.join(name), modules);
            }
            rest = &rest[line.len()..];
            continue;
        }
        let mut words = declared.split(|letter| !is_word(letter)).filter(|word| !word.is_empty());
        let qualifiers = ["unsafe", "async", "extern", "C", "auto"];
        let mut kind = words.next().unwrap_or_default();
        while qualifiers.contains(&kind) {
            kind = words.next().unwrap_or_default();
        }
        if ["fn", "struct", "enum", "trait", "type", "static", "const", "union", "macro_rules", "mod"]
            .contains(&kind)
        {
            let named = words.find(|word| !["fn", "unsafe", "mut"].contains(word));
            file.items.extend(named.filter(|_| kind != "mod" || declared.ends_with('{')).map(str::to_owned));
        }
        file.words.push_str(line);
        rest = &rest[line.len()..];
    }
    modules.entry(module.clone()).or_default().push(file);
}

/// Returns the files that define the target of a path in a module, each with the item's name.
fn defined(
    modules: &Modules,
    module: &ModulePath,
    path: &[String],
    is_relative: bool,
    seen: &mut BTreeSet<(ModulePath, Vec<String>)>,
) -> BTreeSet<(PathBuf, String)> {
    let mut found = BTreeSet::new();
    if !seen.insert((module.clone(), path.to_vec())) {
        return found;
    }
    let Some((first, rest)) = path.split_first() else { return found };
    let up = || module[..module.len().saturating_sub(1)].to_vec();
    match first.as_str() {
        "crate" => return defined(modules, &vec![], rest, true, seen),
        "super" => return defined(modules, &up(), rest, true, seen),
        "self" => return defined(modules, module, rest, true, seen),
        _ => {}
    }
    let inner: ModulePath = module.iter().cloned().chain([first.clone()]).collect();
    if modules.contains_key(&inner) {
        return defined(modules, &inner, rest, true, seen);
    }
    let mut is_known = false;
    for file in &modules[module] {
        if file.items.contains(first) {
            is_known = true;
            found.insert((file.path.clone(), first.clone()));
            continue;
        }
        let is_own = |import: &&Import| {
            let start = &import.path[0];
            let child = [&module[..], std::slice::from_ref(start)].concat();
            ["crate", "super", "self"].contains(&start.as_str()) || modules.contains_key(&child)
        };
        // All other imports are from other crates.
        is_known |= file.imports.iter().any(|import| import.name == *first && !is_own(&import));
        for import in file.imports.iter().filter(is_own) {
            if import.name == *first {
                is_known = true;
                let path = [&import.path, rest].concat();
                found.extend(defined(modules, module, &path, false, seen));
            } else if import.name == "*" {
                let path = [&import.path[..import.path.len() - 1], path].concat();
                let of_glob = defined(modules, module, &path, false, seen);
                is_known |= !of_glob.is_empty();
                found.extend(of_glob);
            }
        }
    }
    if !is_known && is_relative {
        found.extend(modules[module].iter().map(|file| (file.path.clone(), first.clone())));
    }
    found
}

/// Returns the paths in the code that consist of at least two names.
fn paths(words: &str) -> BTreeSet<Vec<String>> {
    let letters = words.split(|letter: char| !is_word(letter) && letter != ':');
    letters.map(segments).filter(|path| path.len() > 1).collect()
}

/// Maps each file to the files that it depends on, each with one of the items that it uses.
fn needs(name: &str) -> BTreeMap<PathBuf, BTreeMap<PathBuf, String>> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates").join(name).join("src");
    let mut modules = Modules::new();
    let root =
        ["lib.rs", "main.rs"].map(|root| source.join(root)).into_iter().find(|root| root.exists()).unwrap();
    read(&root, &vec![], &source, &mut modules);
    let mut needs = BTreeMap::<_, BTreeMap<_, _>>::new();
    for (module, files) in &modules {
        for file in files {
            let own = needs.entry(file.path.clone()).or_default();
            let words: BTreeSet<&str> = file.words.split(|letter| !is_word(letter)).collect();
            let is_used = |import: &&Import| !import.is_reexported || words.contains(&*import.name);
            let mut named = BTreeSet::new();
            for import in file.imports.iter().filter(|import| import.name != "*").filter(is_used) {
                named.extend(defined(&modules, module, &import.path, false, &mut BTreeSet::new()));
            }
            for glob in file.imports.iter().filter(|import| import.name == "*" && !import.is_reexported) {
                for word in words.iter().filter(|word| !file.items.contains(**word)) {
                    let path = [&glob.path[..glob.path.len() - 1], &[(*word).to_owned()]].concat();
                    let of_glob = defined(&modules, module, &path, false, &mut BTreeSet::new());
                    // A name that the module does not define could be any word in the code.
                    let is_shown = |(path, name): &(PathBuf, String)| {
                        modules.values().flatten().any(|file| file.path == *path && file.items.contains(name))
                    };
                    named.extend(of_glob.into_iter().filter(is_shown));
                }
            }
            for path in paths(&file.words) {
                named.extend(defined(&modules, module, &path, false, &mut BTreeSet::new()));
            }
            own.extend(named.into_iter().filter(|(other, _)| *other != file.path));
        }
    }
    needs
}

/// Returns the shortest cycle through a file, if there is one.
fn cycle(needs: &BTreeMap<PathBuf, BTreeMap<PathBuf, String>>, start: &PathBuf) -> Option<Vec<PathBuf>> {
    let mut paths = vec![vec![start.clone()]];
    let mut seen = BTreeSet::new();
    while !paths.is_empty() {
        let mut longer = Vec::new();
        for path in paths {
            for next in needs[path.last()?].keys() {
                let path = [&path[..], std::slice::from_ref(next)].concat();
                if next == start {
                    return Some(path);
                }
                if seen.insert(next.clone()) {
                    longer.push(path);
                }
            }
        }
        paths = longer;
    }
    None
}

#[test]
fn files_have_no_circular_dependencies() {
    let mut found = BTreeMap::new();
    for name in CRATES {
        let needs = needs(name);
        assert!(needs.len() > 3, "{name}: found only {} files", needs.len());
        for cycle_path in needs.keys().filter_map(|file| cycle(&needs, file)) {
            let short = |path: &Path| {
                let path = path.display().to_string();
                path.split_once("../crates/").map_or(path.clone(), |(_, path)| path.to_owned())
            };
            let steps = cycle_path.windows(2).map(|pair| {
                format!("\n  {} names {} of {}", short(&pair[0]), needs[&pair[0]][&pair[1]], short(&pair[1]))
            });
            let files: BTreeSet<PathBuf> = cycle_path.iter().cloned().collect();
            found.entry(files).or_insert_with(|| steps.collect::<String>());
        }
    }
    let cycles: Vec<&str> = found.values().map(String::as_str).collect();
    assert!(cycles.is_empty(), "files that depend on each other:{}", cycles.join("\n"));
}
