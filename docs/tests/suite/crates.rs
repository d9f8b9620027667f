//! Checks the architecture chapter's statements about the crates: dependencies and forbidden names.
//!
//! The diagram `docs/src/pictures/crates.svg` is generated. `PLACES` sets the positions by hand. The arrows
//! come from the manifests; an arrow that others imply is omitted. The test fails if the diagram is stale.
//! `WRITE_PICTURES=1 cargo test -p candle-gpt2-book --test suite` rewrites the diagram.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Crates, each with the column and the row of its box, and a short description.
const PLACES: [(&str, f64, f64, &str); 23] = [
    ("cli", 1.0, 0.0, "the program"),
    ("python", 2.0, 0.0, "the package"),
    ("browser", 4.4, 1.0, "the page's engine"),
    ("server", 3.4, 1.0, "connections"),
    ("api", 3.2, 2.0, "requests, answers"),
    ("evaluation", 0.0, 3.0, "benchmarks"),
    ("jobs", 1.0, 3.0, "files to folders"),
    ("grammar", 2.3, 3.0, "what may follow"),
    ("compression", 3.2, 3.0, "bytes and back"),
    ("look", 4.2, 3.0, "looks as reports"),
    ("training", 0.0, 4.0, "steps, adapters"),
    ("engine", 1.1, 4.0, "name to model"),
    ("pictures", 2.7, 4.0, "pages, drawings"),
    ("confined", 3.7, 4.0, "limits, templates"),
    ("stories", 0.0, 5.0, "the built-in model"),
    ("generation", 1.1, 5.0, "tokens to tokens"),
    ("weights", 2.2, 5.0, "files to model"),
    ("interpret", 4.4, 5.0, "looking inside"),
    ("web", 3.4, 5.0, "the page, parts"),
    ("gpt2", 2.2, 6.0, "the model"),
    ("attention", 2.2, 7.0, "attention layers"),
    ("kernels", 2.2, 8.0, "layers on tensors"),
    ("arithmetic", 2.2, 9.0, "loops on slices"),
];
/// Crates that only tests use.
const TEST_ONLY: [&str; 2] = ["testing", "book"];

/// Distance between two columns in pixels; `ROW` is the distance between rows, `BOX` the box size.
const COLUMN: f64 = 158.0;
const ROW: f64 = 78.0;
const BOX: (f64, f64) = (136.0, 44.0);
const MARGIN: f64 = 16.0;

/// Direct dependencies of each crate, by folder name.
type Needs = BTreeMap<String, BTreeSet<String>>;

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the workspace crates that each manifest lists under `[dependencies]`.
fn needs() -> Needs {
    let folder_of = |package: &str| match package.strip_prefix("candle-gpt2") {
        Some("") => Some("gpt2".to_owned()),
        Some(rest) => rest.strip_prefix('-').map(str::to_owned),
        None => None,
    };
    let crates = std::fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let mut needs = Needs::new();
    for folder in crates.chain(["models/stories", "web"].map(|folder| root().join(folder))) {
        let Ok(manifest) = std::fs::read_to_string(folder.join("Cargo.toml")) else { continue };
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        // The fuzz targets form their own workspace.
        if manifest.contains("[workspace]") || TEST_ONLY.contains(&&*name) {
            continue;
        }
        let mut is_wanted = false;
        let own = needs.entry(name).or_default();
        for line in manifest.lines() {
            if let Some(section) = line.strip_prefix('[') {
                is_wanted = section.ends_with("dependencies]") && !section.contains("dev-");
            } else if is_wanted {
                own.extend(folder_of(line.split(['.', ' ', '=']).next().unwrap_or_default()));
            }
        }
    }
    needs
}

/// Returns the direct and indirect dependencies of a crate.
fn all_dependencies(needs: &Needs, name: &str) -> BTreeSet<String> {
    let direct = &needs[name];
    direct
        .iter()
        .flat_map(|other| all_dependencies(needs, other).into_iter().chain([other.clone()]))
        .collect()
}

/// Returns the arrows that no other arrows imply.
fn arrows(needs: &Needs) -> Vec<(String, String)> {
    let mut arrows = Vec::new();
    for (name, direct) in needs {
        for other in direct {
            let is_implied = direct.iter().any(|between| all_dependencies(needs, between).contains(other));
            arrows.extend((!is_implied).then(|| (name.clone(), other.clone())));
        }
    }
    arrows
}

fn diagram(needs: &Needs) -> String {
    let middle =
        |column: f64, row: f64| (MARGIN + BOX.0 / 2.0 + column * COLUMN, MARGIN + BOX.1 / 2.0 + row * ROW);
    let center = |name: &str| {
        let found = PLACES.iter().find(|(known, ..)| *known == name);
        found.map(|(_, column, row, _)| middle(*column, *row)).unwrap()
    };
    let (width, height) = (2.0 * MARGIN + BOX.0 + 4.4 * COLUMN, 2.0 * MARGIN + BOX.1 + 9.0 * ROW);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"sans-serif\" \
         text-anchor=\"middle\">\n<title>The crates; an arrow points to what a crate needs</title>\n\
         <defs><marker id=\"tip\" viewBox=\"0 0 8 8\" refX=\"8\" refY=\"4\" markerWidth=\"7\" markerHeight=\"7\" orient=\"auto\">\
         <path d=\"M0 0L8 4L0 8z\" fill=\"#667\"/></marker></defs>\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#fff\"/>\n"
    );
    for (from, to) in arrows(needs) {
        let ((x, y), (to_x, to_y)) = (center(&from), center(&to));
        assert!(y < to_y, "{from} needs {to} but is not above it: move one of them in PLACES");
        let (start, end) = (y + BOX.1 / 2.0, to_y - BOX.1 / 2.0);
        // Arrows that span several rows also end at the center of a box's upper edge.
        writeln!(
            svg,
            "<path d=\"M{x:.0} {start:.0}L{to_x:.0} {end:.0}\" stroke=\"#667\" fill=\"none\" marker-end=\"url(#tip)\"><title>{from} \
             needs {to}</title></path>"
        )
        .unwrap();
    }
    for (name, column, row, what) in PLACES {
        let (x, y) = middle(column, row);
        let (left, top) = (x - BOX.0 / 2.0, y - BOX.1 / 2.0);
        writeln!(
            svg,
            "<rect x=\"{left:.0}\" y=\"{top:.0}\" width=\"{:.0}\" height=\"{:.0}\" rx=\"6\" fill=\"#eef2fb\" stroke=\"#446\"/>\
             <text x=\"{x:.0}\" y=\"{:.0}\" font-size=\"15\" font-weight=\"bold\" fill=\"#223\">{name}</text>\
             <text x=\"{x:.0}\" y=\"{:.0}\" font-size=\"12\" fill=\"#446\">{what}</text>",
            BOX.0,
            BOX.1,
            y - 3.0,
            y + 14.0,
        )
        .unwrap();
    }
    svg + "</svg>\n"
}

#[test]
fn crate_diagram_matches_the_manifests() {
    let needs = needs();
    let placed: BTreeSet<&str> = PLACES.iter().map(|(name, ..)| *name).collect();
    let existing: BTreeSet<&str> = needs.keys().map(String::as_str).collect();
    assert_eq!(placed, existing, "PLACES lists each crate once");

    let path = root().join("docs/src/pictures/crates.svg");
    let diagram = diagram(&needs);
    if std::env::var_os("WRITE_PICTURES").is_some() {
        std::fs::write(&path, &diagram).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let command = "WRITE_PICTURES=1 cargo test -p candle-gpt2-book --test suite";
    assert!(
        found == diagram,
        "docs/src/pictures/crates.svg does not match the manifests; rewrite it with {command}"
    );
}

/// Crates, the names that their code must not contain, and the reason.
const NEVER: [(&[&str], &[&str], &str); 5] = [
    (
        &["training"],
        &["candle_gpt2_engine", "candle_gpt2_generation", "candle_gpt2_pictures", "plotters"],
        "it must not use model names, texts or pictures",
    ),
    (&["arithmetic", "pictures"], &["candle_core", "candle_nn"], "it must not use tensors"),
    (
        &["attention", "gpt2", "generation", "interpret", "pictures", "grammar", "api", "compression"],
        &["std::fs", "File::open"],
        "it must not open files",
    ),
    (
        &[
            "kernels",
            "attention",
            "gpt2",
            "weights",
            "generation",
            "interpret",
            "engine",
            "look",
            "grammar",
            "compression",
        ],
        &["Instant::now", "SystemTime::now"],
        "it must not read the clock",
    ),
    (
        &["grammar", "api", "compression", "engine", "look"],
        &["std::net", "tokio", "hyper"],
        "it must not open connections",
    ),
];

#[test]
fn crates_avoid_forbidden_names() {
    for (crates, words, why) in NEVER {
        for name in crates {
            let mut folders = vec![root().join("crates").join(name).join("src")];
            while let Some(folder) = folders.pop() {
                for entry in std::fs::read_dir(&folder).unwrap() {
                    let path = entry.unwrap().path();
                    if path.is_dir() {
                        folders.push(path);
                        continue;
                    }
                    // This file reads the clock for a checkpoint's `max_time` if the caller passes no clock.
                    if path.ends_with("engine/src/clock.rs") {
                        continue;
                    }
                    // These files read the clock for timeouts, in case the Hub does not respond.
                    if path.ends_with("engine/src/hub/client.rs") || path.ends_with("engine/src/hub/http.rs")
                    {
                        continue;
                    }
                    // This file limits the fraction of the time that slow grammars take.
                    if path.ends_with("grammar/src/process.rs") {
                        continue;
                    }
                    // This file contains only tests; they write the API description on request.
                    if path.ends_with("api/src/description.rs") {
                        continue;
                    }
                    // Skip the pictures and pages that are next to the code.
                    if path.extension().is_none_or(|ending| ending != "rs") {
                        continue;
                    }
                    let code = std::fs::read_to_string(&path).unwrap();
                    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
                    let named =
                        lines.flat_map(|line| words.iter().filter(move |word| line.contains(**word))).next();
                    assert_eq!(named, None, "{}: {why}", path.display());
                }
            }
        }
    }
}
